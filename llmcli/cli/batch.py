"""`llmcli batch`: many prompts in one run, one line of JSON for each; what a batch will take, and what it took.

A line has the keys of `generate --json` and its id, or OpenAI's batch form.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from llmcli.batch.input import LineId
from llmcli.batch.output import InOrder, Journal, holds_something
from llmcli.batch.run import BatchScheduler, BatchUsage, Progress, RowsOverTime, estimate_seconds, run_batch
from llmcli.batch.shards import find_shards, load_record, merge_shards, record_path, refuse_other_settings, save_record
from llmcli.cli import lazy, shared
from llmcli.cli.batch_job import MERGE, PIPE, BatchJob, BatchOptions, locked, open_job, resolve_output
from llmcli.cli.command import given_options
from llmcli.cli.constrained_texts import CompletenessNotice, SchemaOptions, Schemas
from llmcli.cli.lines import Task
from llmcli.cli.output.base import draft_rows, sample_json
from llmcli.cli.progress import progress as draw_progress
from llmcli.cli.run import NGRAM, OFF, check_run, loaded_objects_set_aside, open_run
from llmcli.cli.settings import running
from llmcli.cli.targets import open_target
from llmcli.cli.terminal import fact_lines, json_line, terminal
from llmcli.cli.units import counted, estimated_duration, size
from llmcli.engine.request import Failed, Finished
from llmcli.errors import EXIT_INTERRUPTED, FailedLinesError, UsageError
from llmcli.openai_body import finish_reason_of
from llmcli.resources import install_command

# Where a batch runs: in this process, or on the workers of a Ray cluster; and what such a worker opens.

MIXED_CARDS = "mixed cards"  # the device in a record
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
LEAST_RAY = (2, 60)
_INDEX_OF_CARD = re.compile(r" \(cuda:\d+\)")
# Ray reads these when it is imported. It would report its use to its makers, and listen at the machine's public address
# where loopback is enough: the variable against that is named after the systems where loopback is Ray's default.
_RAY_DEFAULTS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Tries to connect, half a minute each; usually 20. A start on this machine may need some, a cluster that runs does not.
_TRIES = {"RAY_NUM_REDIS_GET_RETRIES": "1"}
# It would print what it hears of dead workers on stdout, between results. The scheduler tells of them on stderr.
_QUIET = {"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "^"}


@dataclass(frozen=True)
class BatchEngine:
    """What runs a batch. `request_of` makes what its scheduler takes. `device` is what its texts depend on.

    With `counts_ended` it says nothing of single tokens, so those of ended texts are counted. `note` begins the text
    at the end of the bar.
    """

    scheduler: BatchScheduler[Any]
    request_of: Callable[[Task], Any]
    device: str
    load_seconds: float
    counts_ended: bool = False
    note: Callable[[], str] = str
    draft_usage: Callable[[], lazy.drafts.DraftUsage | None] = lambda: None


@contextmanager
def engine_here(job: BatchJob) -> Iterator[BatchEngine]:
    """This process, with the model that it loads. Raises: LLMCliError and its subclasses"""
    run, num_prompts = job.prompts.run, len(job.todo)
    loaded = run.load(job.most_rows or min(num_prompts, lazy.runners.MAX_ROWS), host_rows=job.most_rows or 1)
    # Nobody waits for the next token, so new prompts are not limited by time, and equal runs take equal steps.
    scheduler = lazy.scheduler.Scheduler(
        loaded.runner, run.session.tokenizer, wait_seconds=math.inf, drafting=loaded.drafting
    )
    with loaded_objects_set_aside():
        yield BatchEngine(
            scheduler,
            partial(job.prompts.request_of, run_seed=run.seed),
            kind_of_device(loaded.runner.description),
            loaded.load_seconds,
            draft_usage=lambda: loaded.draft_usage,
        )


@contextmanager
def engine_on_ray(job: BatchJob, options: shared.RunOptions) -> Iterator[BatchEngine]:
    """The workers of a Ray cluster. Raises: LLMCliError and its subclasses"""
    files, run = job.prompts.options, job.prompts.run
    assert files.ray is not None
    device = job.record.runner or None
    if device is not None and (device == MIXED_CARDS) != files.mixed_cards:
        how = "without --mixed-cards" if files.mixed_cards else "with --mixed-cards"
        raise UsageError(f"{job.output} was made {how}: run {how} again, or name another output")
    where = lazy.on_ray.connect(files.ray)
    scheduler = lazy.on_ray.RayScheduler(
        lazy.on_ray.Work(
            partial(open_far_engine, found_everywhere(options), files.num_rows),
            model_files(run.session.model.checkpoint.folder),
            None if files.mixed_cards else device,
            min(files.workers or len(job.todo), len(job.todo)),
            on_cards=options.devices.device != "cpu",
            mixes_cards=files.mixed_cards,
        ),
        terminal.warn,
    )
    try:
        terminal.info(f"Starting workers: {where}")
        facts = scheduler.wait_for_worker()
        terminal.info(f"{run.session.name}: {facts.device}, context {run.context}, seed {run.seed}")
        yield BatchEngine(
            scheduler,
            partial(job.prompts.asked_of, run_seed=run.seed),
            MIXED_CARDS if files.mixed_cards else facts.device,
            facts.load_seconds,
            counts_ended=True,
            note=lambda: f"{counted(scheduler.num_workers, 'worker')}, ",
        )
    finally:
        scheduler.close()


def require_ray(address: str, options: shared.RunOptions) -> shared.RunOptions:
    """The options of a driver, which has no device of its own.

    Raises: UsageError where the extra is not installed, and for what Ray decides
    """
    for name, value in (_RAY_DEFAULTS if address == shared.AUTO else _RAY_DEFAULTS | _TRIES).items():
        os.environ.setdefault(name, value)
    os.environ.update(_QUIET)
    try:
        is_good = lazy.on_ray.ray_version() >= LEAST_RAY
    except ImportError:  # there is none, or it is too old for what is imported
        is_good = False
    if not is_good:
        least = ".".join(map(str, LEAST_RAY))
        raise UsageError(f"--ray needs Ray {least} or later: run `{install_command('llmcli[ray]')}`")
    device = options.devices.device
    if device.startswith("cuda:"):
        raise UsageError(f"--ray and --device {device} cannot be combined: Ray chooses the card; use --device cuda")
    return replace(options, devices=shared.DeviceOptions(device="cpu"), draft=OFF)


def found_everywhere(options: shared.RunOptions) -> shared.RunOptions:
    """The options for workers, whose current folder is another: paths from the root. A hub id stays."""

    def whole(name: str) -> str:
        return str(Path(name).resolve()) if Path(name).exists() else name

    choices = shared.parse_adapters(options.adapter)
    draft = options.draft
    return replace(
        options,
        model=None if options.model is None else whole(options.model),
        adapter=[replace(choice, name=whole(choice.name)).text for choice in choices] or None,
        draft=draft if draft in (OFF, NGRAM, shared.AUTO) else whole(draft),
    )


def open_far_engine(options: shared.RunOptions, num_rows: int | None) -> lazy.worker.OpenedEngine:
    """A worker's engine. Requests bring their own sampler, so all that counts here is model and device.

    Raises: LLMCliError and its subclasses
    """
    os.environ.setdefault(_BLAS_THREADS, "1")  # as the command line does
    terminal.is_quiet = True
    request = check_run(options, {}, shared.SamplerOptions(seed=0), None)
    run = open_run(request, options.model)
    loaded = run.load(num_rows, host_rows=num_rows or 1)
    scheduler = lazy.scheduler.Scheduler(
        loaded.runner, run.session.tokenizer, wait_seconds=math.inf, drafting=loaded.drafting
    )
    gc.collect()
    gc.freeze()
    device, files = kind_of_device(loaded.runner.description), model_files(run.session.model.checkpoint.folder)
    facts = lazy.worker.EngineFacts(device, loaded.load_seconds, files, scheduler.usage.num_rows)
    return lazy.worker.OpenedEngine(scheduler, Schemas(run.session).hold, facts)


def kind_of_device(description: str) -> str:
    """What texts depend on: not which of a machine's equal cards it is."""
    return _INDEX_OF_CARD.sub("", description)


