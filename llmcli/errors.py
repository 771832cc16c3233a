"""Errors that a user can cause or meet, each class with its exit code. Any other that escapes is our bug (exit 1).

A message is one line: what, where, expected, actual, next step.
"""

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
