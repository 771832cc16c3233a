"""Measures a loaded model: prompts of several lengths, decoding at several depths, drafts, and the user's kernels.

Times what `generate` does, after checking it. Medians over a few runs, after one warm-up.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from llmcli.engine.request import Request, Token
from llmcli.engine.scheduler import Scheduler
from llmcli.errors import DeviceError
from llmcli.measure.energy import Energy, EnergyMeter
from llmcli.measure.plan import Predictor
from llmcli.runners.base import Runner, Span, spans_of_prompt
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.base import NoText

# `Spread`: the times of several equal runs.


@dataclass(frozen=True)
class Spread:
    """Seconds of several equal runs."""

    median: float
    fastest: float
    slowest: float
    num_runs: int

    def overlaps(self, other: "Spread") -> bool:
        """Whether the times of both overlap."""
        return self.fastest <= other.slowest and other.fastest <= self.slowest


def spread_of(times: Sequence[float]) -> Spread:
    """The median and both ends."""
    return Spread(statistics.median(times), min(times), max(times), len(times))


# Times steps of one row with drafts, and computes what they gain if a draft is right with some chance.

RATES = (0.5, 0.7, 0.8, 0.9)  # chances that a draft is right, if those before it are
MIN_TOKENS = 24  # three steps of the longest

_GREEDY = Sampler(SamplingParams(temperature=0.0), seed=0)


@dataclass(frozen=True)
class DraftFigures:
    """A step of one row that held `depth` tokens: it runs the latest token and `num_drafts` drafts, all right.

    `plain_seconds` is a step of decoding without drafts. Units: seconds
    """

    depth: int
    num_drafts: int
    step_seconds: Spread
    plain_seconds: float

    @property
    def steps_of_one(self) -> float:
        """The number of steps without drafts that take as long."""
        return self.step_seconds.median / self.plain_seconds

    def gain(self, rate: float) -> float:
        """How much faster decoding is if a draft is right with chance `rate`, given that those before it are."""
        tokens = sum(rate**place for place in range(self.num_drafts + 1))
        return tokens / self.steps_of_one


def measure_draft_steps(
    runner: Runner, prompt: Sequence[int], most: int, num_tokens: int, repeats: int
) -> list[DraftFigures]:
    """Time steps with 0 to `most` drafts after a prompt, over a text of `num_tokens` tokens, MIN_TOKENS at least.

    They take turns. A step with 0 drafts is read before the next is queued, like those with drafts.
    Raises: DeviceError if drafts change the text
    """
    row = runner.open(prompt, _GREEDY)
    try:
        for span in spans_of_prompt(runner, row, prompt, chooses=True):
            step = runner.queue([span])
        first = _token_ids(step.choices())[0]
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


def _decode(runner: Runner, row: int, count: int) -> tuple[list[int], float]:
    """The next `count` tokens, and the seconds for each; queued ahead if the runner works ahead."""
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
    """Run the text again in steps with right drafts; return the median seconds of a step."""
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


NUM_CHECKED_TOKENS = 32
# The tokens that the first of many rows may have before the last begins; the context must have room for them.
SPARE_TOKENS = 32

# If the repeats of one figure would take longer, fewer are made.
_SECONDS_A_FIGURE = 30.0
# The energy counter may lag by 0.1 s, so it is read over this long: without work, and with it at each depth.
_IDLE_SECONDS = 1.0
_ENERGY_SECONDS = 2.0

T = TypeVar("T")
Way = Callable[[], AbstractContextManager[None]]  # inside, the runner launches one set of kernels or another


@dataclass(frozen=True)
class PromptFigures:
    """A prompt of `num_tokens` in one row: the times to its logits and to the first new token.

    `floor_seconds` is the least time that the prompt could take here, see `Predictor.prefill_floor_seconds`.
    Units: tokens a second; seconds
    """

    num_tokens: int
    seconds: Spread
    first_token_seconds: Spread
    predicted_seconds: float | None
    predicted_first_token_seconds: float | None
    floor_seconds: float | None

    @property
    def spread(self) -> Spread:
        """The times that `tokens_per_second` comes from."""
        return self.seconds

    @property
    def tokens_per_second(self) -> float:
        """In the median run."""
        return self.num_tokens / self.seconds.median

    @property
    def floor_share(self) -> float | None:
        """The floor over the median run: 1 is as fast as the device allows."""
        return None if self.floor_seconds is None else self.floor_seconds / self.seconds.median

    @property
    def predicted_tokens_per_second(self) -> float | None:
        """The prediction of `plan`."""
        return None if self.predicted_seconds is None else self.num_tokens / self.predicted_seconds


@dataclass(frozen=True)
class DecodeFigures:
    """Decoding `num_new_tokens` in each of `num_rows` rows that held `depth` tokens; a step is a token for each row.

    `floor_seconds` is the least time of a step here, halfway through, see `Predictor.decode_floor_seconds`.
    Units: `bytes_per_step` are read, halfway through; joules without and watts with the idle power of the card, None
    if they cannot be measured
    """

    depth: int
    num_rows: int
    num_new_tokens: int
    step_seconds: Spread
    bytes_per_step: int
    predicted_step_seconds: float
    floor_seconds: float
    joules_per_token: float | None
    average_watts: float | None

    @property
    def spread(self) -> Spread:
        """The times that `tokens_per_second` comes from."""
        return self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """In the median run, over all rows."""
        return self.num_rows / self.step_seconds.median

    @property
    def floor_share(self) -> float:
        """The floor over the median run: 1 is as fast as the device allows."""
        return self.floor_seconds / self.step_seconds.median

    @property
    def predicted_tokens_per_second(self) -> float:
        """The prediction of `plan`."""
        return self.num_rows / self.predicted_step_seconds

    @property
    def bytes_per_second(self) -> float:
        """Bytes read in the median run."""
        return self.bytes_per_step / self.step_seconds.median


@dataclass(frozen=True)
class BenchOptions:
    """What to measure. Prompts and depths must leave room in the runner's rows for the new tokens.

    With `most_drafts` also steps of one row with up to that many drafts.
    """

    prompts: Sequence[int]
    depths: Sequence[int]
    num_rows: int
    num_new_tokens: int
    repeats: int
    most_drafts: int = 0


@dataclass(frozen=True)
class KernelComparison:
    """The user's kernels that the runner launches: their files by name. In `engine_kernels()` it launches ours."""

    own_kernels: Mapping[str, str]
    engine_kernels: Way

    @property
    def ways(self) -> tuple[Way, Way]:
        """With the user's kernels, and with ours."""
        return nullcontext, self.engine_kernels


