"""The roofline: recorded and timed steps, also on a card with a model; ceilings, places and the gap, by hand."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmcli.checkpoint.model import open_model
from llmcli.errors import DeviceError
from llmcli.kernels.device import Device
from llmcli.kernels.launches import Launch
from llmcli.kernels.spec import KernelCost
from llmcli.lab import roofline, trial
from llmcli.lab.roofline import Ceilings, TimedStep, find_gap, place_calls
from llmcli.lab.trial import Times
from llmcli.lab.walk import LEAST_ROOM, Call, Lengths, Walk, walk_model
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.runners.base import Span
from llmcli.runners.numpy.load import load

COST = KernelCost(read_bytes=1000, written_bytes=24, flops=10)


@dataclass
class Starter:
    """Counts its starts."""

    label: tuple[str, str] | None
    starts: list[Sequence[int]] = field(default_factory=list)

    def start(self, addresses: Sequence[int]) -> None:
        self.starts.append(addresses)


def walk_of(*stems: str) -> Walk:
    """A call for each stem, whose launches are those of the same stem."""
    calls = []
    for stem in dict.fromkeys(stems):
        places = tuple(place for place, one in enumerate(stems) if one == stem)
        name = f"{stem}<1>"
        calls.append(Call(Launch(stem, name, (1,), 32, ()), "", COST, places, None))
    labels = tuple((stem, f"{stem}<1>") for stem in stems)
    return Walk("A step", labels, tuple(calls))


def noted(walk: Walk) -> list[tuple[Starter, list[int]]]:
    return [(Starter((stem, name)), [place]) for place, (stem, name) in enumerate(walk.labels)]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(number of different starts, most launches) of each series; a series takes 1 us a start and number."""
    series: list[tuple[int, int]] = []

    def time_launches(device: Any, starts: Sequence[Callable[[], None]], most: int, num_rounds: int) -> Times:
        series.append((len(starts), most))
        for start in starts:
            start()
        return Times(len(series) * 1e-6, 0.0)

    monkeypatch.setattr(roofline, "time_launches", time_launches)
    return series


def test_every_call_is_timed_with_its_own_addresses(timed: list[tuple[int, int]]) -> None:
    walk = walk_of("embedding", "gemv", "gemm_wide", "gemv", "gemm_wide")
    launches, done = noted(walk), []
    lengths = Lengths.within(4096, None, None, 1)
    times = roofline._time(None, walk, launches, lengths, lambda: done.append(1))  # type: ignore[arg-type]
    assert [number for number, _ in timed] == [1, 1, 2, 2]  # the whole step, then each call
    assert [starter.starts for starter, _ in launches] == [[[place]] * 2 for place in range(5)]
    assert times.whole.median == pytest.approx(1e-6)
    assert times.alone_seconds == pytest.approx(2e-6 + 2 * 3e-6 + 2 * 4e-6)
    assert len(done) == 3


