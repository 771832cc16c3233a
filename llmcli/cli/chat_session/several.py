"""Several answers to one message: each is shown when those before it have ended, the first as it comes."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator

from llmcli.cli.chat_session.answer import report_dropped, take_all
from llmcli.cli.chat_session.state import ChatSession, TurnRecord
from llmcli.cli.chat_session.view import View
from llmcli.cli.terminal import terminal
from llmcli.engine.chat_events import OfAnswer, Piece, SeveralEvent, TurnFinished, TurnStarted
from llmcli.engine.events import PrefillProgress


class _InOrder:
    """Shows events, those of later answers later."""

    def __init__(self, open_view: Callable[[], View]):
        self.started: TurnStarted | None = None
        self.first: TurnFinished | None = None
        self._open_view = open_view
        self._view = open_view()
        self._number = 1
        self._has_begun = False
        self._waiting: defaultdict[int, deque[Piece | TurnFinished]] = defaultdict(deque)

    def take(self, event: SeveralEvent) -> None:
        """Show an event, or keep it until its answer is shown."""
        if isinstance(event, TurnStarted):
            self.started = event
            self._view.start(event)
            report_dropped(event)
        elif isinstance(event, PrefillProgress):
            self._view.show_prefill(event)
        elif isinstance(event, OfAnswer):
            self._waiting[event.number].append(event.event)
            while self._waiting[self._number]:
                self._show(self._waiting[self._number].popleft())

    def _show(self, event: Piece | TurnFinished) -> None:
        if not self._has_begun:
            self._view.clear_status()
            terminal.info(f"[{self._number}]")
            self._has_begun = True
        if isinstance(event, Piece):
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