def model_files(folder: Path) -> dict[str, str]:
    """What tells a model's files on one machine from those on another: their bytes, and of weights the size."""
    return {
        name: f"{state.size} bytes"
        if name.endswith(".safetensors")
        else hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16]
        for name, state in sorted(lazy.folder.SourceState.record(folder).files.items())
        if name.endswith((".json", ".jinja", ".model", ".txt", ".safetensors"))
    }


_SECONDS_BETWEEN_DRAWINGS = 0.1


def result_json(task: Task, event: Finished | Failed, seed: int, model: str, load_seconds: float) -> dict[str, Any]:
    """The object of one prompt."""
    line = task.line
    if line.form != "native":
        return _openai_json(task, event, seed, model)
    if isinstance(event, Failed):
        return {"id": line.id, "error": {"message": str(event.error)}}
    facts = {"prompt_token_ids": list(task.token_ids), "seed": seed, "model": model}
    calls = {key: value for key, value in task.message(event, seed).items() if key == "tool_calls"}
    return {"id": line.id, **sample_json(event, load_seconds), **calls, **facts}


def _openai_json(task: Task, event: Finished | Failed, seed: int, model: str) -> dict[str, Any]:
    line, num_prompt_tokens = task.line, len(task.token_ids)
    common = {"id": f"batch_req_{line.number}", "custom_id": line.id}
    if isinstance(event, Failed):
        return {**common, "response": None, "error": {"code": "failed", "message": str(event.error)}}
    is_chat = line.form == "chat"
    message = task.message(event, seed)
    content: dict[str, Any] = {"message": message} if is_chat else {"text": event.text}
    reason = finish_reason_of(event.finish_reason, len(message.get("tool_calls", ())))
    num_new_tokens = len(event.token_ids)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{line.number}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_new_tokens,
            "total_tokens": num_prompt_tokens + num_new_tokens,
        },
    }
    return {**common, "response": {"status_code": 200, "body": body}, "error": None}


