"""Reads every small file: regular files only, with limits on bytes, nesting and digits. Never waits for a pipe.

`SmallFile` values at the end are the kinds of file, each with its limit.
"""

import json
import os
import stat
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.differences import shown
from llmcli.errors import CheckpointError, LLMCliError, TokenizerError, UsageError

MAX_DEPTH = 64  # of objects and lists; real files have fewer than ten
_MAX_PLACE = 200  # characters of a place in a message
MAX_DIGITS = 100  # of an integer: transformers writes "no limit" in 31; thousands only take time
GIT_LFS_START = b"version https://git-lfs"
_MIB = 1024**2


@dataclass(frozen=True)
class SmallFile:
    """One kind of file that is read whole. `remedy` ends the message when its content is wrong.

    Raises: `error`, naming the path, from every method, for a file that cannot be read, is not a regular file, is too
    long, or is not what the method reads. A missing file is one of these cases; ask first if a file is optional.
    """

    what: str
    max_bytes: int
    error: type[LLMCliError]
    remedy: str

    def read_bytes(self, path: Path) -> bytes:
        """The content."""
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise self.error(f"{path} is not a regular file, expected {self.what}")
            # Not blocking: a pipe may have replaced the file since.
            flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
            content = bytearray()
            with open(os.open(path, flags), "rb") as file:
                # One MiB at a time: for the whole limit at once, Python would take that much memory.
                while len(content) <= self.max_bytes and (chunk := file.read(_MIB)):
                    content += chunk
        except OSError as error:
            raise self.error(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:  # a NUL in the path
            raise self.error(f"{str(path)!r} is not a valid path: {error}") from error
        if len(content) > self.max_bytes:
            raise self.error(f"{path} is longer than {self.max_bytes // _MIB} MiB, too long for {self.what}")
        return bytes(content)

    def read_text(self, path: Path) -> str:
        """The content as UTF-8 text."""
        try:
            return self.read_bytes(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{path} is not UTF-8 text; {self.remedy}") from error

    def read_json(self, path: Path) -> Any:
        """The content as a JSON value; NaN and Infinity are allowed, as Python writes them."""
        content = self.read_bytes(path)
        if content.startswith(GIT_LFS_START):
            raise self.error(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in {path.parent}")
        try:
            return parse_json(content)
        except ValueError as error:
            raise self.error(f"{path} is not valid JSON: {error}; {self.remedy}") from error

    def read_json_object(self, path: Path) -> dict[str, Any]:
        """The content as a JSON object."""
        value = self.read_json(path)
        if not isinstance(value, dict):
            kind = "null" if value is None else type(value).__name__
            raise self.error(f"{path} holds a JSON {kind}, expected an object; {self.remedy}")
        return value

    def read_toml(self, path: Path) -> dict[str, Any]:
        """The content as a TOML table."""
        text = self.read_text(path)
        try:
            table = tomllib.loads(text)
            check_value(table)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else error
            raise self.error(f"{path} is not valid TOML: {reason}; {self.remedy}") from error
        return table


def parse_json(text: bytes | str, make_object: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """A JSON value within the limits on nesting and digits, whose strings are valid Unicode.

    `make_object` gets the keys and values of an object and returns its result; without it the last of repeated keys
    counts.
    Raises: ValueError, for any other text; LoneSurrogateError; what `make_object` raises.
    """
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(decoded, parse_int=_parse_int, object_pairs_hook=make_object)
    except RecursionError as error:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from error
    check_value(value)
    return value


def object_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `parse_json`. Raises: UsageError for a repeated key"""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise UsageError(f"the key {shown(key)} appears twice; keep one of them")
        values[key] = value
    return values


class LoneSurrogateError(UnicodeEncodeError):
    """A string that is not valid Unicode. `place` is its place, such as `messages[0].content`, "" at the top."""

    place = ""

    def __str__(self) -> str:
        code = ord(self.object[self.start])
        return f"{self.place or 'it'} has the lone surrogate U+{code:04X}, half of a character; leave it out"


def check_value(value: Any) -> None:
    """Refuse a value of JSON or TOML that is nested too deeply, or holds half a surrogate pair or a huge integer.

    Raises: ValueError, LoneSurrogateError.
    """
    try:
        _check_value(value)
    except UnicodeEncodeError as error:
        lone = LoneSurrogateError(*error.args)
        lone.place = _place_of(error.object, value)
        raise lone from error


def _place_of(text: str, value: Any) -> str:
    """The place of a key or a string in a value that holds it."""
    level = [("", value)]
    while level:
        below = []
        for place, item in level:
            if isinstance(item, dict):
                if text in item:
                    return f"a key of {place}" if place else "a key"
                # Cut, as every entry of a long list would have a copy of a long key.
                below += [(f"{place}.{key}"[-_MAX_PLACE:] if place else key, part) for key, part in item.items()]
            elif isinstance(item, list):
                below += [(f"{place}[{index}]", part) for index, part in enumerate(item)]
            elif item == text:
                return place
        level = below
    return ""


def _check_value(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                for key in item:
                    key.encode()  # refuses half a surrogate pair, which no file and no terminal accepts
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str):
                item.encode()
            elif isinstance(item, int) and abs(item) >= 10**MAX_DIGITS:
                raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
        if not below:
            return
        level = below
    raise ValueError(f"nested more than {MAX_DEPTH} levels deep")


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)


_DOWNLOAD = "download it again"

CONFIG = SmallFile("a config", 16 * _MIB, CheckpointError, _DOWNLOAD)
INDEX = SmallFile("an index", 64 * _MIB, CheckpointError, _DOWNLOAD)
TOKENIZER_MODEL = SmallFile("a tokenizer", 256 * _MIB, TokenizerError, _DOWNLOAD)
TOKENIZER_SETTINGS = SmallFile("tokenizer settings", 64 * _MIB, TokenizerError, _DOWNLOAD)
CHAT_TEMPLATE = SmallFile("a chat template", 4 * _MIB, TokenizerError, "give another with --chat-template FILE")
SETTINGS = SmallFile("a file of settings", _MIB, UsageError, "correct the file")
PRESET = SmallFile("a preset", _MIB, UsageError, "correct the file")
CONVERSATION = SmallFile("a saved conversation", 256 * _MIB, UsageError, "give another file")
COPIED_FILE = SmallFile("a file to copy", 256 * _MIB, CheckpointError, "check the disk")
QUALITY_CARD = SmallFile("a quality card", 64 * _MIB, CheckpointError, "export the model again")
EXPORT_JOURNAL = SmallFile("an export's journal", 64 * _MIB, CheckpointError, "remove it")
EXPORT_LOCK = SmallFile("an export's lock", _MIB, CheckpointError, "remove it")
BATCH_RECORD = SmallFile("the record of a batch", 16 * _MIB, UsageError, "name another output")
SCHEMA = SmallFile("a schema", 16 * _MIB, UsageError, "give a JSON Schema")
TOOLS = SmallFile("a list of tools", 16 * _MIB, UsageError, "give a JSON list in OpenAI's form")
GRAMMAR = SmallFile("a grammar", 16 * _MIB, UsageError, "give a grammar in Lark's syntax")
RECEIPT = SmallFile("a receipt", 256 * _MIB, UsageError, "give the file that generate --receipt wrote")
API_KEY = SmallFile("an API key", _MIB, UsageError, "write the key alone into the file")
CUDA_SOURCE = SmallFile("a CUDA source", _MIB, UsageError, "give a `.cu` file")
