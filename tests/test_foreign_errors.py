"""The table of foreign errors: which of our errors each becomes, and our bugs stay bugs."""

import errno
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import safetensors
import torch

from llmcli.errors import (
    CheckpointError,
    DeviceError,
    InsufficientMemoryError,
    TokenizerError,
    UsageError,
    explain,
    foreign_errors_explained,
)


def deep() -> None:
    deep()


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (deep, "config x: nested too deeply"),
        (lambda: float(10**400), "config x: a number is too large (int too large to convert to float)"),
        (lambda: "\ud800".encode(), "config x: text that is not valid Unicode (UnicodeEncodeError)"),
        (lambda: b"\xff".decode(), "config x: text that is not valid Unicode (UnicodeDecodeError)"),
        (lambda: safetensors.deserialize(b"12345678"), "config x: Error while deserializing: header too large"),
        (lambda: Path("/nowhere/at/all").read_bytes(), "config x: /nowhere/at/all: No such file or directory"),
    ],
)
def test_an_error_of_the_table_becomes_the_door_s_own(cause, message):
    with pytest.raises(CheckpointError) as raised, foreign_errors_explained("config x", CheckpointError):
        cause()
    assert str(raised.value) == message


def allocate_torch() -> None:
    torch.empty(2**50)


@pytest.mark.parametrize(
    "cause",
    [allocate_torch, lambda: bytearray(2**62), lambda: __import__("numpy").empty(2**55)],
    ids=["torch", "python", "numpy"],
)
def test_memory_that_runs_out_is_the_same_error_whoever_asked_for_it(cause):
    expected = pytest.raises(InsufficientMemoryError, match="^loading: out of memory; ")
    with expected, foreign_errors_explained("loading", CheckpointError):
        cause()


def test_no_memory_for_a_library_or_a_thread():
    assert isinstance(explain(ImportError("x.so: failed to map segment"), "a", UsageError), InsufficientMemoryError)
    assert isinstance(explain(RuntimeError("can't start new thread"), "a", UsageError), InsufficientMemoryError)
    unexplained = SystemError("error return without exception set")
    assert isinstance(explain(unexplained, "a", UsageError), InsufficientMemoryError)
    assert explain(SystemError("bad argument to internal function"), "a", UsageError) is None
    assert isinstance(explain(OSError(errno.ENOMEM, "no"), "a", UsageError), InsufficientMemoryError)


def test_a_panic_of_a_library_written_in_rust_is_no_traceback():
    code = textwrap.dedent(
        r"""
        import sys, tokenizers
        from llmcli.errors import TokenizerError
        from llmcli.errors import foreign_errors_explained
        splitter = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a|aa)+$"), "isolated")
        try:
            with foreign_errors_explained("tokenizer x", TokenizerError):
                splitter.pre_tokenize_str("a" * 200 + "b")
        except TokenizerError as error:
            print(error)
        """
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("tokenizer x: the library that reads it failed (")


@pytest.mark.parametrize("bug", [KeyError("a"), TypeError("b"), ValueError("c"), IndexError("d"), RuntimeError("e")])
def test_our_bugs_stay_bugs(bug):
    with pytest.raises(type(bug)), foreign_errors_explained("x", DeviceError):
        raise bug


def test_our_own_errors_pass_unchanged():
    ours = TokenizerError("as it was")
    with pytest.raises(TokenizerError) as raised, foreign_errors_explained("x", CheckpointError):
        raise ours
    assert raised.value is ours


def test_an_interrupt_passes_unchanged():
    with pytest.raises(KeyboardInterrupt), foreign_errors_explained("x", CheckpointError):
        raise KeyboardInterrupt
