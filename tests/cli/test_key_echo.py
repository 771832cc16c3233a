"""Keys typed before a question are forgotten, but no Ctrl-C is."""

import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from llmcli.cli.chat_session.key_echo import discard_typed_keys

ROUNDS = 300
# Says "go", works a little, forgets keys, then waits for a Ctrl-C: longer than any delay.
LISTENER = """
import fcntl, os, signal, sys, termios, time
from llmcli.cli.chat_session.key_echo import discard_typed_keys

fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C comes here
struck = []
signal.signal(signal.SIGINT, lambda number, frame: struck.append(number))
os.write(1, b"g")
for line in sys.stdin.buffer:
    struck.clear()
    end = time.perf_counter() + 0.0005
    os.write(1, b"g")
    while time.perf_counter() < end:
        pass
    discard_typed_keys()
    end = time.perf_counter() + 2
    while not struck and time.perf_counter() < end:
        time.sleep(0.001)
    os.write(1, b"s" if struck else b"l")
"""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """The two ends of a terminal without echo: the person's, the program's."""
    person, program = pty.openpty()
    settings = termios.tcgetattr(program)
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(program, termios.TCSANOW, settings)
    yield person, program
    os.close(person)
    os.close(program)


def test_a_ctrl_c_just_before_the_keys_are_forgotten_strikes(terminal: tuple[int, int]) -> None:
    person, program = terminal
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER],
        stdin=program,
        stdout=program,
        start_new_session=True,
    ) as process:
        try:
            assert os.read(person, 1) == b"g"
            lost = 0
            for number in range(ROUNDS):
                os.write(person, b"\n")
                assert os.read(person, 1) == b"g"
                time.sleep(0.0006 * number / ROUNDS)
                os.write(person, b"\x03")
                lost += os.read(person, 1) == b"l"
            assert lost == 0
        finally:
            process.kill()


@pytest.mark.parametrize("typed", [b"yes\nno\n", b"hal", b"yes\nhal", b"\x04", b""])
def test_whole_and_half_lines_are_forgotten(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch, typed: bytes
) -> None:
    person, program = terminal
    before = termios.tcgetattr(program)
    with open(program, closefd=False) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        os.write(person, typed)
        time.sleep(0.05)
        discard_typed_keys()
        os.write(person, b"new\n")
        assert stdin.readline() == "new\n"
    assert termios.tcgetattr(program) == before
