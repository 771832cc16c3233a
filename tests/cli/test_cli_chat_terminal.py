"""`llmcli chat` as a person uses it, in a real pseudo-terminal: lines, keys during an answer, the echo."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pexpect
import pytest
from chat_terminal import ALT_ENTER, ANSWER, CTRL_C, CTRL_D, LETTERS_ONLY, PASTE_BEGIN, PASTE_END, ChatTerminal

from llmcli.cli.chat_session.key_echo import discard_typed_keys
from llmcli.engine.conversation import Conversation, SavedConversation, load_conversation, save_conversation

AT_LIMIT = rf"{ANSWER}\r\n\(stopped at --max-new-tokens; /continue resumes it\)"


def test_messages_of_several_lines_and_commands(
    open_terminal: Callable[..., ChatTerminal], talker: Path, tmp_path: Path
) -> None:
    terminal = open_terminal(talker, "--max-new-tokens", 12)
    terminal.child.logfile_read = seen = io.StringIO()
    pasted = terminal.command(f"{PASTE_BEGIN}one\ntwo\r\n/three{PASTE_END}", AT_LIMIT + r"\r\n\r\n")
    terminal.command(f"four{ALT_ENTER}five", AT_LIMIT)
    terminal.enter('"""six')
    terminal.enter("")
    terminal.command('seven"""', AT_LIMIT)
    terminal.command("/history", r"four\r\nfive\r\n(.|\n)*six\r\n\r\nseven\r\n")
    path = tmp_path / "talk.json"
    terminal.command(f"/save {path}", "Saved to")
    messages = [turn.user for turn in load_conversation(path).conversation.turns]
    assert messages == ["one\ntwo\n/three", "four\nfive", "six\n\nseven"]

    terminal.command("/nonsense", "error: unknown command /nonsense; /help lists them")
    terminal.command("/set temperature hot", "error: temperature is 'hot', expected a number")
    terminal.command("/undo", "Removed: six")
    terminal.command("/undo", "Removed: four")
    again = terminal.command("/regen", AT_LIMIT)
    assert again != pasted
    terminal.child.send("/und")
    terminal.expect("Remove the last turn")
    terminal.child.send("\t")
    terminal.expect("o")
    terminal.command("", "Removed: one")
    terminal.command(f"/load {path}", "3 turns from")
    terminal.command("/edit", "five|seven")  # the last message comes up for editing
    terminal.command(" eight", AT_LIMIT)
    terminal.command(f"/save {path}", "Saved to")
    assert [turn.user for turn in load_conversation(path).conversation.turns][2] == "six\n\nseven eight"
    terminal.command("/n 2", r"changes that\)\r\n\r\n")
    terminal.command("a\u202eb", AT_LIMIT)
    terminal.command("/history", r"a\\u202eb")
    terminal.enter("/edit")
    terminal.expect(r"\\u202e")
    terminal.child.send(CTRL_C)
    os.write(terminal.child.child_fd, b"caf\xe9")
    time.sleep(0.2)
    terminal.enter("")
    terminal.expect("error: bytes that are not UTF-8 became question marks")
    terminal.prompt()
    terminal.child.send(CTRL_C + CTRL_D)
    assert terminal.finish() == 0
    assert "\u202e" not in seen.getvalue()


def test_a_terminal_that_only_shows_text_gets_no_control_codes(home: Path, talker: Path, tmp_path: Path) -> None:
    terminal = ChatTerminal(home, talker, "--max-new-tokens", 12, term="dumb")
    output = io.StringIO()
    terminal.child.logfile_read = output
    with closing(terminal.child):
        terminal.expect("\n> ")
        terminal.enter('"""one')
        terminal.expect(r"\. ")
        terminal.enter('two"""')
        terminal.expect(rf"{AT_LIMIT}\s*> ")
        path = tmp_path / "talk.json"
        terminal.enter(f"/save {path}")
        terminal.expect("Saved to [^>]*> ")
        assert [turn.user for turn in load_conversation(path).conversation.turns] == ["one\ntwo"]
        terminal.enter("/edit")
        terminal.expect("type it again: /edit one\r\ntwo\r\n> ")
        terminal.child.send(CTRL_C)
        terminal.expect("press Ctrl-C again, or Ctrl-D, to quit\r\n> ")
        terminal.child.send(CTRL_D)
        assert terminal.finish() == 0
    assert "\x1b" not in output.getvalue()


