"""Runs the answers to a message, one or several: shows them as they come, stops at Ctrl-C, and saves the conversation.

Text or Markdown goes to stdout, reasoning and progress to stderr.
"""

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from llmcli.cli.chat_session.state import ChatSession, Talk, Thinking, TurnRecord
from llmcli.cli.terminal import has_color, no_interrupts, terminal, visible
from llmcli.engine.chat_events import AnswerPiece, ChatEvent, OfAnswer, SeveralEvent, TurnFinished, TurnStarted
from llmcli.engine.conversation import UNFINISHED
from llmcli.engine.request import PrefillProgress

# A prefill of fewer tokens ends before anyone could read the progress.
MIN_PREFILL_SHOWN = 256

# During an answer the conversation is saved this often, so a kill loses at most these seconds.
SAVE_INTERVAL_SECONDS = 2.0


class Writer(Protocol):
    """Takes the answer's text as it comes."""

    def write(self, text: str) -> None:
        """Take more text."""

    def close(self) -> None:
        """Take the end, and end the line."""


class TextWriter:
    """Writes text to stdout as it is, and ends the last line."""

    def __init__(self) -> None:
        self._last = "\n"

    def write(self, text: str) -> None:
        """Write it, in lines that break between words where stdout is a terminal."""
        terminal.write(text, wraps=True)
        self._last = text[-1:] or self._last

    def close(self) -> None:
        """End the line; without a terminal an empty answer is an empty line, so that answers can be counted."""
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

    def show(self, event: TurnStarted | PrefillProgress | AnswerPiece) -> None:
        """Name the turns dropped for a prompt, say on a terminal how far a long one is read, show the answer."""
        if isinstance(event, TurnStarted):
            report_dropped(event)
            self._num_to_compute = len(event.prompt_token_ids) - event.num_kept
        elif isinstance(event, AnswerPiece):
            self._show_piece(event)
        elif self._num_to_compute >= MIN_PREFILL_SHOWN:
            self._show_status(f"reading {event.num_computed} of {self._num_to_compute} tokens")

    def _show_piece(self, piece: AnswerPiece) -> None:
        if piece.part != "reasoning":
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
        """Remove the line of progress."""
        if self._has_status:
            terminal.show("\r\x1b[K", is_drawn=True)
            self._has_status = False


Event = TypeVar("Event")


class _Run:
    """One answer in progress."""

    def __init__(self, state: Talk, view: View):
        self.started: TurnStarted | None = None
        self.finished: TurnFinished | None = None
        self._state = state
        self._view = view
        self._next_save = 0.0

    def take(self, event: ChatEvent) -> None:
        """Show an event and save what it brought."""
        if isinstance(event, TurnFinished):
            self.finished = event
        else:
            self.started = event if isinstance(event, TurnStarted) else self.started
            self._view.show(event)
        if self._next_save <= (now := time.monotonic()) or self.finished is not None:
            self._state.keep()
            self._next_save = now + SAVE_INTERVAL_SECONDS


def run_answer(state: Talk, events: Iterator[ChatEvent], view: View) -> TurnRecord | None:
    """Show an answer until it ends or Ctrl-C stops it; None if it was stopped before it began.

    Raises: LLMCliError if it cannot be computed; the conversation then holds the part so far.
    """
    run = _Run(state, view)
    try:
        take_all(events, run.take, state.chat.interrupt)
    except BaseException:
        state.keep()
        raise
    finally:
        if run.started is not None:
            view.close()
    if run.started is None or run.finished is None:
        return None
    record = TurnRecord(state.chat.conversation.last.user, run.started, run.finished)
    state.last_turn = record
    if state.is_verbose:
        terminal.info(describe(record))
    return record


def take_all(events: Iterable[Event], take: Callable[[Event], None], interrupt: Callable[[], Iterable[Event]]) -> None:
    """Take the events of answers. At Ctrl-C `interrupt` closes the answers, and its events are taken too.

    Raises: the errors of `events` and `take`, once the answers are closed
    """
    try:
        for event in events:
            take(event)
    except KeyboardInterrupt:
        with no_interrupts():
            for event in interrupt():
                take(event)
    except BaseException:
        interrupt()
        raise


