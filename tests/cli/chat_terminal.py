"""`llmcli chat` in a real pseudo-terminal, and models whose answers are made of a few harmless letters."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pexpect
from tiny_models import write_tiny_llama

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LETTERS = "abcdefgh"
# Random weights would write control characters; these flags leave only letters, with probabilities from the weights.
LETTERS_ONLY = [flag for letter in LETTERS for flag in ("--logit-bias", f"{ord(letter)}=1000")]
ANSWER = f"[{LETTERS}]+"

TIMEOUT_SECONDS = 120
CURSOR_REQUEST = re.escape("\x1b[6n")
PROMPT = r"of \d+ tokens  /help"
PASTE_BEGIN, PASTE_END = "\x1b[200~", "\x1b[201~"
CTRL_C, CTRL_D, ALT_ENTER, ENTER = "\x03", "\x04", "\x1b\r", "\r"


def write_chat_llama(folder: Path, **overrides: Any) -> Path:
    """A tiny random model with a chat template."""
    write_tiny_llama(folder, **overrides)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class ChatTerminal:
    """A terminal of 24 lines that reports where the cursor is, as terminals do."""

    def __init__(self, home: Path, *arguments: object, term: str = "xterm-256color"):
        command = ["-m", "llmcli", "chat", "--seed", "1", "--threads", "1", *LETTERS_ONLY, *map(str, arguments)]
        environment = {**os.environ, "TERM": term, "LLMCLI_HOME": str(home), "NO_COLOR": "1"}
        self.child = pexpect.spawn(
            sys.executable, command, env=environment, encoding="utf-8", timeout=TIMEOUT_SECONDS, dimensions=(24, 100)
        )

    def expect(self, pattern: str) -> str:
        """Wait for a pattern, whose blanks also match line ends, and return the match."""
        while self.child.expect([CURSOR_REQUEST, pattern.replace(" ", r"\s+")]) == 0:
            self.child.send("\x1b[12;1R")
        return str(self.child.match[0])

    def prompt(self) -> None:
        """Wait for the prompt line."""
        self.expect(PROMPT)

    def enter(self, text: str) -> None:
        """Type a line."""
        self.child.send(text + ENTER)

    def command(self, text: str, pattern: str) -> str:
        """Type a line, wait for a pattern and the next prompt; return the match."""
        self.enter(text)
        found = self.expect(pattern)
        self.prompt()
        return found

    def finish(self) -> int | None:
        """Wait for the end of the program and return its exit code."""
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus
