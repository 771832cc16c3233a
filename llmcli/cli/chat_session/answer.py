"""Runs one answer: shows it as it comes, stops at Ctrl-C, and saves the conversation."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from llmcli.cli.chat_session.no_interrupts import no_interrupts
from llmcli.cli.chat_session.state import Talk, TurnRecord
from llmcli.cli.chat_session.view import View
from llmcli.cli.terminal import terminal
from llmcli.engine.chat_events import ChatEvent, TurnFinished, TurnStarted
from llmcli.engine.conversation import UNFINISHED
from llmcli.engine.events import PrefillProgress

# During an answer the conversation is saved this often, so that a kill costs no more than these seconds of it.
SAVE_INTERVAL_SECONDS = 2.0

Event = TypeVar("Event")


class _Run:
    """One answer under way."""

    def __init__(self, state: Talk, view: View):
        self.started: TurnStarted | None = None
        self.finished: TurnFinished | None = None
        self._state = state
        self._view = view
        self._next_save = 0.0

    def take(self, event: ChatEvent) -> None:
        """Show an event and save what it brought."""
        if isinstance(event, TurnStarted):
            self.started = event
            self._view.start(event)
            report_dropped(event)
        elif isinstance(event, PrefillProgress):
            self._view.show_prefill(event)
        elif isinstance(event, TurnFinished):
            self.finished = event
        else:
            self._view.show(event)
        if self._next_save <= (now := time.monotonic()) or self.finished is not None:
            self._state.keep()
            self._next_save = now + SAVE_INTERVAL_SECONDS


def run_answer(state: Talk, events: Iterator[ChatEvent], view: View) -> TurnRecord | None:
    """Show an answer until it ends or Ctrl-C stops it; None if it was stopped before it had begun.

    Raises: LLMCliError if it cannot be computed; the conversation then holds what there is of it.
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

    Raises: whatever `events` and `take` raise, once the answers are closed
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
    """What a user should know about how an answer ended, if it is not whole."""
    reason = record.finished.answer.finish_reason
    words = {"interrupted": "stopped", "length": "stopped at --max-new-tokens", "context": "the context is full"}
    why = words[reason] if reason in UNFINISHED else None
    if record.finished.is_complete is False:
        return f"{why or 'stopped at a stop string'}; what the schema asks for is not complete"
    return why


def report_dropped(event: TurnStarted) -> None:
    """Name the turns that have been dropped for a prompt."""
    if not event.num_dropped:
        return
    last = event.dropped_from + event.num_dropped - 1
    which = f"turn {last}" if event.num_dropped == 1 else f"turns {event.dropped_from} to {last}"
    again = f"; {event.num_history_computed} tokens of the rest are recomputed" if event.num_history_computed else ""
    terminal.warn(f"the context is full: the model no longer sees {which}{again}")
