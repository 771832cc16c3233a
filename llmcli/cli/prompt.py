"""Where a prompt comes from, and the values of related flags: template variables, and settings of the sampler."""

import json
import os
import re
import select
import stat
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError
from llmcli.reading import check_value

_PATIENCE_SECONDS = 2
MAX_BYTES = 64 * 1024**2  # far beyond any context; stops endless input, such as `yes | llmcli generate`

_ALMOST_JSON = ("true", "false", "null", "none")

NO_BREAKERS = "none"

WordT = TypeVar("WordT", bound=str)


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt: the argument or the file, then a blank line and what is piped in; or that alone.

    Raises: UsageError if there is none, or an argument and a file; as `read_text`.
    """
    if argument is not None and file is not None:
        raise UsageError("the argument PROMPT and --file cannot be combined")
    if argument is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError('no prompt: give it as an argument ("Once upon a time"), with --file, or on standard input')
    if argument in (None, "-") and file is None:
        if sys.stdin is None:
            raise UsageError("standard input is closed; give the prompt as an argument or with --file")
        return _read(sys.stdin.buffer, "standard input")
    if argument is None:
        given = read_text(file)
    else:
        refuse_undecoded(argument, "the prompt")
        given = argument
    return "\n\n".join(part for part in (given, _read_piped()) if part)


def read_text(file: Path | None, flag: str = "--file") -> str:
    """The text of a file, else of standard input. One final newline is dropped: editors and echo add it.

    `flag` is the option that names the file.
    It waits for a pipe, as `--file <(git diff)` wants it.
    Raises: UsageError if it cannot be read, is too long, or is not UTF-8 text.
    """
    if file is not None:
        try:
            with file.open("rb") as opened:
                return _read(opened, str(file))
        except OSError as error:
            raise UsageError(f"{flag} {file} cannot be read: {error.strerror}") from error
    if sys.stdin is None or sys.stdin.isatty():  # None: the caller closed it
        raise UsageError(f"no text: give it with {flag}, or on standard input")
    return _read(sys.stdin.buffer, "standard input")


def _read_piped() -> str:
    """Piped input; nothing from a terminal or a device."""
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or not the system's
        return ""
    if stat.S_ISFIFO(mode):
        if sys.platform != "win32" and not select.select([descriptor], [], [], _PATIENCE_SECONDS)[0]:
            terminal.info("waiting for standard input, to append it to the prompt; add `< /dev/null` to skip it")
    elif not stat.S_ISREG(mode):
        return ""
    return _read(sys.stdin.buffer, "standard input")


def checked_stop_strings(flags: Sequence[str] | None) -> tuple[str, ...]:
    """The values of --stop. Raises: UsageError for one that is empty, or that no text can contain"""
    for flag in flags or ():
        if not flag:
            raise UsageError("--stop is empty; give it the text to stop at")
        refuse_undecoded(flag, "--stop")
    return tuple(flags or ())


def chosen_word(name: str, value: str, words: Collection[WordT]) -> WordT:
    """The value of an option or setting that takes one of these words. Raises: UsageError for another"""
    for word in words:
        if value == word:
            return word
    raise UsageError(f"{name} is {value!r}, expected one of {', '.join(words)}")


def refuse_undecoded(argument: str | None, what: str) -> None:
    """Refuse a command line argument that is not UTF-8: Python carries such bytes as lone surrogates.

    Raises: UsageError.
    """
    if any("\ud800" <= character <= "\udfff" for character in argument or ""):
        raise UsageError(f"{what} is not UTF-8 text")


def _read(file: BinaryIO, where: str) -> str:
    content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise UsageError(f"{where} is longer than {MAX_BYTES // 1024**2} MiB; give a shorter text")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text: byte {content[error.start]:#04x} at {error.start}") from error
    return text.removesuffix("\n").removesuffix("\r")


def parse_template_variables(flags: Sequence[str] | None) -> dict[str, Any]:
    """The variables by name. A value is JSON; otherwise a text.

    Raises: UsageError for a flag without a name or a value, for a name that is given twice, and for a word
    such as False, which as a text would count as true.
    """
    variables: dict[str, Any] = {}
    for flag in flags or ():
        refuse_undecoded(flag, "--template-var")
        name, equals, value = flag.partition("=")
        if not (equals and name.isidentifier()):
            raise UsageError(f"--template-var is {flag!r:.80}, expected NAME=VALUE, such as enable_thinking=false")
        if name in variables:
            raise UsageError(f"--template-var gives {name} twice")
        variables[name] = _value(name, value)
    return variables


def _value(name: str, value: str) -> Any:
    try:
        loaded = json.loads(value)
    except RecursionError:
        raise UsageError(f"--template-var {name} is nested too deeply") from None
    except ValueError:
        if value.lower() in _ALMOST_JSON:
            raise UsageError(f"--template-var {name} is {value!r}, expected JSON: true, false or null") from None
        return value
    try:
        check_value(loaded)
    except ValueError as error:
        raise UsageError(f"--template-var {name}: {error}") from error
    return loaded


@dataclass(frozen=True)
class SamplerFlags:
    """The sampler's flags besides numbers; None where not given."""

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    order: tuple[str, ...] | None = None
    dry_breakers: tuple[str, ...] | None = None
    ignore_eos: bool = False


def parse_sampler_flags(
    logit_bias: Sequence[str] | None,
    sampler_order: str | None,
    dry_breakers: Sequence[str] | None,
    *,
    ignore_eos: bool = False,
) -> SamplerFlags:
    """The flags as values; names of steps are checked with the parameters, when the sampler is made.

    Raises: UsageError for what no sampler can do.
    """
    return SamplerFlags(
        parse_logit_bias(logit_bias or []),
        None if sampler_order is None else _parse_order(sampler_order),
        None if dry_breakers is None else _parse_breakers(dry_breakers),
        ignore_eos,
    )


def parse_logit_bias(flags: Sequence[str]) -> Mapping[int, float]:
    """Token ids and biases out of flags such as `1234=-2.5`, `1234=+3` or `1234=-inf`.

    Raises: UsageError for anything else.
    """
    biases: dict[int, float] = {}
    for flag in flags:
        token_id, separator, bias = flag.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            separator = ""
        if not separator:
            raise UsageError(f"--logit-bias is {flag!r}, expected a token id, =, and a number, such as 1234=-2.5")
    return biases


def _parse_order(flag: str) -> tuple[str, ...]:
    """Names separated by commas or, as in llama.cpp, semicolons; `-` in a name is `_`."""
    names = tuple(name.strip().replace("-", "_") for name in re.split("[,;]", flag))
    if not all(names):
        raise UsageError(f"--sampler-order is {flag!r}, expected names of steps with commas between them")
    return names


def _parse_breakers(flags: Sequence[str]) -> tuple[str, ...]:
    for flag in flags:
        if not flag:
            raise UsageError(f"--dry-breaker is empty; give it a text, or {NO_BREAKERS} for no breaker at all")
        refuse_undecoded(flag, "--dry-breaker")
    return tuple(dict.fromkeys(flag for flag in flags if flag != NO_BREAKERS))