def show_check(job: BatchJob) -> None:
    """Print counts, memory and time of the remaining prompts on standard output.

    Raises: InsufficientMemoryError if the model does not fit.
    """
    if not job.tasks:  # a shard of more shards than prompts
        terminal.write(fact_lines({"prompts": "0"}.items(), 15, sys.stdout))
        return
    run = job.prompts.run
    lengths = [len(task.token_ids) for task in job.tasks]
    longest = max(job.tasks, key=lambda task: len(task.token_ids))
    sizes = [(len(task.token_ids), task.max_new_tokens or run.context - len(task.token_ids)) for task in job.todo]
    planned = _plan(job)
    memory, predictor, num_rows = planned.memory, planned.predictor, planned.num_rows
    seconds = estimate_seconds(predictor, sizes, num_rows)
    needed = "unknown" if seconds is None else estimated_duration(seconds)
    facts = {
        "prompts": f"{len(lengths)}" + (f", {len(sizes)} left to run" if len(sizes) < len(lengths) else ""),
        "prompt tokens": f"{sum(lengths)}, the longest prompt {max(lengths)} (line {longest.line.number})",
        "new tokens": f"at most {sum(new for _, new in sizes)}",
        "memory": f"{size(memory.total_bytes)} needed, {size(memory.available_bytes)} free",
        "time": f"{needed}: estimated for texts of full length, in {counted(num_rows, 'row')}",
    }
    terminal.write(fact_lines(facts.items(), 15, sys.stdout))


def _plan(job: BatchJob) -> lazy.subject.TargetPlan:
    """The memory and the speed of the rows that the run will have."""
    run = job.prompts.run
    subject = lazy.subject.Subject(run.session.name, run.session.model, None)
    target = open_target(run.devices, subject)
    # On a card more rows than fit with a full context share the memory; the plan is for those that fit.
    most = job.most_rows if run.devices.card is None else None
    planned = target.plan(subject, context=run.context, num_rows=most)
    limit = job.most_rows or max(len(job.todo), 1)
    return planned if planned.num_rows <= limit else target.plan(subject, context=run.context, num_rows=limit)


def show_stats(
    progress: Progress, usage: BatchUsage, rows: RowsOverTime, engine: BatchEngine, run_seconds: float
) -> None:
    """Print what the run took, on stderr."""
    mean_rows, here = usage.row_steps / usage.steps if usage.steps else 0.0, not engine.counts_ended
    facts = {
        "prompts": f"{progress.num_finished} finished, {progress.num_failed} failed",
        "load": f"{engine.load_seconds:.2f} s",
        "run": f"{run_seconds:.2f} s",
        "new tokens": f"{progress.num_tokens}, {progress.num_tokens / run_seconds:.1f} tokens/s",
        "prompt tokens": f"{usage.prompt_tokens_computed} computed, {usage.prompt_tokens_shared} shared",
        "rows in use": f"{mean_rows:.1f} {f'of {usage.num_rows}' if here else 'of each worker'} on average",
        "rows over time": f"{' '.join(f'{mean:.3g}' for mean in rows.means(10))} in tenths of the run",
        "preemptions": f"{usage.preemptions}",
        **draft_rows(engine.draft_usage()),
    }
    for name, text in facts.items():
        terminal.show(f"{name:<15}{text}\n")


