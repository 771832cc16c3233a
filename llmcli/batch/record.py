"""The record `OUT.run.json` next to an output: the settings that its lines were made with.

So a second run resumes only with the first run's settings, and the output holds nothing but results.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.differences import Difference, find_differences
from llmcli.errors import UsageError
from llmcli.reading import BATCH_RECORD
from llmcli.writing import OutputFile

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
    """Refuse an output whose record cannot be written.

    Raises: UsageError.
    """
    _RECORD_FILE.check(record_path(output), replace=True)


def save_record(output: Path, record: Record) -> None:
    """Write the record, whole or not at all.

    Raises: UsageError if something else has its name; OutputError.
    """
    content = {"format": FORMAT, "version": VERSION, **vars(record)}
    text = json.dumps(content, ensure_ascii=False, indent=2)
    _RECORD_FILE.write(record_path(output), f"{text}\n".encode(errors="replace"), replace=True)


def load_record(output: Path) -> Record:
    """The record of an output that is not empty.

    Raises: UsageError if it is missing or not a record.
    """
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
