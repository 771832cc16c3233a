"""A batch before its weights are read: the input is checked, the output is locked, and what it holds is found."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from llmcli import __version__
from llmcli.batch.input import Problems
from llmcli.batch.lines import LineReader
from llmcli.batch.output import Written, holds_something, read_output
from llmcli.batch.record import INPUT, Record, check_record_path, load_record, refuse_other_settings
from llmcli.checkpoint.export_lock import DestinationLock
from llmcli.cli import lazy
from llmcli.cli.batch_options import PIPE, BatchOptions
from llmcli.cli.batch_prompts import Prompts, Task
from llmcli.cli.progress import progress
from llmcli.cli.prompt import parse_template_variables
from llmcli.cli.run import RunRequest, open_run
from llmcli.cli.terminal import terminal
from llmcli.errors import OutputError, UsageError
from llmcli.reading import CHAT_TEMPLATE

if TYPE_CHECKING:
    from llmcli.schema.grammar import Grammar


@dataclass(frozen=True)
class Job:
    """A batch whose input is checked: every prompt, those that are still to be run, and what decides their texts.

    `output` None is standard output. Without lines in the output `record` has no runner yet.
    """

    output: Path | None
    prompts: Prompts
    tasks: list[Task]
    todo: list[Task]
    record: Record
    written: Written

    @property
    def most_rows(self) -> int | None:
        """Rows that were asked for, and no more than prompts; None is as many as are of use."""
        num_rows = self.prompts.options.num_rows
        return None if num_rows is None else max(min(num_rows, len(self.todo)), 1)


@contextmanager
def open_job(
    options: BatchOptions, request: RunRequest, name: str | None, max_new_tokens: int | None, grammar: Grammar | None
) -> Iterator[Job]:
    """Check everything that can be checked without the weights, and keep others from the output until the end.

    Raises: LLMCliError and its subclasses
    """
    output = None if options.output == PIPE else _resolved(options.output)
    if output is not None:
        holds_something(output)
        check_record_path(output)
    with _open_input(options.source, output) as file, _locked(None if options.check else output):
        prompts = Prompts(open_run(request, name), request, options, max_new_tokens, grammar)
        reader = LineReader(file, "standard input" if options.source == PIPE else options.source)
        tasks = _read(reader, prompts)
        yield _job(prompts, tasks, reader.digest, output)


def _resolved(name: str) -> Path:
    try:
        return Path(os.path.realpath(name))
    except ValueError as error:  # a NUL
        raise UsageError(f"{name!r} is not a valid path: {error}") from error


@contextmanager
def _open_input(name: str, output: Path | None) -> Iterator[BinaryIO]:
    """The input, which is waited for if it is a pipe. Refuses the output's file, under whatever name."""
    if name == PIPE:
        if sys.stdin is None:
            raise UsageError("standard input is closed; name a file")
        _refuse_same(sys.stdin.buffer, output)
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: SIM115
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{name!r} cannot be read: {reason}") from error
    with file:
        _refuse_same(file, output)
        yield file


def _refuse_same(file: BinaryIO, output: Path | None) -> None:
    if output is None or not output.exists():
        return
    try:
        info = os.fstat(file.fileno())
    except OSError:  # not a file of the system's, as in tests
        return
    if os.path.samestat(info, output.stat()):
        raise UsageError(f"{output} is also the input; name another output")


@contextmanager
def _locked(output: Path | None) -> Iterator[None]:
    """Keep a second run from the output; a pipe, and a run that only looks, need no lock."""
    if output is None:
        yield
        return
    lock = DestinationLock(output, "batch", "output")
    try:
        lock.acquire()
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def _read(reader: LineReader, prompts: Prompts) -> list[Task]:
    """Every prompt of the input; with any problem, all are counted, ten are shown, and nothing is run."""
    problems = Problems()
    size = 0
    if (source := prompts.options.source) != PIPE:
        info = os.stat(source)
        size = info.st_size if stat.S_ISREG(info.st_mode) else 0
    with progress(f"checking {reader.name}") as on_progress:

        def on_read(num_bytes: int) -> None:
            if size:
                on_progress(num_bytes, size)

        tasks = prompts.read(reader, problems, on_read)
    if problems.count:
        _refuse(problems, reader.name)
    return tasks