@pytest.mark.parametrize("stems", [("embedding", "gemv"), ("embedding", "gemv", "gemv", "rms_norm")])
def test_other_launches_than_those_of_the_walk_are_refused(stems: tuple[str, ...]) -> None:
    walk = walk_of("embedding", "gemv", "gemv")
    lengths = Lengths.within(4096, None, None, 1)
    with pytest.raises(DeviceError, match="3 were expected"):
        roofline._time(None, walk, noted(walk_of(*stems)), lengths, lambda: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("maximum", [1 + LEAST_ROOM, 300, 1024, 131072])
def test_the_sampler_never_leaves_the_context(timed: list[tuple[int, int]], maximum: int) -> None:
    """Each run advances the row: the recorded step, the timed steps, and the sampler's own."""
    lengths = Lengths.within(maximum, None, None, 1)
    walk = walk_of("gemv", "sample_token")
    roofline._time(None, walk, noted(walk), lengths, lambda: None)  # type: ignore[arg-type]
    whole, _, sampler = (most for _, most in timed)
    assert sampler >= 4
    moves = 1 + sum(3 + (1 + roofline._ROUNDS) * most for most in (whole, sampler))
    assert lengths.depth + moves <= lengths.context


@dataclass
class Watched:
    """A runner, and the spans that it queued while a device recorded."""

    runner: Any
    device: Any
    spans: list[list[tuple[int, int, int]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def queue(self, spans: Sequence[Span]) -> Any:
        if self.device.noted is not None:
            self.spans.append([(one.row, self.runner.num_tokens(one.row), len(one.token_ids)) for one in spans])
        return self.runner.queue(spans)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_steps_that_are_noted(tiny_llama: Path, rows: int) -> None:
    """On any runner: all rows at the requested depth, then a prompt; all pages are released."""
    lengths = Lengths(prompt=16, depth=33, rows=rows, context=64)
    runner = load(open_model(tiny_llama), max_seq_len=64, num_rows=rows)
    watched, free = Watched(runner, SimpleNamespace(noted=None)), runner.free_pages
    roofline.note_decode(watched.device, watched, lengths)  # type: ignore[arg-type]
    roofline.note_prompt(watched.device, watched, lengths)  # type: ignore[arg-type]
    decode, prompt = watched.spans
    assert [(depth, count) for _, depth, count in decode] == [(33, 0)] * rows
    assert [(begin, count) for _, begin, count in prompt] == [(0, 16)]
    assert watched.device.noted is None
    assert runner.free_pages == free


class FakeDevice:
    """A card whose launches take a microsecond, and whose graphs hold what was captured."""

    def __init__(self) -> None:
        self.clock, self.num_starts, self.graphs = 0.0, 0, []
        self._captured: int | None = None
        self.stream = self

    def __enter__(self) -> None: ...

    def __exit__(self, *arguments: object) -> None: ...

    def begin_capture(self) -> None:
        self._captured = 0

    def end_capture(self) -> Any:
        held, self._captured = self._captured or 0, None
        self.graphs.append(held)
        return SimpleNamespace(launch=lambda stream: self._work(held))

    def start(self) -> None:
        if self._captured is None:
            self._work(1)
        else:
            self._captured += 1

    def _work(self, number: int) -> None:
        self.num_starts += number
        self.clock += 1e-6 * number

    def now(self) -> Any:
        begin = self.clock
        return SimpleNamespace(time=begin, seconds_until=lambda later: later.time - begin)


@pytest.mark.parametrize(("num_starts", "most", "held"), [(1, 400, 400), (16, 400, 400), (500, 400, 500), (1, 10, 10)])
def test_a_graph_holds_as_many_launches_as_allowed(num_starts: int, most: int, held: int) -> None:
    device = FakeDevice()
    times = trial.time_launches(device, [device.start] * num_starts, most, num_rounds=7)  # type: ignore[arg-type]
    assert device.graphs == [held]
    assert times.median == pytest.approx(1e-6)
    assert device.num_starts <= 3 + 8 * held


@pytest.mark.cuda
@pytest.mark.whole_card
@pytest.mark.parametrize("rows", [1, 5])
def test_a_model_on_a_card(device: Device, rows: int) -> None:
    """The card launches what the walk says; every kernel takes time, and a step about as long as its parts."""
    model = open_model(resource_folder(STORYTELLER))
    lengths = Lengths.within(model.config.max_position_embeddings, 100, 200, rows)
    walks = walk_model(model, lengths, device.facts, device.arch)
    silent: Any = {name: lambda done, total: None for name in ("on_compile", "on_load", "on_measure")}
    for step in roofline.measure_steps(device, model, lengths, *walks, **silent):
        assert all(0 < times.fastest <= times.median < 0.01 for times in step.calls)
        assert math.isfinite(step.whole.median)
        assert step.alone_seconds / 3 < step.whole.median < 3 * step.alone_seconds


CEILINGS = Ceilings(1e12, {"float32": 50e12, "float16": 500e12, "int8": 1000e12})


def call(stem: str, num_bytes: int, flops: int, count: int = 1, bits: int = 8) -> Call:
    cost = KernelCost(num_bytes - 8, 8, flops, element_bits=bits)
    return Call(Launch(stem, f"{stem}<1>", (1,), 32, ()), "", cost, tuple(range(count)), None)


CALLS = (
    call("gemv", 8_000_000, 16_000_000, count=2),  # reads for 8 us
    call("matmul", 1_000_000, 5_000_000_000),  # multiplies for 10 us in 16 bits
    call("matmul32", 1_000_000, 5_000_000_000, bits=32),  # for 100 us in 32
    call("embedding", 1_000_000, 0, bits=0),  # reads for 1 us, here from L2
)
SECONDS = (10e-6, 16e-6, 125e-6, 0.5e-6)
STEP = TimedStep(Walk("A step", (), CALLS), Times(160e-6, 0.0), tuple(Times(one, one) for one in SECONDS))


def test_the_ceiling_is_the_slower_of_bytes_and_operations() -> None:
    assert [CEILINGS.least_seconds(one) for one in CALLS] == pytest.approx([8e-6, 10e-6, 100e-6, 1e-6])


def test_calls_have_their_place() -> None:
    points = place_calls(STEP, CEILINGS)
    assert [point.intensity for point in points] == pytest.approx([2, 5000, 5000, 0])
    assert [point.reached for point in points] == pytest.approx([1.6e12, 312.5e12, 40e12, 0])
    assert [point.ceiling for point in points] == pytest.approx([2e12, 500e12, 50e12, 0])
    assert [point.share for point in points] == pytest.approx([0.8, 0.625, 0.8, 2.0])


def test_the_gap_is_what_kernels_lose() -> None:
    gap = find_gap(STEP, CEILINGS)
    assert gap.least == pytest.approx(2 * 8e-6 + 10e-6 + 100e-6 + 0.5e-6)
    assert gap.whole == 160e-6
    assert gap.lost == pytest.approx({"matmul32": 25e-6, "matmul": 6e-6, "gemv": 4e-6, "embedding": 0.0})
    assert list(gap.lost) == ["matmul32", "matmul", "gemv", "embedding"]
