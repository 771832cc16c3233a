"""A batch before its weights are read: its options, its checked input and its locked output.

Finds what the output already holds.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, NoReturn

from llmcli import __version__
from llmcli.batch.input import LineId, LineReader, Problems, parse_line, read_input
from llmcli.batch.output import DiskDict, Written, holds_something, read_output
from llmcli.batch.shards import INPUT, Record, check_record_path, load_record, parse_shard, refuse_other_settings
from llmcli.cli import lazy, shared
from llmcli.cli.command import argument
from llmcli.cli.lines import Lines, Task
from llmcli.cli.progress import progress
from llmcli.cli.prompt import parse_template_variables, refuse_undecoded
from llmcli.cli.run import RunRequest, open_run
from llmcli.cli.session import EncodedPrompt
from llmcli.cli.terminal import terminal
from llmcli.destination_lock import DestinationLock
from llmcli.errors import OutputError, TokenizerError, UsageError
from llmcli.reading import CHAT_TEMPLATE

PIPE = "-"
MERGE = "merge"  # in place of IN


@dataclass(frozen=True)
class BatchOptions:
    """Where prompts come from, what goes around them, and where and how results go.

    Raises: UsageError for values that cannot be.
    """

    source: str = argument(
        ...,
        "JSON Lines file with one prompt per line; `-` reads standard input; `merge` joins the shards of OUT.",
        metavar="IN",
    )
    output: str = argument(..., "File to write results to; `-` writes standard output.", metavar="OUT")
    text: bool = shared.prompt_option(False, "IN is plain text: each line is a prompt.")
    system: str | None = shared.system_option()
    chat_template: str | None = shared.chat_template_option()
    template_var: list[str] | None = shared.template_var_option()
    rows: str = shared.rows_option(shared.AUTO)
    shard: str | None = shared.machines_option(
        None, "Run every Nth prompt from the Ith on, into OUT.shard-I-of-N.", metavar="I/N"
    )
    ray: str | None = shared.machines_option(
        None, "Run on a Ray cluster: `auto`, or its HOST:PORT.", metavar="ADDRESS", words=(shared.AUTO,)
    )
    workers: int | None = shared.machines_option(
        None, "Most workers of --ray.", min=1, show_default="one per card", hidden=True
    )
    mixed_cards: bool = shared.machines_option(
        False, "Let --ray use several kinds of card; texts may differ.", hidden=True
    )
    check: bool = shared.output_option(False, "Check IN and OUT and estimate the run, but do not run it.")
    ordered: bool = shared.output_option(False, "Write results in the order of IN.")
    stats: str | None = shared.output_option(None, "Print times, rates and rows.", metavar="")

    def __post_init__(self) -> None:
        refuse_undecoded(self.system, "--system")
        if self.stats not in (None, "run"):
            raise UsageError(f"--stats is {self.stats!r}, expected no value")
        shared.parse_rows(self.rows)
        parse_shard(self.shard)
        if self.ray is None and (self.workers is not None or self.mixed_cards):
            raise UsageError(f"{'--mixed-cards' if self.workers is None else '--workers'} needs --ray")
        if self.ray is not None and (self.shard is not None or self.check):
            raise UsageError(f"--ray and {'--check' if self.shard is None else '--shard'} cannot be combined")
        parse_template_variables(self.template_var)

    @property
    def num_rows(self) -> int | None:
        """Rows at most; None is as many as the device can use."""
        return shared.parse_rows(self.rows)


@dataclass(frozen=True, kw_only=True)
class Prompts(Lines):
    """The prompts of a file."""

    options: BatchOptions

    def read(
        self,
        reader: LineReader,
        problems: Problems,
        known: MutableMapping[LineId, int],
        on_read: Callable[[int], None],
    ) -> Iterator[Task]:
        """Every prompt of a file, or of the shard. What is wrong with one is noted in `problems`.

        `known` gets their ids with their lines, and `on_read` the bytes so far.
        Raises: UsageError for what is wrong with all of them, such as a missing chat template.
        """
        # Flags that no sampler could follow are not a problem of one line.
        self.run.sampler(EncodedPrompt("", (), at_start=False))
        shard, num_prompts = parse_shard(self.options.shard), 0
        numbers = known if shard is None else DiskDict[int]()
        has_messages = False
        for line in read_input(reader, self._names, problems, numbers, is_text=self.options.text):
            on_read(reader.num_bytes)
            if line.messages is not None:
                has_messages = True
                _ = self.encode_messages  # a template that is missing is not this line's problem
            num_prompts += 1
            if shard is not None:
                if not shard.has(num_prompts - 1):
                    continue
                known[line.id] = line.number
            try:
                yield self.task(line)
            except (UsageError, TokenizerError) as error:
                problems.add(reader.name, line.number, error)
        if not problems.count and not has_messages:
            options = self.options
            if options.system is not None or options.chat_template is not None or options.template_var:
                flags = "--system, --chat-template and --template-var"
                raise UsageError(f"{flags} are for lines with messages; {reader.name} has none")
            if not num_prompts:
                raise UsageError(f"{reader.name} holds no prompts")

    def read_again(self, file: BinaryIO, digest: str, done: Container[LineId]) -> Iterator[Task]:
        """The prompts of a file that was read before, without those that are done.

        Raises: UsageError if it has changed
        """
        changed = UsageError(f"{self.options.source} has changed while it was run; restore it, and run again to resume")
        file.seek(0)
        reader = LineReader(file, self.options.source)
        for number, content in reader:
            try:
                line = parse_line(content, number, self._names, is_text=self.options.text)
                task = None if line is None or line.id in done else self.task(line)
            except (UsageError, TokenizerError) as error:
                raise changed from error
            if task is not None:
                yield task
        if reader.digest != digest:
            raise changed

    @property
    def _names(self) -> tuple[str, str]:
        return self.run.model, self.run.session.name


class TasksInFile:
    """The prompts of a file, read again whenever they are gone through: a long file takes no memory."""

    def __init__(self, read: Callable[[], Iterator[Task]], count: int):
        self._read = read
        self._count = count

    def __iter__(self) -> Iterator[Task]:
        return self._read()

    def __len__(self) -> int:
        return self._count


Tasks = Sequence[Task] | TasksInFile


@dataclass(frozen=True)
class BatchJob:
    """A batch whose input is checked: every prompt, those still to run, and all that their texts depend on.

    `output` None is standard output. `ids` are in the order of the input. Without lines in the output `record` has no
    runner yet.
    """

    output: Path | None
    prompts: Prompts
    ids: Mapping[LineId, int]
    tasks: Tasks
    todo: Tasks
    record: Record
    written: Written

    @property
    def most_rows(self) -> int | None:
        """The requested rows, at most one for each prompt; None is as many as the device can use."""
        num_rows = self.prompts.options.num_rows
        return None if num_rows is None else max(min(num_rows, len(self.todo)), 1)


@contextmanager
def open_job(
    options: BatchOptions,
    request: RunRequest,
    name: str | None,
    max_new_tokens: int | None,
    grammar: lazy.grammar.Grammar | None,
) -> Iterator[BatchJob]:
    """Check everything that can be checked without the weights, and lock the output until the end.

    Raises: LLMCliError and its subclasses
    """
    output = None if options.output == PIPE else resolve_output(options.output)
    if (shard := parse_shard(options.shard)) is not None:
        if output is None:
            raise UsageError("--shard needs a file as OUT: the shards are merged later")
        if request.seed is None:
            raise UsageError("--shard needs --seed: all shards use the same one")
        output = shard.output(output)
    if output is not None:
        holds_something(output)
        check_record_path(output)
    with _open_input(options.source, output) as file, locked(None if options.check else output):
        prompts = Prompts(
            run=open_run(request, name),
            request=request,
            max_new_tokens=max_new_tokens,
            grammar=grammar,
            system=options.system,
            chat_template=options.chat_template,
            template_variables=parse_template_variables(options.template_var),
            options=options,
        )
        reader = LineReader(file, "standard input" if options.source == PIPE else options.source)
        if options.ray is not None and not file.seekable():
            raise UsageError(f"--ray reads the prompts twice, and {reader.name} is a pipe; give a file")
        yield _job(prompts, file, reader, output)


def resolve_output(name: str) -> Path:
    """OUT without links. Raises: UsageError"""
    try:
        return Path(os.path.realpath(name))
    except ValueError as error:  # a NUL
        raise UsageError(f"{name!r} is not a valid path: {error}") from error


@contextmanager
def _open_input(name: str, output: Path | None) -> Iterator[BinaryIO]:
    """Open the input; wait if it is a pipe. Refuses the output's file under any name."""
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
    except OSError:  # not a real file, as in tests
        return
    if os.path.samestat(info, output.stat()):
        raise UsageError(f"{output} is also the input; name another output")


