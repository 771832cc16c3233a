"""A batch in shards: which prompts a shard has, where its results go, and how the shards become one output.

Shard I of N has every Nth prompt from the Ith on. Its own output, OUT.shard-I-of-N, ends up in the order of the input,
and its record says when it has. So the whole output is one line of each shard in turn: merging does not read the input
and holds one line at a time.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.batch.input import LineReader
from llmcli.batch.output import as_output_error, holds_something, read_result
from llmcli.differences import Difference, find_differences
from llmcli.errors import UsageError
from llmcli.reading import BATCH_RECORD
from llmcli.writing import OutputFile, whole_file

# The record `OUT.run.json` next to an output: the settings that its lines were made with.
#
# So a second run resumes only with the first run's settings, and the output holds nothing but results.

FORMAT = "llmcli batch"
VERSION = 1
NUM_SHOWN_DIFFERENCES = 3
INPUT = "input"  # the setting that holds the digest of the prompts

_MARK = re.compile(rb'"format"\s*:\s*"llmcli batch"')
_RECORD_FILE = OutputFile(
    "the record of an llmcli batch", lambda head: _MARK.search(head) is not None, "name another output"
)


@dataclass(frozen=True)
class Record:
    """Everything that decides the text of a line. `settings` by name; `runner`: device and precision.

    `num_prompts` is how many results the output is to hold; `is_sorted`, whether it holds all of them in the order of
    the input.
    """

    settings: Mapping[str, Any]
    seed: int
    runner: str
    num_prompts: int = 0
    is_sorted: bool = False


def record_path(output: Path) -> Path:
    """The path of an output's record."""
    return output.with_name(f"{output.name}.run.json")


def check_record_path(output: Path) -> None:
    """Refuse an output whose record cannot be written. Raises: UsageError."""
    _RECORD_FILE.check(record_path(output), replace=True)


def save_record(output: Path, record: Record) -> None:
    """Write the record, whole or not at all. Raises: UsageError if something else has its name; OutputError."""
    content = {"format": FORMAT, "version": VERSION, **vars(record)}
    text = json.dumps(content, ensure_ascii=False, indent=2)
    _RECORD_FILE.write(record_path(output), f"{text}\n".encode(errors="replace"), replace=True)


def load_record(output: Path) -> Record:
    """The record of an output that is not empty. Raises: UsageError if it is missing or not a record."""
    path = record_path(output)
    if not path.exists():
        raise UsageError(f"{output} exists, but {path.name} with its settings is missing; name another output")
    values = BATCH_RECORD.read_json_object(path)
    settings, seed, runner = (values.get(key) for key in ("settings", "seed", "runner"))
    if values.get("format") != FORMAT or values.get("version") != VERSION:
        raise UsageError(f"{path} is not a record of this version of llmcli batch; choose another output")
    if not (isinstance(settings, dict) and type(seed) is int and isinstance(runner, str)):
        raise UsageError(f"{path} is damaged: settings, seed or runner is missing; name another output")
    num_prompts, is_sorted = values.get("num_prompts"), values.get("is_sorted") is True
    return Record(settings, seed, runner, num_prompts if type(num_prompts) is int else 0, is_sorted)


def refuse_other_settings(output: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to resume with settings other than the output's.

    Raises: UsageError that names the settings and both values.
    """
    new = json.loads(json.dumps(new))  # as a file returns them: lists instead of tuples
    differences = find_differences(old, new)
    if not differences:
        return
    parts = [_told(difference) for difference in differences[:NUM_SHOWN_DIFFERENCES]]
    more = len(differences) - NUM_SHOWN_DIFFERENCES
    raise UsageError(
        f"{output} was made with {'; '.join(parts)}{f'; and {more} more differences' if more > 0 else ''}: "
        "run with the same settings, or name another output"
    )


def _told(difference: Difference) -> str:
    """Describe a difference. The input has only digests, which would mean nothing to a reader."""
    return "other prompts than the input has now" if difference.name == INPUT else str(difference)


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