Open = Callable[[BatchJob], AbstractContextManager[BatchEngine]]


def run_job(job: BatchJob, open_engine: Open = engine_here, *, require_complete: bool = False) -> None:
    """Run the remaining prompts.

    Raises: LLMCliError and its subclasses; FailedLinesError if prompts failed; typer.Exit after a Ctrl-C or SIGTERM;
            UnfinishedTextError with `require_complete` if a text with a schema was cut, now or earlier
    """
    progress, completeness = Progress(), CompletenessNotice()
    done, cut = job.written.done, job.written.cut
    if done:  # texts of an earlier run
        kept = [task for task in job.tasks if task.grammar is not None and task.line.id in done]
        completeness.count_kept([cut.get(task.line.id) for task in kept])
    if job.output is not None and not len(job.todo):
        with _Sink(job) as sink:
            sink.finish()
        terminal.info(f"Nothing to do: {job.output} holds all {len(job.tasks)} results")
        completeness.show_count()
    else:
        try:  # Ctrl-C may also come while files are closed
            _run(job, open_engine, progress, completeness)
        except (KeyboardInterrupt, SystemExit) as stopped:  # SystemExit by SIGTERM, with Ray
            ended = progress.num_finished + progress.num_failed
            remedy = "" if job.output is None else "; run the same command again to resume"
            terminal.info(f"Interrupted: {ended} of {len(job.todo)} prompts are done{remedy}")
            code = EXIT_INTERRUPTED if isinstance(stopped, KeyboardInterrupt) else int(stopped.code or 0)
            raise typer.Exit(code) from None
    _end(job, progress, completeness, require_complete=require_complete)


def _run(job: BatchJob, open_engine: Open, progress: Progress, completeness: CompletenessNotice) -> None:
    run, num_prompts, rows = job.prompts.run, len(job.todo), RowsOverTime()
    with open_engine(job) as engine, _Sink(job) as sink:
        _settle_record(job, engine.device)
        _say_how_many(num_prompts, engine)
        start_time = time.perf_counter()

        def take(task: Task, event: Finished | Failed) -> None:
            seed = run.seed if task.line.seed is None else task.line.seed
            value = result_json(task, event, seed, run.model, engine.load_seconds)
            sink.put(task.line.id, json_line(value))
            if isinstance(event, Finished):
                completeness.count(event)
                if engine.counts_ended:
                    progress.num_tokens += len(event.token_ids)

        def note() -> str:
            return f"{engine.note()}{progress.num_tokens / (time.perf_counter() - start_time):.1f} tokens/s"

        last_drawing = 0.0
        beside_lines = job.output is None
        with draw_progress(run.session.name, "prompts", note, beside_lines=beside_lines) as on_progress:

            def on_step() -> None:
                nonlocal last_drawing
                usage = engine.scheduler.usage
                rows.note(time.perf_counter() - start_time, usage.steps, usage.row_steps)
                if time.monotonic() - last_drawing >= _SECONDS_BETWEEN_DRAWINGS:
                    last_drawing = time.monotonic()
                    on_progress(progress.num_finished + progress.num_failed, num_prompts)

            run_batch(engine.scheduler, job.todo, engine.request_of, take, progress, on_step)
        sink.finish()
        run_seconds = time.perf_counter() - start_time
        if job.output is not None and not progress.num_failed:
            terminal.info(f"Done: {job.output} holds all {len(job.tasks)} results")
        completeness.show_count()
        if job.prompts.options.stats is not None:
            show_stats(progress, engine.scheduler.usage, rows, engine, run_seconds)


def _say_how_many(num_prompts: int, engine: BatchEngine) -> None:
    num_rows = engine.scheduler.usage.num_rows
    how = "one at a time" if num_rows == 1 else f"{num_rows} side by side"
    if engine.counts_ended:
        how += " on each worker"
    terminal.info(f"{counted(num_prompts, 'prompt')}, {how}")


def _end(job: BatchJob, progress: Progress, completeness: CompletenessNotice, *, require_complete: bool) -> None:
    """Raises: FailedLinesError if prompts failed; UnfinishedTextError, see `run_job`"""
    if progress.num_failed:
        where = "the output" if job.output is None else str(job.output)
        again = "" if job.output is None else "; run the same command again to retry them"
        raise FailedLinesError(
            f"{progress.num_failed} of {len(job.todo)} prompts failed; see their lines in {where}{again}"
        )
    if require_complete:
        completeness.require_complete()