@dataclass(frozen=True)
class EngineFigures:
    """The same figures with our kernels instead of the user's, whose files are `own_kernels` by name."""

    own_kernels: Mapping[str, str]
    prompts: tuple[PromptFigures, ...]
    decode: tuple[DecodeFigures, ...]


@dataclass(frozen=True)
class BenchReport:
    """The measurements of a model on a device, whose memory reads `read_bytes_per_second`.

    `idle_watts` is the device's power with the model loaded; None if unknown, for the reason `energy_problem`. If the
    user's kernels have run, `engine` has the figures of ours.
    """

    model: str
    precision: str
    device: str
    cache_type: str
    context: int
    read_bytes_per_second: float
    load_seconds: float
    num_checked_tokens: int
    idle_watts: float | None
    energy_problem: str | None
    prompts: tuple[PromptFigures, ...]
    decode: tuple[DecodeFigures, ...]
    engine: EngineFigures | None = None
    draft_steps: tuple[DraftFigures, ...] = ()


class Bench:
    """Measures one runner. With a `meter` it first waits a second, to measure the idle power."""

    def __init__(
        self,
        runner: Runner,
        predictor: Predictor,
        options: BenchOptions,
        meter: EnergyMeter | None = None,
    ):
        self._runner = runner
        self._predictor = predictor
        self._options = options
        self._tokenizer = NoText(runner.config.vocab_size)
        self._random = random.Random(0)
        self._meter = meter
        if meter is not None:
            meter.wait_idle(_IDLE_SECONDS)

    @property
    def idle_watts(self) -> float | None:
        """The device's power with the model loaded and nothing to do; None if it cannot be measured."""
        return None if self._meter is None else self._meter.idle_watts

    def check_tokens(self) -> int:
        """Generate two texts, each in a row alone and then both in all rows in turns; return how many tokens agree.

        Raises: DeviceError if they differ
        """
        count = min(NUM_CHECKED_TOKENS, self._options.num_new_tokens)
        depth = min(self._options.depths)
        two = [self._prompt(depth), self._prompt(depth)]
        prompts = [two[row % 2] for row in range(self._options.num_rows)]
        alone = [self._texts([prompt], count)[0] for prompt in two]
        wanted = [alone[row % 2] for row in range(len(prompts))]
        found = self._texts(prompts, count)
        for row, texts in enumerate(zip(found, wanted, strict=True)):
            for position, (ours, expected) in enumerate(zip(*texts, strict=True)):
                if ours != expected:
                    raise DeviceError(
                        f"bench decodes token {ours} where generate decodes {expected}, at new token {position} of "
                        f"row {row}: its figures would mean nothing; please report it"
                    )
        return count

    def measure_prompt(self, num_tokens: int, ways: Sequence[Way] = (nullcontext,)) -> list[PromptFigures]:
        """Time a prompt and the choice of the next token, for each set of kernels in turns."""

        def run() -> tuple[float, float]:
            prompt = self._prompt(num_tokens)
            row = self._runner.open(prompt, _GREEDY)
            start = time.perf_counter()
            for span in spans_of_prompt(self._runner, row, prompt):
                step = self._runner.queue([span])
            step.choices()
            prefilled = time.perf_counter() - start
            self._runner.close(row)
            start = time.perf_counter()
            self._texts([self._prompt(num_tokens)], 1)
            return prefilled, time.perf_counter() - start

        return [
            PromptFigures(
                num_tokens,
                spread_of([seconds for seconds, _ in runs]),
                spread_of([seconds for _, seconds in runs]),
                self._predictor.prefill_seconds(num_tokens),
                self._predictor.first_token_seconds(num_tokens),
                self._predictor.prefill_floor_seconds(num_tokens),
            )
            for runs in self._repeat(run, ways)
        ]

    def measure_decode(self, depth: int, ways: Sequence[Way] = (nullcontext,)) -> list[DecodeFigures]:
        """Time steps of all rows, once each has its prompt and a token, for each set of kernels in turns."""
        options = self._options
        count, num_rows = options.num_new_tokens, options.num_rows
        prompts = [self._prompt(depth) for _ in range(num_rows)]
        self._texts(prompts, 1)  # once these are cached, all rows can begin within a few steps

        def run() -> tuple[float, int]:
            # All rows begin at once, so they are equally deep.
            scheduler = Scheduler(self._runner, self._tokenizer, wait_seconds=math.inf)
            numbers = [scheduler.submit(self._request(prompt, count + SPARE_TOKENS)) for prompt in prompts]
            while scheduler.num_waiting or scheduler.usage.most_rows < num_rows:
                scheduler.step()
            start = time.perf_counter()
            for _ in range(count):
                scheduler.step()
            seconds = time.perf_counter() - start
            for number in numbers:
                scheduler.cancel(number)
            return seconds / count, scheduler.usage.row_steps + num_rows  # each row's first is chosen with its prompt

        halfway = depth + (count + 1) // 2
        bytes_per_step = self._predictor.decode_bytes(halfway, num_rows)
        figures = []
        for way, runs in zip(ways, self._repeat(run, ways), strict=True):
            spread = spread_of([seconds for seconds, _ in runs])
            with way():
                energy, num_tokens = self._energy(run)
            figures.append(
                DecodeFigures(
                    depth,
                    num_rows,
                    count,
                    spread,
                    bytes_per_step,
                    self._predictor.decode_seconds(halfway, num_rows),
                    self._predictor.decode_floor_seconds(halfway, num_rows),
                    energy.joules_per_token(num_tokens) if energy else None,
                    energy.average_watts if energy else None,
                )
            )
        return figures

    def measure_drafts(self, depth: int) -> list[DraftFigures]:
        """Time steps of one row with 0 drafts, 1, and so on."""
        options = self._options
        count = max(options.num_new_tokens, MIN_TOKENS)
        return measure_draft_steps(self._runner, self._prompt(depth), options.most_drafts, count, options.repeats)

    def _energy(self, run: Callable[[], tuple[float, int]]) -> tuple[Energy | None, int]:
        """The energy of further runs, one after the other, long enough to measure, and their number of tokens."""
        if self._meter is None or self._meter.idle_watts is None:
            return None, 0
        start, num_tokens = self._meter.read(), 0
        begin = time.perf_counter()
        while time.perf_counter() - begin < _ENERGY_SECONDS:
            num_tokens += run()[1]
        return self._meter.used(start, self._meter.read()), num_tokens

    def _texts(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """The greedy texts after these prompts, all side by side."""
        scheduler = Scheduler(self._runner, self._tokenizer)
        texts: dict[int, list[int]] = {scheduler.submit(self._request(prompt, count)): [] for prompt in prompts}
        while not scheduler.is_idle:
            for event in scheduler.step():
                if isinstance(event, Token):
                    texts[event.request].append(event.token_id)
        return list(texts.values())

    def _request(self, prompt: Sequence[int], count: int) -> Request:
        return Request(tuple(prompt), _GREEDY, samples=(0,), max_new_tokens=count)

    def _prompt(self, num_tokens: int) -> list[int]:
        """Random ids, different in each call: cached tokens would not run again."""
        return self._random.choices(range(self._runner.config.vocab_size), k=num_tokens)

    def _repeat(self, run: Callable[[], T], ways: Sequence[Way]) -> list[list[T]]:
        """The results of each way's runs, without a warm-up run unless it is the only one."""
        start = time.perf_counter()
        first = run_in_turns(run, ways, 1)
        seconds_a_run = (time.perf_counter() - start) / len(ways)
        num_runs = min(self._options.repeats, int(_SECONDS_A_FIGURE / seconds_a_run))
        return run_in_turns(run, ways, num_runs) if num_runs else first


def run_in_turns(run: Callable[[], T], ways: Sequence[Way], num_rounds: int) -> list[list[T]]:
    """The results of `run` in each way. Every other round reverses their order, so that none profits from it."""
    found: list[list[T]] = [[] for _ in ways]
    for number in range(num_rounds):
        pairs = list(zip(ways, found, strict=True))
        for way, results in reversed(pairs) if number % 2 else pairs:
            with way():
                results.append(run())
    return found


# The effect of the user's kernels on a loaded model: times a prompt and decode steps, in turns with ours.

MAX_PROMPT = 512  # tokens: a longer prompt would keep the user waiting
NUM_STEPS = 16
_REPEATS = 5


@dataclass(frozen=True)
class KernelChange:
    """The user's kernels and ours: a prompt of `num_tokens` up to its next token, and a decode step after it."""

    num_tokens: int
    own_prompt: Spread
    engine_prompt: Spread
    own_step: Spread
    engine_step: Spread


def measure_change(runner: Runner, engine_kernels: Way, num_tokens: int) -> KernelChange | None:
    """Time prompts of up to `num_tokens`, and steps after them; None if the context has no room for the steps.

    In `engine_kernels()` the runner launches our kernels. The two take turns, after a warm-up run of each.
    Raises: LLMCliError and its subclasses
    """
    length = min(num_tokens, MAX_PROMPT, runner.limits.max_seq_len - NUM_STEPS - 1)
    if length < 1:
        return None
    numbers = random.Random(0)

    def run() -> tuple[float, float]:
        # Different ids in each run: cached tokens would not run again.
        return _run(runner, numbers.choices(range(runner.config.vocab_size), k=length))

    times = run_in_turns(run, (nullcontext, engine_kernels), 1 + _REPEATS)
    prompts, steps = ([spread_of([one[part] for one in runs[1:]]) for runs in times] for part in (0, 1))
    return KernelChange(length, *prompts, *steps)


def _run(runner: Runner, prompt: Sequence[int]) -> tuple[float, float]:
    """Seconds of the prompt, and of a step."""
    row = runner.open(prompt, _GREEDY)
    try:
        begin = time.perf_counter()
        for span in spans_of_prompt(runner, row, prompt, chooses=True):
            runner.queue([span]).choices()
        prefilled = time.perf_counter()
        step = runner.queue([Span(row)])
        for _ in range(NUM_STEPS - 1):
            following = runner.queue([Span(row)])
            step.choices()
            step = following
        step.choices()
        return prefilled - begin, (time.perf_counter() - prefilled) / NUM_STEPS
    finally:
        runner.close(row)
