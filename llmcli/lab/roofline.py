"""How long every kernel of a model takes, and how fast it could be: the roofline of a card."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from llmcli.checkpoint.model import Model
from llmcli.errors import DeviceError
from llmcli.kernels.cache import OnCompile
from llmcli.kernels.device import Device
from llmcli.kernels.replay import Starter
from llmcli.lab.trial import MAX_LAUNCHES, Times, time_launches
from llmcli.lab.walk import MAX_PROMPT, Call, Lengths, Walk
from llmcli.runners.base import Runner, Span, spans_of_prompt
from llmcli.runners.cuda.load.model import load
from llmcli.sampling.params import Sampler, SamplingParams

# Times every kernel of a model alone, with the arrays that a step of the loaded model gives it.
#
# A step runs once, and the device notes all its starts. Then the launches of one call take turns in a graph: each layer
# has its own weights, so these are the rotating copies.

Noted = Sequence[tuple[Starter, Sequence[int]]]
OnProgress = Callable[[int, int], None]  # done so far, all

_STEPS_OF_A_GRAPH = 4
# Every run of the sampler advances its rows by a token: those of timed steps, and as many as the context has room for.
_ROUNDS = 7
_STEP_RUNS = 3 + (1 + _ROUNDS) * _STEPS_OF_A_GRAPH


@dataclass(frozen=True)
class TimedStep:
    """A timed step: as a whole, and a launch of each of the walk's calls. Units: seconds"""

    walk: Walk
    whole: Times
    calls: tuple[Times, ...]

    @property
    def alone_seconds(self) -> float:
        """The sum of all launches, each kind timed on its own."""
        return sum(times.median * len(call.places) for call, times in zip(self.walk.calls, self.calls, strict=True))


def measure_steps(
    device: Device,
    model: Model,
    lengths: Lengths,
    decode: Walk,
    prefill: Walk,
    *,
    on_compile: OnCompile,
    on_load: OnProgress,
    on_measure: OnProgress,
) -> tuple[TimedStep, TimedStep]:
    """Load a model, and time the launches of a step of decoding and of a prompt.

    Raises: LLMCliError and its subclasses; DeviceError if the card's launches differ from the walks'
    """
    runner = load_to_note(device, model, lengths, on_compile=on_compile, on_load=on_load)
    total, done = len(decode.calls) + len(prefill.calls), 0

    def count() -> None:
        nonlocal done
        done += 1
        on_measure(done, total)

    on_measure(0, total)
    decode_times = _time(device, decode, note_decode(device, runner, lengths), lengths, count)
    prefill_times = _time(device, prefill, note_prompt(device, runner, lengths), lengths, count)
    return decode_times, prefill_times


def load_to_note(
    device: Device, model: Model, lengths: Lengths, *, on_compile: OnCompile, on_load: OnProgress
) -> Runner:
    """Load a model to note its steps. Raises: LLMCliError and its subclasses"""
    return load(
        model,
        max_seq_len=lengths.context,
        num_rows=lengths.rows,
        prefill_chunk=MAX_PROMPT,
        uses_graphs=False,
        on_compile=on_compile,
        on_progress=on_load,
        device=device,
    )


def note_decode(device: Device, runner: Runner, lengths: Lengths) -> Noted:
    """The starts of a step of all rows. The rows keep no page, but the card still has their tables."""
    sampler = Sampler(SamplingParams(temperature=0.0), seed=0)
    rows = []
    for number in range(lengths.rows):
        prompt = _prompt(runner, lengths.depth, seed=number)
        row = runner.open(prompt, sampler)
        for span in spans_of_prompt(runner, row, prompt, chooses=True):
            runner.queue([span]).choices()
        runner.reserve(row, lengths.context)
        rows.append(row)
    noted = _note(device, lambda: runner.queue([Span(row) for row in rows]).choices())
    for row in rows:
        runner.close(row)
    return noted


def note_prompt(device: Device, runner: Runner, lengths: Lengths) -> Noted:
    """The starts of a prompt."""
    prompt = _prompt(runner, lengths.prompt, seed=lengths.rows)
    row = runner.open(prompt)
    noted = _note(device, lambda: runner.queue([next(spans_of_prompt(runner, row, prompt))]).choices())
    runner.close(row)
    return noted