def describe(record: TurnRecord) -> str:
    """What an answer cost, in one line."""
    started, timings = record.started, record.finished.timings
    num_tokens, num_computed = len(started.prompt_token_ids), timings.prefill_tokens
    text = f"prompt: {num_tokens} tokens ({record.num_kept} cached, {num_computed} computed)"
    if timings.prefill_seconds:
        text += f" in {timings.prefill_seconds:.2f} s"
    if started.num_history_computed:
        text += f", {started.num_history_computed} of earlier turns recomputed"
    text += f"; answer: {len(record.finished.token_ids)} tokens"
    if timings.decode_tokens_per_second:
        text += f" at {timings.decode_tokens_per_second:.1f} tokens/s"
    return f"{text}; finish reason: {record.finished.answer.finish_reason}"


def reason_of_end(record: TurnRecord) -> str | None:
    """How an answer ended, if it is not whole."""
    reason = record.finished.answer.finish_reason
    words = {"interrupted": "stopped", "length": "stopped at --max-new-tokens", "context": "the context is full"}
    why = words[reason] if reason in UNFINISHED else None
    if record.finished.is_complete is False:
        return f"{why or 'stopped at a stop string'}; what the schema asks for is not complete"
    return why


def report_dropped(event: TurnStarted) -> None:
    """Name the turns dropped for a prompt."""
    if not event.num_dropped:
        return
    last = event.dropped_from + event.num_dropped - 1
    which = f"turn {last}" if event.num_dropped == 1 else f"turns {event.dropped_from} to {last}"
    again = f"; {event.num_history_computed} tokens of the rest are recomputed" if event.num_history_computed else ""
    terminal.warn(f"the context is full: the model no longer sees {which}{again}")


class _InOrder:
    """Shows the events of several answers, one answer after the other."""

    def __init__(self, open_view: Callable[[], View]):
        self.started: TurnStarted | None = None
        self.first: TurnFinished | None = None
        self._open_view = open_view
        self._view = open_view()
        self._number = 1
        self._has_begun = False
        self._waiting: defaultdict[int, deque[AnswerPiece | TurnFinished]] = defaultdict(deque)

    def take(self, event: SeveralEvent) -> None:
        """Show an event, or keep it until its answer is shown."""
        if not isinstance(event, OfAnswer):
            self.started = event if isinstance(event, TurnStarted) else self.started
            self._view.show(event)
            return
        self._waiting[event.number].append(event.event)
        while self._waiting[self._number]:
            self._show(self._waiting[self._number].popleft())

    def _show(self, event: AnswerPiece | TurnFinished) -> None:
        if not self._has_begun:
            self._view.clear_status()
            terminal.info(f"[{self._number}]")
            self._has_begun = True
        if isinstance(event, AnswerPiece):
            self._view.show(event)
            return
        self.first = self.first or event
        self._view.close()
        self._number += 1
        self._has_begun, self._view = False, self._open_view()


def run_several(state: ChatSession, events: Iterator[SeveralEvent], open_view: Callable[[], View]) -> None:
    """Show the answers until they end or Ctrl-C stops them; those that have begun may be chosen then, too.

    Raises: LLMCliError if they cannot be computed.
    """
    shown = _InOrder(open_view)
    try:
        take_all(events, shown.take, state.chat.interrupt_several)
    finally:
        state.keep()
    if shown.started is not None and shown.first is not None:
        state.last_turn = TurnRecord(state.chat.conversation.last.user, shown.started, shown.first)
    count = len(state.chat.choices)
    if count > 1:
        *numbers, last = map(str, range(2, count + 1))
        others = f"{', '.join(numbers)} or {last}" if numbers else last
        terminal.info(f"(answer 1 is used; /choose {others} changes that)")
    elif not count:
        terminal.info("stopped")
