"""Says at the end which limit has cut a text, if the user did not set it."""

from collections.abc import Sequence

from llmcli.cli.terminal import terminal
from llmcli.engine.events import Event, Finished


class CutNotice:
    """An `Output` of one line on stderr.

    `default` is the number of new tokens where nobody asked for one, None if somebody did or there is no limit.
    `longest` is the largest context of the model.
    """

    def __init__(self, default: int | None, context: int, longest: int):
        self._default = default
        self._context = context
        self._longest = longest

    def show(self, event: Event) -> None:
        """Texts are not cut before they end."""

    def finish(self, finished: Sequence[Finished]) -> None:
        """Name the limits, each once."""
        reasons = {one.finish_reason for one in finished}
        if "length" in reasons and self._default is not None:
            terminal.info(f"stopped at {self._default} new tokens; --max-new-tokens N for more")
        if "context" in reasons:
            remedy = "; --context N for more" if self._context < self._longest else ", the model's largest"
            terminal.info(f"stopped: the context of {self._context} tokens is full{remedy}")
