"""Text as it comes, one sample after the other; on a terminal the prompt that it continues stands before each."""

from llmcli.cli.output.base import RunFacts
from llmcli.cli.terminal import terminal
from llmcli.engine.events import Event, Finished, Token

SEPARATOR = "--- sample {number} ---"  # between two samples on stdout, on a line of its own


class TextOutput:
    """Writes each sample's text as it comes, whatever order the samples are computed in.

    The caller shows the prompt before the first, so that it stands there while the prompt is computed.
    """

    is_drawn = False  # whether `style` adds control sequences

    def __init__(self, facts: RunFacts):
        self._lead = facts.lead
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
                terminal.write(f"{SEPARATOR.format(number=self._waiting[0] + 1)}\n")
                terminal.show_prompt(self._lead)

    def style(self, token: Token) -> str:
        """The token's text as it is written."""
        return token.text

    def finish(self, finished: list[Finished]) -> None:
        """Everything has been written."""
