"""Errors that a user can cause or meet, each class with its exit code. Any other that escapes is our bug (exit 1).

A message is one line: what, where, expected, actual, next step.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 130  # by Ctrl-C: not an error


class LLMCliError(Exception):
    """Base of every error shown to the user as one line `error: ...`."""

    exit_code = 1


class UsageError(LLMCliError):
    """The command line asks for the impossible: bad values, a prompt that does not fit (exit 2)."""

    exit_code = 2


class CheckpointError(LLMCliError):
    """The model folder is missing, incomplete, damaged or inconsistent (exit 3)."""

    exit_code = 3


class UnsupportedModelError(CheckpointError):
    """The model is well-formed but of a kind this program does not run; the message names the feature (exit 3)."""


class TokenizerError(CheckpointError):
    """The tokenizer files are missing, damaged or of an unknown kind (exit 3)."""


class OutputError(LLMCliError):
    """The output cannot be written, as on a full disk (exit 5)."""

    exit_code = 5


class DeviceError(LLMCliError):
    """The device cannot be used: absent, too old, or its compiler fails (exit 4)."""

    exit_code = 4


class ServerError(LLMCliError):
    """The server of `chat --server` cannot be reached, fails, or speaks another protocol (exit 4)."""

    exit_code = 4


class DifferentTextError(LLMCliError):
    """A replay gave another text than its receipt holds; the message says from which token on (exit 6)."""

    exit_code = 6


class UnfinishedTextError(LLMCliError):
    """A text ended before it was complete by its schema, and --require-complete was given (exit 7)."""

    exit_code = 7


class FailedLinesError(LLMCliError):
    """Some lines of a batch failed while they ran; the output says which and why, and holds the others (exit 1)."""


class KernelCompileError(DeviceError):
    """A kernel does not compile: the message names it, the architecture and the compiler's first error (exit 4)."""


class InsufficientMemoryError(DeviceError):
    """The model and its KV cache do not fit; the message has the figures and what would fit (exit 4)."""


# One table: which errors of the system and the libraries become which of ours. Each room applies it at its door.
#
# It has only errors that a file, the machine or a library can cause. A KeyError or TypeError is our bug and stays one.

# Messages of the loader, torch and Python when memory or threads run out, in exceptions without a class of their own.
_MEMORY_TEXTS = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "failed to map segment",
    "can't start new thread",
    "bad_alloc",
    "error return without exception set",  # by Python itself, if C code did not say why it got no memory
)
_PANIC = "PanicException"  # of a library written in Rust; it derives from BaseException and has no importable class
_SAFETENSORS = "SafetensorError"  # by name, since importing the library for its class takes milliseconds
_MAX_TEXT = 300


@contextmanager
def foreign_errors_explained(what: str, kind: type[LLMCliError]) -> Iterator[None]:
    """Raise our error instead of a foreign one inside the block; `what` names the work in the message.

    Raises: `kind`; InsufficientMemoryError if memory ran out.
    """
    try:
        yield
    except BaseException as error:
        ours = explain(error, what, kind)
        if ours is None:
            raise
        raise ours from error


def explain(error: BaseException, what: str, kind: type[LLMCliError]) -> LLMCliError | None:
    """Our error for a foreign one, or None if the table has no line for it."""
    if is_memory_error(error):
        return out_of_memory(what)
    if type(error).__name__ == _PANIC:
        return kind(f"{what}: the library that reads it failed ({error})")
    if type(error).__name__ == _SAFETENSORS:
        return kind(f"{what}: {ascii(str(error))[1:-1][:_MAX_TEXT]}")  # it repeats names of the file as they are
    if isinstance(error, RecursionError):
        return kind(f"{what}: nested too deeply")
    if isinstance(error, UnicodeError):
        return kind(f"{what}: text that is not valid Unicode ({error.__class__.__name__})")
    if isinstance(error, OverflowError):
        return kind(f"{what}: a number is too large ({error})")
    if isinstance(error, OSError):
        where = f"{error.filename}: " if isinstance(error.filename, str) else ""
        return kind(f"{what}: {where}{error.strerror or error}")
    return None


def out_of_memory(what: str) -> InsufficientMemoryError:
    """The error for memory that ran out during `what`."""
    return InsufficientMemoryError(f"{what}: out of memory; close other programs or use a smaller model")


def is_memory_error(error: BaseException) -> bool:
    """Whether an exception means that memory or threads ran out, whatever its class."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if not isinstance(error, RuntimeError | ImportError | OSError | SystemError):
        return False
    text = str(error).lower()
    return any(part in text for part in _MEMORY_TEXTS)
