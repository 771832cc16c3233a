"""The prompt line: with editing where the terminal can move its cursor, else line by line as it hands them over."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llmcli.cli import lazy
from llmcli.cli.chat_session.commands import commands_of
from llmcli.cli.chat_session.message import CONTINUATION, PROMPT, is_open_block
from llmcli.cli.terminal import terminal

if TYPE_CHECKING:
    from llmcli.cli.chat_session.state import Talk

TEXT_ONLY_TERMINALS = ("dumb", "unknown")  # Emacs' shell, the console of a build: control codes would stand in the text


class PromptLine(Protocol):
    """Where a person types."""

    def read(self, draft: str, facts: str) -> str:
        """One message or command, of as many lines as were typed.

        `draft` is a text to change and send, `facts` a line about the conversation.
        Raises: KeyboardInterrupt for Ctrl-C, EOFError for Ctrl-D, each on an empty line
        """
        ...


class BareLine:
    """Reads lines from a terminal that only shows text. The prompt is on stderr: stdout is for the answers."""

    def read(self, draft: str, facts: str) -> str:
        """As `PromptLine`; `draft` is shown to be typed again, `facts` are left out."""
        if draft:
            terminal.info(f"change this and type it again: {draft}")
        text, prompt = "", PROMPT
        while True:
            terminal.show(prompt)
            line = sys.stdin.buffer.readline()
            if not line:
                raise EOFError
            text += line.decode(errors="surrogateescape")
            if not is_open_block(text):
                return text.rstrip("\r\n")
            prompt = CONTINUATION


def open_prompt_line(history_path: Path, state: Talk) -> PromptLine:
    """The prompt line that this terminal allows; `history_path` keeps what was typed."""
    if os.environ.get("TERM", "").lower() in TEXT_ONLY_TERMINALS:
        return BareLine()
    return lazy.LineEditor({command.name: command.help for command in commands_of(state)}, history_path)
