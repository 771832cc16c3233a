"""The effect of a user's kernels, on a runner with its own clock, where ours take twice as long."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from measure.test_measure_bench import ClockedRunner, Predictor

from llmcli.measure import bench
from llmcli.measure.bench import NUM_STEPS, BenchOptions, KernelComparison, Spread, measure_change, run_in_turns
from llmcli.measure.subject import measure_subject

Slower = Callable[[], Any]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ClockedRunner:
    runner = ClockedRunner(monkeypatch)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: runner.now))
    return runner


@pytest.fixture
def engine_kernels(runner: ClockedRunner) -> Slower:
    @contextmanager
    def slower() -> Iterator[None]:
        runner.slowness = 2.0
        yield
        runner.slowness = 1.0

    return slower


def test_prompt_and_step(runner: ClockedRunner, engine_kernels: Slower) -> None:
    free = runner.free_pages
    change = measure_change(runner, engine_kernels, 100)
    assert change is not None
    assert change.num_tokens == 100
    assert change.own_prompt.median == pytest.approx(100 * 0.01 + 0.1)
    assert change.engine_prompt.median == pytest.approx(100 * 0.02 + 0.1)
    assert change.own_step.median == pytest.approx(0.025)
    assert change.engine_step.median == pytest.approx(0.05)
    assert (change.own_step.num_runs, change.engine_step.num_runs) == (5, 5)
    assert runner.num_prompt_tokens == [100] * 12  # each prompt was computed, none found in the cache
    assert runner.num_steps == 12 * NUM_STEPS
    assert runner.slowness == 1.0
    row = runner.open([1])  # the one row of the runner is free again
    runner.close(row)
    assert runner.free_pages <= free


def test_a_long_prompt_is_cut(runner: ClockedRunner, engine_kernels: Slower) -> None:
    change = measure_change(runner, engine_kernels, 9000)
    assert change is not None
    assert change.num_tokens == 512


def test_the_context_bounds_the_prompt(
    runner: ClockedRunner, engine_kernels: Slower, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = SimpleNamespace(max_seq_len=NUM_STEPS + 4, num_rows=1)
    monkeypatch.setattr(runner, "limits", limits)
    change = measure_change(runner, engine_kernels, 100)
    assert change is not None
    assert change.num_tokens == 3
    limits.max_seq_len = NUM_STEPS + 1
    assert measure_change(runner, engine_kernels, 100) is None


def test_bench_measures_every_figure_with_both(runner: ClockedRunner, engine_kernels: Slower) -> None:
    planned: Any = SimpleNamespace(predictor=Predictor(), precision="float32")
    subject: Any = SimpleNamespace(full_name="model")
    target: Any = SimpleNamespace(read_bytes=1e6)
    options = BenchOptions((100, 50), (30,), 1, 4, 3)
    comparison = KernelComparison({"rms_norm": "mine.cu"}, engine_kernels)
    counts: list[tuple[int, int]] = []
    arguments = (subject, target, planned, runner, 1.0, options, "no meter", lambda *count: counts.append(count))
    report = measure_subject(*arguments, comparison)
    assert report.engine is not None
    assert dict(report.engine.own_kernels) == {"rms_norm": "mine.cu"}
    for own, engine in zip(report.prompts, report.engine.prompts, strict=True):
        assert (own.num_tokens, own.seconds.num_runs) == (engine.num_tokens, engine.seconds.num_runs)
        assert engine.seconds.median == pytest.approx(2 * own.seconds.median)
    (own_step,), (engine_step,) = report.decode, report.engine.decode
    assert own_step.step_seconds.median == pytest.approx(0.025)
    assert engine_step.step_seconds.median == pytest.approx(0.05)
    assert counts == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert measure_subject(*arguments).engine is None


def test_no_way_is_always_the_first() -> None:
    inside: list[str] = []

    def way(name: str) -> Callable[[], Any]:
        @contextmanager
        def enter() -> Iterator[None]:
            inside.append(name)
            yield

        return enter

    found = run_in_turns(lambda: len(inside), (way("own"), way("engine")), 3)
    assert inside == ["own", "engine", "engine", "own", "own", "engine"]
    assert found == [[1, 4, 5], [2, 3, 6]]


def test_spreads_overlap_where_runs_do() -> None:
    first = Spread(2, 1, 3, 5)
    assert first.overlaps(Spread(4, 3, 5, 5))
    assert Spread(4, 3, 5, 5).overlaps(first)
    assert not first.overlaps(Spread(4, 3.5, 5, 5))
    assert not Spread(4, 3.5, 5, 5).overlaps(first)
    assert first.overlaps(Spread(2, 1.5, 2.5, 5))
