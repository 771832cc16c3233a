"""`Generation`: one request on a runner of its own."""

from collections.abc import Iterator

from llmcli.engine.drafts import Drafting
from llmcli.engine.events import Event, Failed, Finished, Token
from llmcli.engine.request import Request
from llmcli.engine.scheduler import Scheduler
from llmcli.runners.base import Runner
from llmcli.tokenizer.base import Tokenizer


class Generation:
    """Runs a request; iterate over `events()`.

    A Ctrl-C may strike anywhere, in here or in the caller: the caller stops iterating and asks `interrupt()` for the
    end of the samples under way.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer, request: Request, drafting: Drafting | None = None):
        self._scheduler = Scheduler(runner, tokenizer, drafting=drafting)
        self._request = request

    def events(self) -> Iterator[Event]:
        """Prefill, then the tokens of every sample, each sample closed by its `Finished`.

        Raises: the first error of a sample
        """
        number = self._scheduler.submit(self._request)
        while not self._scheduler.is_idle:
            events = self._scheduler.step()
            while events:
                event = events.pop(0)
                if isinstance(event, Failed):
                    self._scheduler.cancel(number)
                    raise event.error
                yield event

    def interrupt(self) -> list[Token | Finished]:
        """Close the samples under way, as interrupted, and tell what had become known and was not asked for."""
        return [event for event in self._scheduler.interrupt() if isinstance(event, Token | Finished)]
