"""`scores`: the logits of every position of a text, as a scheduler's client."""

from collections.abc import Iterator, Sequence

from llmcli.engine.events import Scored
from llmcli.engine.request import ScoreRequest
from llmcli.engine.scheduler import Scheduler
from llmcli.runners.base import AllLogits, Runner


def scores(runner: Runner, token_ids: Sequence[int], first: int) -> Iterator[AllLogits]:
    """The logits that predict token_ids[first:], some at a time; all of them run anew.

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