def _settle_record(job: BatchJob, runner: str) -> None:
    """Write down the settings before the first line, or check that existing lines come from this device.

    Raises: UsageError for another device, OutputError.
    """
    record = job.record
    if job.output is None:
        return
    if record.runner:
        refuse_other_settings(job.output, {"device": record.runner}, {"device": runner})
    if not record.runner or record.is_sorted:
        save_record(job.output, replace(record, runner=runner, is_sorted=False))


class _Sink:
    """Where lines go: the output's file or standard output, each as it comes or in the order of the input.

    What is held back is written at the end, even if the run ends early.
    """

    def __init__(self, job: BatchJob):
        self._job = job
        self._journal = None if job.output is None else Journal(job.output, job.written)
        options, done = job.prompts.options, job.written.done
        todo = (line_id for line_id in job.ids if line_id not in done)
        # On many machines a line may be late by minutes. A file is sorted at the end, so nothing needs to wait for it.
        holds_back = options.ordered and (options.ray is None or self._journal is None)
        self._in_order = InOrder(todo, self._write) if holds_back else None

    def put(self, line_id: LineId, line: str) -> None:
        """Take the line of a prompt."""
        if self._in_order is None:
            self._write(line_id, line)
        else:
            self._in_order.put(line_id, line)

    def finish(self) -> None:
        """All prompts have a line: sort them if asked for, and always in a shard."""
        job = self._job
        if self._journal is None or not (job.prompts.options.ordered or job.prompts.options.shard):
            return
        self._journal.sort(job.ids)
        assert job.output is not None
        # A shard without prompts has had no runner, and so no record yet.
        record = load_record(job.output) if record_path(job.output).exists() else job.record
        if not record.is_sorted:
            save_record(job.output, replace(record, is_sorted=True))

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._in_order is not None:
                self._in_order.flush()
        finally:
            if self._journal is not None:
                self._journal.close()

    def _write(self, line_id: LineId, line: str) -> None:
        if self._journal is None:
            terminal.write(line)
        else:
            self._journal.append(line_id, line)


def merge(files: BatchOptions, given: Sequence[str]) -> None:
    """Merge the shards of OUT. `given` names the options on the command line, which are refused.

    Raises: UsageError, OutputError; FailedLinesError if prompts failed
    """
    if given:
        raise UsageError(f"batch merge takes OUT alone; remove {', '.join(given)}")
    if files.output == PIPE:
        raise UsageError(f"OUT is {PIPE}, expected a file: batch merge reads its shards")
    output = resolve_output(files.output)
    holds_something(output)  # refuses a folder that is missing
    with locked(output):
        merged = merge_shards(output, find_shards(output))
    shown = f"{counted(merged.num_results, 'result')} of {counted(merged.num_shards, 'shard')}"
    terminal.info(f"Merged: {output} holds {shown}")
    if merged.num_failed:
        again = f"to retry them, remove {output.name}, run their shards again and merge again"
        raise FailedLinesError(
            f"{merged.num_failed} of {merged.num_results} prompts failed; see their lines in {output}; {again}"
        )


def batch(
    *,
    files: BatchOptions,
    options: shared.RunOptions,
    stopping: shared.StoppingOptions,
    numbers: shared.SamplingNumbers,
    sampler: shared.SamplerOptions,
    schema: SchemaOptions,
    messages: shared.MessageOptions,
) -> None:
    """Run many prompts from a file and write one line of JSON for each.

    Run it again to resume: prompts that have a result in OUT are skipped.

    Examples:

    llmcli batch prompts.jsonl results.jsonl -m my-model

    llmcli batch --text - - < prompts.txt | jq -r .text
    """
    if files.source == MERGE:
        groups = (files, options, stopping, sampler, schema)
        given = [name for group in groups for name in given_options(group) if name not in ("--source", "--output")]
        drawn = [name for name, value in numbers.items() if value is not None and name not in running.configured]
        merge(files, [*given, *(f"--{name.replace('_', '-')}" for name in drawn)])
        return
    options = replace(options, model=shared.model_or_default(options.model))
    grammar = schema.read(ignore_eos=stopping.ignore_eos)
    open_engine: Open = engine_here if files.ray is None else partial(engine_on_ray, options=options)
    here = options if files.ray is None else require_ray(files.ray, options)
    request = check_run(here, numbers, sampler, stopping.stop, ignore_eos=stopping.ignore_eos)
    with open_job(files, request, options.model, stopping.max_new_tokens, grammar) as job:
        if files.check:
            show_check(job)
        else:
            run_job(job, open_engine, require_complete=schema.require_complete)
