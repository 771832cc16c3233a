"""A batch in shards: which prompts a shard has, where its results go, and how the shards become one output.

Shard I of N has every Nth prompt from the Ith on. Its own output, OUT.shard-I-of-N, ends up in the order of the input,
and its record says when it has. So the whole output is one line of each shard in turn: merging does not read the input
and holds one line at a time.
"""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from llmcli.batch.input import LineReader
from llmcli.batch.output import as_output_error, holds_something, read_result
from llmcli.batch.record import Record, load_record, record_path, refuse_other_settings, save_record
from llmcli.errors import UsageError
from llmcli.writing import whole_file

_SHARD = re.compile(r"([0-9]{1,6})/([0-9]{1,6})", re.ASCII)
_NUM_SHOWN_PROBLEMS = 10


@dataclass(frozen=True)
class Shard:
    """One of `count` shards; `number` counts from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def output(self, output: Path) -> Path:
        """Where its results go, for a run whose whole output is `output`."""
        return output.with_name(f"{output.name}.shard-{self.number}-of-{self.count}")

    def has(self, index: int) -> bool:
        """Whether it runs the prompt with this index, from 0."""
        return index % self.count == self.number - 1


def parse_shard(text: str | None) -> Shard | None:
    """The value of --shard. Raises: UsageError"""
    if text is None:
        return None
    match = _SHARD.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard is {text!r}, expected I/N with I from 1 to N, such as 1/4")
    return Shard(int(match[1]), int(match[2]))


def find_shards(output: Path) -> list[Shard]:
    """All shards of an output, of which at least one has a file. Raises: UsageError"""
    name = re.compile(rf"{re.escape(output.name)}\.shard-([0-9]+)-of-([0-9]+)", re.ASCII)
    try:
        found = [match for path in output.parent.iterdir() if (match := name.fullmatch(path.name))]
    except OSError as error:
        raise UsageError(f"{output.parent} cannot be read: {error.strerror}") from error
    counts = sorted({int(match[2]) for match in found})
    if not counts:
        first = Shard(1, 4).output(output).name
        raise UsageError(f"{output} has no shards, expected files such as {first}; run llmcli batch with --shard first")
    if len(counts) > 1:
        divisions = " and of ".join(map(str, counts))
        raise UsageError(f"{output} has shards of {divisions}; keep those of one number and remove the others")
    return [Shard(number, counts[0]) for number in range(1, counts[0] + 1)]


@dataclass(frozen=True)
class Merged:
    """What an output was merged from."""

    num_shards: int
    num_results: int
    num_failed: int


def merge_shards(output: Path, shards: Sequence[Shard]) -> Merged:
    """Write an output from its shards, in the order of the input. The shards stay.

    One that is still being run counts as unfinished.

    Raises: UsageError if a shard is missing, unfinished or made with other settings, or if the output exists;
            OutputError
    """
    if holds_something(output):
        raise UsageError(f"{output} exists; remove it to merge again, or name another output")
    paths = [shard.output(output) for shard in shards]
    problems = [
        f"shard {shard} {problem}" for shard, path in zip(shards, paths, strict=True) if (problem := _problem(path))
    ]
    if problems:
        hidden = len(problems) - _NUM_SHOWN_PROBLEMS
        more = f"; and {hidden} more" if hidden > 0 else ""
        listed = "; ".join(problems[:_NUM_SHOWN_PROBLEMS])
        raise UsageError(f"{output} cannot be merged: {listed}{more}; run these shards, then merge again")
    records = [load_record(path) for path in paths]
    runner = next((record.runner for record in records if record.runner), "")  # an empty shard has had none
    for path, record in zip(paths, records, strict=True):
        own = {**record.settings, "seed": record.seed, "device": record.runner or runner}
        refuse_other_settings(path, own, {**records[0].settings, "seed": records[0].seed, "device": runner})
    num_prompts = sum(record.num_prompts for record in records)
    save_record(output, Record(records[0].settings, records[0].seed, runner, num_prompts, is_sorted=True))
    num_failed = _write_in_turn(output, paths, num_prompts)
    return Merged(len(shards), num_prompts, num_failed)


def _problem(path: Path) -> str | None:
    """What a shard still needs; None if it is complete."""
    if not path.exists():
        return "is missing"
    if not record_path(path).exists():
        return f"has no record {record_path(path).name}"
    record = load_record(path)
    with as_output_error(path), path.open("rb") as file:
        num_results = sum(content.endswith(b"\n") for content in file)
    if num_results != record.num_prompts:
        return f"has {num_results} of {record.num_prompts} results"
    return None if record.is_sorted else "was interrupted at its end"


def _write_in_turn(output: Path, paths: Sequence[Path], num_prompts: int) -> int:
    """Take a line of each shard in turn; return how many are failed results."""
    num_failed = num_written = 0
    with as_output_error(output), ExitStack() as stack, whole_file(output, replace=False) as target:
        files = [stack.enter_context(path.open("rb")) for path in paths]
        lines = [iter(LineReader(file, str(path))) for file, path in zip(files, paths, strict=True)]
        while num_written < num_prompts:
            number, content = next(lines[num_written % len(lines)], (0, b""))
            result = read_result(content)
            if result is None:
                where = f"{paths[num_written % len(paths)]} line {number or num_written // len(paths) + 1}"
                raise UsageError(f"{where} is not a result of llmcli batch; remove the shard and run it again")
            target.write(content + b"\n")
            num_written += 1
            num_failed += result.has_failed
    return num_failed