def _refuse(problems: Problems, name: str) -> NoReturn:
    if problems.count == 1:
        raise UsageError(problems.first[0])
    for problem in problems.first:
        terminal.show(f"{' '.join(problem.split())}\n")
    hidden = problems.count - len(problems.first)
    more = f" (the first {len(problems.first)} are shown)" if hidden else ""
    raise UsageError(
        f"no prompt was run: {problems.count} lines of {name} are invalid{more}; correct them and run again"
    )


def _job(prompts: Prompts, tasks: list[Task], digest: str, output: Path | None) -> Job:
    """The job, with what the output holds already.

    Raises: UsageError for an output that was made with other settings, or by something else.
    """
    settings = _settings(prompts, digest)
    if output is None or not holds_something(output):
        return Job(output, prompts, tasks, tasks, Record(settings, prompts.run.seed, ""), Written())
    record = load_record(output)
    refuse_other_settings(
        output,
        {**record.settings, "seed": record.seed},
        {**settings, "seed": record.seed if prompts.request.seed is None else prompts.request.seed},
    )
    written = read_output(output, {task.line.id: task.line.number for task in tasks})
    done = written.done
    todo = [task for task in tasks if task.line.id not in done]
    terminal.info(f"Resumed: {len(done)} of {len(tasks)} prompts are done")
    if written.torn:
        terminal.info(f"The last line of {output} is incomplete ({written.torn} bytes); its prompt runs again")
    if written.failed:
        terminal.info(f"Retrying {len(written.failed)} failed prompts")
    prompts = replace(prompts, run=replace(prompts.run, seed=record.seed))
    return Job(output, prompts, tasks, todo, record, written)


def _settings(prompts: Prompts, digest: str) -> dict[str, object]:
    """Everything but seed and device that decides the texts, by name."""
    run, options, flags = prompts.run, prompts.options, prompts.run.flags
    folder = run.session.model.checkpoint.folder.resolve()
    template = options.chat_template
    if template is not None and (path := Path(template)).is_file():
        template = f"sha256 {hashlib.sha256(CHAT_TEMPLATE.read_bytes(path)).hexdigest()}"
    return {
        "llmcli": __version__,
        INPUT: f"sha256 {digest}",
        "text": options.text,
        "model": str(folder),
        **{f"file {name}": state for name, state in _model_files(folder).items()},
        **{
            f"adapter {adapter.name} {name}": f"{state}, weight {adapter.weight:g}"
            for adapter in run.session.model.adapters
            for name, state in _model_files(adapter.folder).items()
        },
        "context": run.context,
        "max_new_tokens": prompts.max_new_tokens,
        "stop": list(run.stop_strings),
        "system": options.system,
        "chat_template": template,
        "template_var": parse_template_variables(options.template_var) or None,
        **vars(run.sampling.params),
        "sampler_order": flags.order,
        "dry_breakers": flags.dry_breakers,
        "ignore_eos": flags.ignore_eos,
        "schema": None if prompts.grammar is None else f"sha256 {_digest(prompts.grammar.lark)}",
        "logit_bias": {str(token_id): bias for token_id, bias in flags.logit_bias.items()},
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _model_files(folder: Path) -> dict[str, str]:
    """What tells a model's files from others of the same names: size and time of each that its texts depend on."""
    files = lazy.SourceState.record(folder).files
    return {
        name: f"{state.size} bytes of {datetime.fromtimestamp(state.mtime / 1e9, UTC).isoformat()}"
        for name, state in sorted(files.items())
        if name.endswith((".json", ".jinja", ".model", ".txt", ".safetensors"))
    }