def _prompt(runner: Runner, num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(runner.config.vocab_size), k=num_tokens)


def _note(device: Device, run: Callable[[], object]) -> Noted:
    noted: list[tuple[Starter, Sequence[int]]] = []
    device.noted = noted
    try:
        run()
    finally:
        device.noted = None
    return noted


def starts_of(walk: Walk, noted: Noted) -> list[Callable[[], None]]:
    """Every launch of a noted step, to be repeated. Raises: DeviceError if they are not those of the walk"""
    labels = tuple(starter.label for starter, _ in noted)
    if labels != walk.labels:
        raise DeviceError(
            f"{walk.title.lower()} starts {len(labels)} kernels, {len(walk.labels)} were expected: "
            "the times would mean nothing; please report it"
        )
    return [partial(starter.start, addresses) for starter, addresses in noted]


def _time(device: Device, walk: Walk, noted: Noted, lengths: Lengths, count: Callable[[], None]) -> TimedStep:
    starts = starts_of(walk, noted)

    def run_all() -> None:
        for start in starts:
            start()

    whole = time_launches(device, [run_all], _STEPS_OF_A_GRAPH, _ROUNDS)
    times = []
    for call in walk.calls:
        most = MAX_LAUNCHES
        if call.launch.stem == "sample_token":
            most = (lengths.context - lengths.depth - 1 - _STEP_RUNS - 3) // (1 + _ROUNDS)
        times.append(time_launches(device, [starts[place] for place in call.places], most, _ROUNDS))
        count()
    return TimedStep(walk, whole, tuple(times))


# The roofline of a card: how fast a kernel could be by its bytes and its operations, and how close it comes.
#
# Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52 (2009)

_FLOAT_BITS = 32


@dataclass(frozen=True)
class Ceilings:
    """The measured limits of a card: bytes a second that it reads, operations a second of large products.

    `flops` are by the type of the factors, and hold at least float32 and float16.
    """

    read_bytes: float
    flops: Mapping[str, float]

    def flops_of(self, call: Call) -> float:
        """The rate of products for a kernel: of its floats, or of the 16 bits to which codes are widened."""
        return self.flops["float32" if call.cost.element_bits == _FLOAT_BITS else "float16"]

    def least_seconds(self, call: Call) -> float:
        """The time of a launch that reads at full speed, or multiplies at full speed, whichever takes longer."""
        return max(call.num_bytes / self.read_bytes, call.cost.flops / self.flops_of(call))


@dataclass(frozen=True)
class Point:
    """A call on the roofline. `intensity` is operations a byte; `reached` and `ceiling` are operations a second.

    Without operations (`intensity` 0) only `share` applies: its share of the ceiling that its bytes set.
    """

    call: Call
    intensity: float
    reached: float
    ceiling: float
    share: float


@dataclass(frozen=True)
class Gap:
    """What a step loses against its ceilings. Units: seconds

    `least` is the time at the ceilings, `whole` the step's time. `lost` is what each kernel loses in all its launches,
    timed on their own, the largest first. A kernel faster than its ceiling, as it reads from L2, counts as one at its
    ceiling.
    """

    title: str
    least: float
    whole: float
    lost: Mapping[str, float]


def place_calls(step: TimedStep, ceilings: Ceilings) -> list[Point]:
    """Each call of a step on the roofline."""
    points = []
    for call, times in zip(step.walk.calls, step.calls, strict=True):
        least, flops = ceilings.least_seconds(call), call.cost.flops
        points.append(Point(call, flops / call.num_bytes, flops / times.median, flops / least, least / times.median))
    return points


def find_gap(step: TimedStep, ceilings: Ceilings) -> Gap:
    """Where a step spends its time beyond its ceilings."""
    least, lost = 0.0, dict[str, float]()
    for call, times in zip(step.walk.calls, step.calls, strict=True):
        bound, count = min(ceilings.least_seconds(call), times.median), len(call.places)
        least += bound * count
        lost[call.launch.stem] = lost.get(call.launch.stem, 0.0) + (times.median - bound) * count
    return Gap(step.walk.title, least, step.whole.median, dict(sorted(lost.items(), key=lambda one: -one[1])))
