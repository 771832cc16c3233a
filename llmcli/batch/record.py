"""The record `OUT.run.json` beside an output: the settings that its lines were made with.

So a second run goes on only with what the first one did, and the output itself holds nothing but results.
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
    """What decides the text of every line. `settings` has JSON values by name; `runner` is device and precision."""

    settings: Mapping[str, Any]
    seed: int
    runner: str


def record_path(output: Path) -> Path:
    """Where the record of an output lies."""
    return output.with_name(f"{output.name}.run.json")


def check_record_path(output: Path) -> None:
    """Refuse an output whose record could not be written.

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
    """The record of an output that holds something.

    Raises: UsageError if there is none, or it is not one.
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
    return Record(settings, seed, runner)


def refuse_other_settings(output: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings than an output's.

    Raises: UsageError that names the settings and both values.
    """
    new = json.loads(json.dumps(new))  # as a file gives them back: lists for tuples
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
    """Say what differs. Of the input there are only digests, which tell a reader nothing."""
    return "other prompts than the input has now" if difference.name == INPUT else str(difference)
