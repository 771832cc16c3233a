"""Runs a batch whose input is checked: loads the model, writes each result as it comes, and says how it ended."""

from __future__ import annotations

import math
import time
from functools import partial

import typer

from llmcli.batch.input import LineId
from llmcli.batch.output import InOrder, Journal
from llmcli.batch.record import Record, refuse_other_settings, save_record
from llmcli.batch.run import Progress, RowsOverTime, run_batch
from llmcli.cli import lazy
from llmcli.cli.batch_job import Job
from llmcli.cli.batch_prompts import Task
from llmcli.cli.batch_report import show_stats
from llmcli.cli.held_texts import CompletenessNotice
from llmcli.cli.output.batch import result_json
from llmcli.cli.progress import progress as draw_progress
from llmcli.cli.run import loaded_objects_set_aside
from llmcli.cli.terminal import json_line, terminal
from llmcli.engine.events import Failed, Finished
from llmcli.errors import EXIT_INTERRUPTED, FailedLinesError

_SECONDS_BETWEEN_DRAWINGS = 0.1


def run_job(job: Job, *, require_complete: bool = False) -> None:
    """Run what is still to be run.

    Raises: LLMCliError and its subclasses; FailedLinesError if prompts failed; typer.Exit after a Ctrl-C;
            UnfinishedTextError with `require_complete` if a text that is held to a schema was cut, now or earlier
    """
    progress, rows, completeness = Progress(), RowsOverTime(), CompletenessNotice()
    _count_kept(job, completeness)
    if job.output is not None and not job.todo:
        _finish_again(job)
        completeness.show_count()
        _end(job, progress, completeness, require_complete=require_complete)
        return
    run, options, num_prompts = job.prompts.run, job.prompts.options, len(job.todo)
    loaded = run.load(job.most_rows or min(num_prompts, lazy.MAX_ROWS), host_rows=job.most_rows or 1)
    _settle_record(job, loaded.runner.description)
    # Nobody waits for the next token, so newcomers' prompts are not rationed by time; and equal runs take equal steps.
    scheduler = lazy.Scheduler(loaded.runner, run.session.tokenizer, wait_seconds=math.inf, drafting=loaded.drafting)
    _say_how_many(num_prompts, scheduler.usage.num_rows)
    start_time = time.perf_counter()
    with _Sink(job) as sink, loaded_objects_set_aside():

        def take(task: Task, event: Finished | Failed) -> None:
            seed = run.seed if task.line.seed is None else task.line.seed
            value = result_json(task.line, event, task.token_ids, seed, run.model, loaded.load_seconds)
            sink.put(task.line.id, json_line(value))
            if isinstance(event, Finished):
                completeness.count(event)

        def rate() -> str:
            return f"{progress.num_tokens / (time.perf_counter() - start_time):.1f} tokens/s"

        last_drawing = 0.0
        try:
            beside_lines = job.output is None
            with draw_progress(run.session.name, "prompts", rate, beside_lines=beside_lines) as on_progress:

                def on_step() -> None:
                    nonlocal last_drawing
                    usage = scheduler.usage
                    rows.note(time.perf_counter() - start_time, usage.steps, usage.row_steps)
                    if time.monotonic() - last_drawing >= _SECONDS_BETWEEN_DRAWINGS:
                        last_drawing = time.monotonic()
                        on_progress(progress.num_finished + progress.num_failed, num_prompts)

                request_of = partial(job.prompts.request_of, run_seed=run.seed)
                run_batch(scheduler, job.todo, request_of, take, progress, on_step)
            sink.finish()
        except KeyboardInterrupt:
            ended = progress.num_finished + progress.num_failed
            remedy = "" if job.output is None else "; run the same command again to resume"
            terminal.info(f"Interrupted: {ended} of {num_prompts} prompts are done{remedy}")
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if job.output is not None and not progress.num_failed:
        terminal.info(f"Done: {job.output} holds all {len(job.tasks)} results")
    completeness.show_count()
    if options.stats is not None:
        show_stats(progress, scheduler.usage, rows, loaded, time.perf_counter() - start_time)
    _end(job, progress, completeness, require_complete=require_complete)


def _say_how_many(num_prompts: int, num_rows: int) -> None:
    counted = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
    how = "one at a time" if num_rows == 1 else f"{num_rows} side by side"
    terminal.info(f"{counted}, {how}")


def _count_kept(job: Job, completeness: CompletenessNotice) -> None:
    """Count what an earlier run has written."""
    done = job.written.done
    kept = [task for task in job.tasks if task.grammar is not None and task.line.id in done]
    completeness.count_kept([job.written.cut.get(task.line.id) for task in kept])


def _finish_again(job: Job) -> None:
    with _Sink(job) as sink:
        sink.finish()
    terminal.info(f"Nothing to do: {job.output} holds all {len(job.tasks)} results")


def _end(job: Job, progress: Progress, completeness: CompletenessNotice, *, require_complete: bool) -> None:
    """Raises: FailedLinesError if prompts failed; UnfinishedTextError, see `run_job`"""
    if progress.num_failed:
        where = "the output" if job.output is None else str(job.output)
        again = "" if job.output is None else "; run the same command again to retry them"
        raise FailedLinesError(
            f"{progress.num_failed} of {len(job.todo)} prompts failed; see their lines in {where}{again}"
        )
    if require_complete:
        completeness.require_complete()


def _settle_record(job: Job, runner: str) -> None:
    """Write down the settings before the first line, or check that the device is that of the lines there are.

    Raises: UsageError for another device, OutputError.
    """
    record = job.record
    if job.output is None:
        return
    if record.runner:
        refuse_other_settings(job.output, {"device": record.runner}, {"device": runner})
    else:
        save_record(job.output, Record(record.settings, record.seed, runner))


class _Sink:
    """Where lines go: the output's file or standard output, each as it comes or in the order of the input.

    What is held back at the end is written even then when the run ends early.
    """

    def __init__(self, job: Job):
        self._job = job
        self._journal = None if job.output is None else Journal(job.output, job.written)
        is_ordered = job.prompts.options.ordered
        self._in_order = InOrder((task.line.id for task in job.todo), self._write) if is_ordered else None

    def put(self, line_id: LineId, line: str) -> None:
        """Take the line of a prompt."""
        if self._in_order is None:
            self._write(line_id, line)
        else:
            self._in_order.put(line_id, line)

    def finish(self) -> None:
        """All prompts have a line: bring those of several runs into order, if it is asked for."""
        if self._journal is not None and self._in_order is not None:
            self._journal.sort([task.line.id for task in self._job.tasks])

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
