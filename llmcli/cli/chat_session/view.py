"""How an answer looks: text or Markdown on stdout, reasoning and progress on stderr."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from llmcli.cli.chat_session.state import Thinking
from llmcli.cli.terminal import has_color, terminal, visible
from llmcli.engine.chat_events import Piece, TurnStarted
from llmcli.engine.events import PrefillProgress

# A prefill of fewer tokens is over before anyone could read about it.
MIN_PREFILL_SHOWN = 256


class Writer(Protocol):
    """Takes the answer's text as it comes."""

    def write(self, text: str) -> None:
        """Take more text."""

    def close(self) -> None:
        """Take the end, which is the end of a line."""


class TextWriter:
    """Writes text to stdout as it is, and ends the last line."""

    def __init__(self) -> None:
        self._last = "\n"

    def write(self, text: str) -> None:
        """Write it, in lines that break between words where stdout is a terminal."""
        terminal.write(text, wraps=True)
        self._last = text[-1:] or self._last

    def close(self) -> None:
        """End the line; an empty answer is an empty line where no one watches, so that answers can be counted."""
        is_ended = self._last == "\n" and sys.stdout.isatty()
        terminal.write("" if is_ended else "\n")


class NoWriter:
    """Writes nothing, for `--json`."""

    def write(self, text: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class View:
    """Shows one answer."""

    def __init__(self, writer: Writer, thinking: Thinking):
        self._writer = writer
        self._thinking = thinking
        self._has_status = False
        self._num_to_compute = 0
        self._thinking_since: float | None = None
        self._is_dim = has_color(sys.stderr)

    def start(self, event: TurnStarted) -> None:
        """Take the size of the prompt."""
        self._num_to_compute = len(event.prompt_token_ids) - event.num_kept

    def show_prefill(self, event: PrefillProgress) -> None:
        """Say on a terminal how far a long prompt has been read."""
        if self._num_to_compute >= MIN_PREFILL_SHOWN:
            self._show_status(f"reading {event.num_computed} of {self._num_to_compute} tokens")

    def show(self, piece: Piece) -> None:
        """Show a piece of reasoning or answer."""
        if piece.part == "answer":
            self._end_thinking()
            self.clear_status()
            self._writer.write(piece.text)
        elif self._thinking == "show":
            self.clear_status()
            self._thinking_since = self._thinking_since or time.monotonic()
            if not terminal.is_quiet:
                dim, reset = ("\x1b[2m", "\x1b[0m") if self._is_dim else ("", "")
                text = visible(piece.text) if sys.stderr.isatty() else piece.text
                terminal.show(f"{dim}{text}{reset}", is_drawn=True, wraps=True)
        elif self._thinking_since is None:
            self._thinking_since = time.monotonic()
            self._show_status("thinking")

    def close(self) -> None:
        """Show the end."""
        self._end_thinking()
        self.clear_status()
        self._writer.close()

    def _end_thinking(self) -> None:
        if self._thinking_since is None:
            return
        seconds, self._thinking_since = time.monotonic() - self._thinking_since, None
        self.clear_status()
        if self._thinking == "show" and not terminal.is_quiet:
            terminal.show("\n\n")
        elif self._thinking == "fold":
            terminal.info(f"(thought for {seconds:.1f} s)")

    def _show_status(self, text: str) -> None:
        if not terminal.is_quiet and sys.stderr.isatty():
            terminal.show(f"\r\x1b[K{text}...", is_drawn=True)
            self._has_status = True

    def clear_status(self) -> None:
        """Take the line of progress away."""
        if self._has_status:
            terminal.show("\r\x1b[K", is_drawn=True)
            self._has_status = False
