"""Times steps of one row with drafts, and says what they gain where a draft is right with some chance."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.errors import DeviceError
from llmcli.measure.spread import Spread, spread_of
from llmcli.runners.base import Runner, Span, spans_of_prompt
from llmcli.sampling.params import Sampler, SamplingParams

RATES = (0.5, 0.7, 0.8, 0.9)  # chances that a draft is right, if those before it are
MIN_TOKENS = 24  # three steps of the longest

_GREEDY = Sampler(SamplingParams(temperature=0.0), seed=0)


@dataclass(frozen=True)
class DraftFigures:
    """A step of one row that held `depth` tokens: it runs the token chosen last and `num_drafts` drafts, all right.

    `plain_seconds` is a step of decoding without drafts. Units: seconds
    """

    depth: int
    num_drafts: int
    step_seconds: Spread
    plain_seconds: float

    @property
    def steps_of_one(self) -> float:
        """How many steps without drafts it takes."""
        return self.step_seconds.median / self.plain_seconds

    def gain(self, rate: float) -> float:
        """How much faster decoding is where a draft is right with chance `rate`, if those before it are."""
        tokens = sum(rate**place for place in range(self.num_drafts + 1))
        return tokens / self.steps_of_one


def measure_draft_steps(
    runner: Runner, prompt: Sequence[int], most: int, num_tokens: int, repeats: int
) -> list[DraftFigures]:
    """Time steps with 0 to `most` drafts behind a prompt, over a text of `num_tokens` tokens, MIN_TOKENS at least.

    They take turns. A step with 0 drafts is read before the next one is queued, as those with drafts are.
    Raises: DeviceError if drafts change the text
    """
    row = runner.open(prompt, _GREEDY)
    try:
        first = _run_prompt(runner, row, prompt)
        text, _ = _decode(runner, row, num_tokens)
        plain: list[float] = []
        medians: list[list[float]] = [[] for _ in range(most + 1)]
        for number in range(repeats + 1):
            _restart(runner, row, len(prompt), first)
            seconds = _decode(runner, row, num_tokens - 1)[1]
            of_drafts = [_time_steps(runner, row, len(prompt), first, text, num) for num in range(most + 1)]
            if number:  # the first round warms up
                plain.append(seconds)
                for times, one in zip(medians, of_drafts, strict=True):
                    times.append(one)
        usual = statistics.median(plain)
        return [DraftFigures(len(prompt), num, spread_of(times), usual) for num, times in enumerate(medians)]
    finally:
        runner.close(row)


def _run_prompt(runner: Runner, row: int, prompt: Sequence[int]) -> int:
    """Run the prompt; return the token chosen behind it."""
    for span in spans_of_prompt(runner, row, prompt, chooses=True):
        step = runner.queue([span])
    return _token_ids(step.choices())[0]


def _decode(runner: Runner, row: int, count: int) -> tuple[list[int], float]:
    """The next `count` tokens, and the seconds that one takes; queued ahead where the runner works ahead."""
    text: list[int] = []
    queued = [runner.queue([Span(row)])]
    times = []
    while len(text) < count:
        if runner.limits.works_ahead and len(text) + 1 < count:
            queued.append(runner.queue([Span(row)]))
        text += _token_ids(queued.pop(0).choices())
        times.append(time.perf_counter())
        if not queued and len(text) < count:
            queued.append(runner.queue([Span(row)]))
    return text, statistics.median(after - before for before, after in zip(times, times[1:], strict=False))


def _time_steps(runner: Runner, row: int, depth: int, first: int, text: Sequence[int], num_drafts: int) -> float:
    """Say the text again in steps with right drafts; the seconds of a step, the median."""
    said = _restart(runner, row, depth, first)
    times = []
    while len(said) + num_drafts < len(text):
        drafts = tuple(text[len(said) : len(said) + num_drafts])
        begin = time.perf_counter()
        said += _token_ids(runner.queue([Span(row, drafts=drafts)]).choices())
        times.append(time.perf_counter() - begin)
    if said != list(text[: len(said)]):
        raise DeviceError(f"drafts change the text, in steps with {num_drafts} of them; please report it")
    return statistics.median(times)


def _restart(runner: Runner, row: int, depth: int, first: int) -> list[int]:
    """Go back to the prompt and run the first token; return the one that follows."""
    runner.keep(row, depth)
    return _token_ids(runner.queue([Span(row, (first,))]).choices())


def _token_ids(choices: Sequence[object]) -> list[int]:
    (chosen,) = choices
    if isinstance(chosen, Exception):
        raise chosen
    assert isinstance(chosen, tuple)
    return [choice.token_id for choice in chosen]
