"""Clients of a scheduler: one request on its own runner, and the logits of every position of a text."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing

from llmcli.engine.drafts import Drafting
from llmcli.engine.events import Event, Failed, Finished, Scored, Token
from llmcli.engine.request import Request, ScoreRequest
from llmcli.engine.scheduler import Scheduler
from llmcli.runners.base import AllLogits, Runner
from llmcli.tokenizer.base import Tokenizer

# `Generation`: one request on its own runner.


class Generation:
    """Runs a request; iterate over `events()`.

    A Ctrl-C may come at any point, here or in the caller: the caller then stops iterating, and calls `interrupt()` to
    end the samples under way.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer, request: Request, drafting: Drafting | None = None):
        self._scheduler = Scheduler(runner, tokenizer, drafting=drafting)
        self._request = request

    def events(self) -> Iterator[Event]:
        """Prefill, then the tokens of all samples; each sample ends with its `Finished`.

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
        """End the samples under way as interrupted; return the events not yet taken."""
        return [event for event in self._scheduler.interrupt() if isinstance(event, Token | Finished)]


# The logits of every position of a text, from one model or several, by a scheduler.


def scores(runner: Runner, token_ids: Sequence[int], first: int) -> Generator[AllLogits, None, None]:
    """The logits that predict token_ids[first:], some at a time. All tokens run again.

    Shapes: each item [n, vocab_size] float32, the items together [len(token_ids) - first, vocab_size]
    Raises: ValueError as `ScoreRequest` and `Runner.open`
    """
    scheduler = Scheduler(runner)
    number = scheduler.submit(ScoreRequest(tuple(token_ids), first))
    try:
        while not scheduler.is_idle:
            for event in scheduler.step():
                assert isinstance(event, Scored)
                yield event.logits
    finally:
        scheduler.cancel(number)


def scores_side_by_side(
    runners: Sequence[Runner], token_ids: Sequence[int], first: int
) -> Iterator[tuple[AllLogits, ...]]:
    """The logits of several models at the same positions, though each device cuts a text in its own way.

    Shapes: each item one array [n, vocab_size] for each runner, n the same for all; else as `scores`
    Raises: as `scores`
    """
    num_left = len(token_ids) - first
    waiting: list[AllLogits | None] = [None] * len(runners)
    with ExitStack() as stack:
        streams = [stack.enter_context(closing(scores(runner, token_ids, first))) for runner in runners]
        while num_left:
            chunks = [next(stream) if rest is None else rest for stream, rest in zip(streams, waiting, strict=True)]
            count = min(map(len, chunks))
            yield tuple(chunk[:count] for chunk in chunks)
            waiting = [chunk[count:] if len(chunk) > count else None for chunk in chunks]
            num_left -= count