@contextmanager
def locked(output: Path | None) -> Iterator[None]:
    """Lock the output against a second run; a pipe or a dry run needs no lock."""
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


def _read(reader: LineReader, prompts: Prompts, known: MutableMapping[LineId, int]) -> Iterator[Task]:
    """Every prompt of the input. Problems are counted, ten are shown, and nothing runs."""
    problems = Problems()
    size = 0
    if (source := prompts.options.source) != PIPE:
        info = os.stat(source)
        size = info.st_size if stat.S_ISREG(info.st_mode) else 0
    with progress(f"checking {reader.name}") as on_progress:

        def on_read(num_bytes: int) -> None:
            if size:
                on_progress(num_bytes, size)

        yield from prompts.read(reader, problems, known, on_read)
    if problems.count:
        _refuse(problems, reader.name)


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


def _job(prompts: Prompts, file: BinaryIO, reader: LineReader, output: Path | None) -> BatchJob:
    """The job, with what the output holds already.

    Raises: UsageError for an output that was made with other settings, or by something else.
    """
    ids = DiskDict[int]()
    tasks: Tasks
    if prompts.options.ray is None:  # encoded before the first step, as later it would delay the steps
        tasks = list(_read(reader, prompts, ids))
    else:
        tasks = TasksInFile(
            lambda: prompts.read_again(file, reader.digest, ()), sum(1 for _ in _read(reader, prompts, ids))
        )
    settings = _settings(prompts, reader.digest)
    if output is None or not holds_something(output):
        record = Record(settings, prompts.run.seed, "", len(tasks))
        return BatchJob(output, prompts, ids, tasks, tasks, record, Written())
    record = load_record(output)
    refuse_other_settings(
        output,
        {**record.settings, "seed": record.seed},
        {**settings, "seed": record.seed if prompts.request.seed is None else prompts.request.seed},
    )
    written = read_output(output, ids)
    done = written.done
    todo: Tasks
    if isinstance(tasks, TasksInFile):
        todo = TasksInFile(lambda: prompts.read_again(file, reader.digest, done), len(tasks) - len(done))
    else:
        todo = [task for task in tasks if task.line.id not in done]
    terminal.info(f"Resumed: {len(done)} of {len(tasks)} prompts are done")
    if written.torn:
        terminal.info(f"The last line of {output} is incomplete ({written.torn} bytes); its prompt runs again")
    if written.failed:
        terminal.info(f"Retrying {len(written.failed)} failed prompts")
    prompts = replace(prompts, run=replace(prompts.run, seed=record.seed))
    return BatchJob(output, prompts, ids, tasks, todo, record, written)


def _settings(prompts: Prompts, digest: str) -> dict[str, object]:
    """Everything but seed and device that the texts depend on, by name."""
    run, options, flags = prompts.run, prompts.options, prompts.run.flags
    folder = run.session.model.checkpoint.folder.resolve()
    lark = None if prompts.grammar is None else prompts.grammar.lark.encode()
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
        "template_var": prompts.template_variables or None,
        **vars(run.sampling.params),
        "sampler_order": flags.order,
        "dry_breakers": flags.dry_breakers,
        "ignore_eos": flags.ignore_eos,
        "schema": None if lark is None else f"sha256 {hashlib.sha256(lark).hexdigest()}",
        "logit_bias": {str(token_id): bias for token_id, bias in flags.logit_bias.items()},
    }


def _model_files(folder: Path) -> dict[str, str]:
    """Size and time of each file that a model's texts depend on, to detect a change."""
    files = lazy.folder.SourceState.record(folder).files
    return {
        name: f"{state.size} bytes of {datetime.fromtimestamp(state.mtime / 1e9, UTC).isoformat()}"
        for name, state in sorted(files.items())
        if name.endswith((".json", ".jinja", ".model", ".txt", ".safetensors"))
    }
