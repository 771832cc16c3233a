"""Text as it comes, one sample after the other; on a terminal the prompt that it continues stands before each."""

from llmcli.cli.output.base import RunFacts
from llmcli.cli.terminal import terminal
from llmcli.engine.events import Event, Finished, Token


def begin_text(facts: RunFacts, sample: int) -> None:
    """Write what stands before a sample: a heading on stdout where there are several, and on a terminal the prompt."""
    if len(facts.samples) > 1:
        terminal.write(f"--- sample {sample + 1} ---\n")
    terminal.show_prompt(facts.lead)


class TextOutput:
    """Writes each sample's text as it comes, whatever order the samples are computed in.

    The caller begins the first with `begin_text`, so that the prompt stands there while it is computed.
    """

    is_drawn = False  # whether `style` adds control sequences

    def __init__(self, facts: RunFacts):
        self._facts = facts
        self._waiting = list(facts.samples)  # the first of them is being written
        self._pending: dict[int, str] = {sample: "" for sample in facts.samples}
        self._finished: set[int] = set()

    def show(self, event: Event) -> None:
        """Write what the event adds, if it is its sample's turn."""
        if isinstance(event, Token):
            self._pending[event.sample] += self.style(event)
        elif isinstance(event, Finished):
            self._pending[event.sample] += event.tail
            self._finished.add(event.sample)
        while self._waiting:
            sample = self._waiting[0]
            if text := self._pending[sample]:
                self._pending[sample] = ""
                terminal.write(text, is_drawn=self.is_drawn, wraps=True)
            if sample not in self._finished:
                return
            self._waiting.pop(0)
            terminal.write("\n")
            if self._waiting:
                begin_text(self._facts, self._waiting[0])

    def style(self, token: Token) -> str:
        """The token's text as it is written."""
        return token.text

    def finish(self, finished: list[Finished]) -> None:
        """Everything has been written."""
