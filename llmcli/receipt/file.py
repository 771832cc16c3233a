"""Receipts as JSON files that people can read. Refuses to replace, and to load, what is not one of them.

A receipt holds the SHA-256 of its own content, so that a change made by hand or by a disk is seen. It proves nothing
about who wrote it.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.errors import UsageError
from llmcli.reading import RECEIPT
from llmcli.receipt.codec import MalformedError, from_json, to_json
from llmcli.receipt.receipt import Receipt
from llmcli.writing import OutputFile

FORMAT = "llmcli receipt"
VERSION = 1

_MARK = re.compile(rb'"format"\s*:\s*"llmcli receipt"')
# Only its owner may read it: it holds the prompt.
RECEIPT_FILE = OutputFile(
    "a receipt of llmcli",
    lambda head: _MARK.search(head) is not None,
    "replace it with --force, or name another file",
    mode=0o600,
)
_NUMBERS = re.compile(r"\[\n\s*(-?\d[\d,\s]*?)\s*\]")


@dataclass(frozen=True)
class LoadedReceipt:
    """A receipt, and whether its file holds what was written into it."""

    receipt: Receipt
    is_unchanged: bool


def save_receipt(path: Path, receipt: Receipt, *, replace: bool) -> None:
    """Write a receipt, whole or not at all.

    Raises: UsageError for a path that cannot be written, holds anything but a receipt, or, unless `replace`, exists;
    OutputError if the disk is full or fails.
    """
    # The path of a model may hold bytes that are not UTF-8. Such a model has to be named again.
    content = json.loads(json.dumps(to_json(receipt), ensure_ascii=False).encode(errors="replace"))
    values = {"format": FORMAT, "version": VERSION, **content, "sha256": _digest(content)}
    text = json.dumps(values, ensure_ascii=False, indent=2)
    # Ids in one line each: strings hold no line breaks in JSON, so only lists of numbers match.
    text = _NUMBERS.sub(lambda match: f"[{' '.join(match[1].split())}]", text)
    RECEIPT_FILE.write(path, f"{text}\n".encode(), replace=replace)


def load_receipt(path: Path) -> LoadedReceipt:
    """Read a receipt.

    Raises: UsageError if the file cannot be read, is not a receipt, or has a version that this program does not know.
    """
    content = RECEIPT.read_json_object(path)
    if content.pop("format", None) != FORMAT:
        raise UsageError(f'{path} is not a receipt: it lacks the line "format": "{FORMAT}"')
    version = content.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise UsageError(
            f"{path} has version {version!r:.60} of the format, and this program reads {VERSION}; "
            "use the program that wrote it"
        )
    digest = content.pop("sha256", None)
    try:
        receipt: Receipt = from_json(Receipt, content)
        receipt.check()
        return LoadedReceipt(receipt, digest == _digest(content))
    except MalformedError as error:
        raise UsageError(f"{path} is not a whole receipt: {error}") from error


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
