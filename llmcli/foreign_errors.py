"""One table: which errors of the system and the libraries become which of ours. Each room applies it at its door.

It has only errors that a file, the machine or a library can cause. A KeyError or TypeError is our bug and stays one.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from llmcli.errors import InsufficientMemoryError, LLMCliError

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
