"""Keys that are typed while an answer runs, and the terminal's echo after any end of the answer."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pexpect
from chat_terminal import CTRL_C, CTRL_D, LETTERS_ONLY, ChatTerminal

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