def test_ctrl_c_in_an_answer(open_terminal: Callable[..., ChatTerminal], endless: Path, tmp_path: Path) -> None:
    terminal = open_terminal(endless, "--context", 32768)
    terminal.enter("Tell me a story")
    terminal.expect("[a-h]{50}")
    terminal.child.sendintr()
    terminal.expect(r"\(stopped; /continue resumes it\)")
    terminal.prompt()
    (saved,) = (tmp_path / "home" / "chat").glob("*.json")
    first = load_conversation(saved).conversation.last.answer
    assert first is not None
    assert first.finish_reason == "interrupted"
    assert len(first.content) >= 50
    terminal.command("/set max-new-tokens 20", "max_new_tokens is 20")
    terminal.command("/continue", AT_LIMIT)
    second = load_conversation(saved).conversation.last.answer
    assert second is not None
    assert second.content.startswith(first.content)
    assert len(second.content) == len(first.content) + 20

    terminal.child.send(f"not sent{CTRL_C}")
    terminal.child.send(CTRL_C)
    terminal.expect("press Ctrl-C again, or Ctrl-D, to quit")
    terminal.prompt()
    terminal.command("And now", AT_LIMIT)
    terminal.child.send(CTRL_C)
    terminal.expect("press Ctrl-C again, or Ctrl-D, to quit")
    terminal.prompt()
    terminal.child.send(CTRL_C)
    assert terminal.finish() == 0


def test_ctrl_c_in_a_prefill(open_terminal: Callable[..., ChatTerminal], endless: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.json"
    save_conversation(path, SavedConversation("m", Conversation().ask("x" * 3000)), replace=False)
    terminal = open_terminal(endless, "--resume", path, "--max-new-tokens", 5, "--verbose")
    terminal.enter("/regen")
    terminal.expect(r"reading [1-9]\d* of 30\d+ tokens")
    terminal.child.sendintr()
    terminal.expect(r"prompt: 30\d+ tokens \(0 cached, \d+ computed\)")
    terminal.expect(r"\(stopped; /continue resumes it\)")
    terminal.prompt()
    terminal.enter("/continue")
    kept = terminal.expect(r"prompt: 30\d+ tokens \([1-9]\d* cached")
    terminal.prompt()
    assert int(kept.split()[3].lstrip("(")) < 3000
    terminal.command("/history", rf"x\r\n\r\n\[answer 1\]\r\n{ANSWER}")
    terminal.child.send(CTRL_D)
    assert terminal.finish() == 0


def test_a_resize_changes_nothing(open_terminal: Callable[..., ChatTerminal], talker: Path, tmp_path: Path) -> None:
    terminal = open_terminal(talker, "--max-new-tokens", 200, "--markdown")
    terminal.child.send("hel")
    terminal.child.setwinsize(10, 40)
    terminal.child.send("lo")
    terminal.enter("")
    terminal.child.setwinsize(40, 120)
    terminal.expect("stopped at --max-new-tokens")
    terminal.prompt()
    (path,) = (tmp_path / "home" / "chat").glob("*.json")
    saved = json.loads(path.read_text())
    assert [turn["user"] for turn in saved["turns"]] == ["hello"]
    terminal.command("/history", r"\[1\]\r\nhello\r\n\r\n\[answer 1\]\r\n[a-h]{200}\r\n")


def test_a_killed_conversation_goes_on(open_terminal: Callable[..., ChatTerminal], endless: Path, home: Path) -> None:
    terminal = open_terminal(endless, "--max-new-tokens", 9)
    first = terminal.command("The first question", "[a-h]{9}")
    terminal.command("/set max-new-tokens none", "none")
    terminal.enter("The second question")
    terminal.expect("[a-h]{50}")
    terminal.child.kill(signal.SIGKILL)
    terminal.child.wait()

    terminal = open_terminal("--continue", "--max-new-tokens", 9)  # the file knows the model
    terminal.command("/history", rf"The first question\r\n\r\n\[answer 1\]\r\n{first}\r\n(.|\n)*The second question")
    terminal.command("/continue", AT_LIMIT)
    terminal.command("/tokens", r"turn 2\s+\d+ tokens in the answer: The second question")
    assert len(list((home / "chat").glob("*.json"))) == 1


# Keys that are typed while an answer runs, and the terminal's echo after any end of the answer.


# What a shell does for a job, without restoring the terminal as some shells do.
SHELL = """
import os, signal, subprocess, sys, termios
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = subprocess.Popen(sys.argv[1:], process_group=0, preexec_fn=lambda: signal.signal(signal.SIGTTOU, signal.SIG_DFL))
while True:
    os.tcsetpgrp(0, job.pid)
    os.kill(job.pid, signal.SIGCONT)
    _, status = os.waitpid(job.pid, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpgrp())
    print("echo is", "on" if termios.tcgetattr(0)[3] & termios.ECHO else "off", flush=True)
    if not os.WIFSTOPPED(status):
        print("ended", os.waitstatus_to_exitcode(status), flush=True)
        break
    input()
"""


def test_typed_keys_stay_off_the_answer_and_stand_on_the_next_prompt(
    open_terminal: Callable[..., ChatTerminal], endless: Path
) -> None:
    terminal = open_terminal(endless, "--max-new-tokens", 400)
    terminal.enter("Tell me a story")
    terminal.expect("[a-h]{50}")
    assert not terminal.child.getecho()
    terminal.child.send("XYZ")
    said = terminal.expect(r"[^(]*\(stopped at")
    assert len(said) > 300
    assert "X" not in said
    terminal.expect("XYZ")  # drawn on the prompt line
    terminal.prompt()
    terminal.child.send(CTRL_C)
    terminal.enter("/set max-new-tokens none")
    terminal.prompt()
    terminal.enter("And another")
    terminal.expect("[a-h]{50}")
    terminal.child.send(f"lost{CTRL_C}")
    said = terminal.expect(r"[^(]*\(stopped; /continue resumes it\)")
    assert "lost" not in said
    assert "^C" not in said
    terminal.prompt()
    terminal.child.send(CTRL_D)  # would not leave with text on the line
    assert terminal.finish() == 0


def test_the_echo_is_back_when_the_process_is_stopped_goes_on_and_ends(tmp_path: Path, endless: Path) -> None:
    # The answer must not end by itself.
    options = ["--seed", "1", "--threads", "1", "--context", "32768", *LETTERS_ONLY]
    command = [sys.executable, "-m", "llmcli", "chat", str(endless), *options]
    environment = {**os.environ, "TERM": "xterm", "LLMCLI_HOME": str(tmp_path / "home"), "NO_COLOR": "1"}
    shell = pexpect.spawn(
        sys.executable, ["-c", SHELL, *command], env=environment, encoding="utf-8", timeout=120, dimensions=(24, 100)
    )

    def expect(pattern: str) -> str:
        while shell.expect([re.escape("\x1b[6n"), pattern]) == 0:
            shell.send("\x1b[12;1R")
        return str(shell.match[0])

    expect(r"of \d+ tokens  /help")
    shell.send("Tell me a story\r")
    expect("[a-h]{50}")
    shell.send("\x1a")  # Ctrl-Z
    expect("echo is on")
    shell.send("\n")
    expect("[a-h]{50}")
    assert not shell.getecho()
    shell.send("\x1a")
    expect("echo is on")
    shell.send("\n")
    expect("[a-h]{50}")
    shell.send("\x1c")  # Ctrl-\\, which ends a process
    assert expect(r"echo is \w+\s+ended -\d+").split() == ["echo", "is", "on", "ended", str(-signal.SIGQUIT)]
    shell.close(force=True)


# Keys typed before a question are forgotten, but no Ctrl-C is.


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
        [sys.executable, "-c", LISTENER], stdin=program, stdout=program, start_new_session=True
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
