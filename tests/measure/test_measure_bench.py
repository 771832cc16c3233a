"""What `bench` makes of a runner's times: a runner that moves a clock of its own, and a real one that must agree."""

from collections.abc import Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmcli.checkpoint.model import open_model
from llmcli.errors import DeviceError
from llmcli.measure.bench import Bench, BenchOptions
from llmcli.runners.torch.load import load

OPTIONS = BenchOptions(prompts=(100,), depths=(50,), num_rows=1, num_new_tokens=10, repeats=5)


class ClockedRunner:
    """A prompt takes 10 ms a token; the first token of a decode 100 ms; a later one 20 ms, plus 5 ms for each row."""

    config = SimpleNamespace(vocab_size=100)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_rows: int = 1) -> None:
        self.now = 0.0
        self.slowness = 1.0
        self.slows_down_by = 0.0
        self.lengths = [0] * num_rows
        self.runs: list[tuple[str, int]] = []
        monkeypatch.setattr("llmcli.measure.bench.time", SimpleNamespace(perf_counter=lambda: self.now))

    def truncate(self, row: int, num_tokens: int) -> None:
        assert self.lengths[row] >= num_tokens
        self.lengths[row] = num_tokens

    def copy_row(self, source: int, target: int) -> None:
        self.lengths[target] = self.lengths[source]

    def prefill(self, row: int, token_ids: Sequence[int]) -> Generator[int, None, None]:
        assert all(0 <= token_id < 100 for token_id in token_ids)
        self.runs.append(("prefill", len(token_ids) - self.lengths[row]))
        yield 0
        self.now += 0.01 * (len(token_ids) - self.lengths[row]) * self.slowness
        self.slowness += self.slows_down_by
        self.lengths[row] = len(token_ids)
        yield len(token_ids)

    def decode(self, rows: Sequence[int], samplers: Sequence[Any]) -> Generator[list[int], None, None]:
        self.runs.append(("decode", self.lengths[rows[0]]))
        self.now += 0.1
        while True:
            for row in rows:
                self.lengths[row] += 1
            yield [7] * len(rows)
            self.now += (0.02 + 0.005 * len(rows)) * self.slowness


class Predictor:
    """Steps read 1000 bytes and 10 for each token of a row."""

    def decode_bytes(self, depth: int, num_rows: int = 1) -> int:
        return 1000 + 10 * depth * num_rows

    def decode_seconds(self, depth: int, num_rows: int = 1) -> float:
        return depth * num_rows / 1000

    def prefill_seconds(self, num_tokens: int) -> float | None:
        return num_tokens / 50

    def first_token_seconds(self, num_tokens: int) -> float | None:
        return num_tokens / 50 + 1


def bench(runner: Any, **changes: Any) -> Bench:
    return Bench(runner, Predictor(), 1e6, BenchOptions(**{**vars(OPTIONS), **changes}))


def test_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ClockedRunner(monkeypatch)
    figures = bench(runner).measure_prompt(100)
    assert figures.seconds.median == pytest.approx(1.0)
    assert figures.tokens_per_second == pytest.approx(100)
    assert figures.first_token_seconds.median == pytest.approx(1.1)
    assert (figures.predicted_tokens_per_second, figures.predicted_first_token_seconds) == (50, 3)
    assert runner.runs == [("prefill", 100), ("decode", 100)] * 6  # one to warm up; none finds the prompt cached


def test_decoding_is_timed_from_its_first_token_on(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ClockedRunner(monkeypatch)
    figures = bench(runner).measure_decode(50)
    assert figures.step_seconds.median == pytest.approx(0.025)
    assert figures.tokens_per_second == pytest.approx(40)
    assert figures.bytes_per_step == 1000 + 10 * 55  # halfway through
    assert figures.bytes_per_second == pytest.approx(1550 / 0.025)
    assert figures.bandwidth_share == pytest.approx(0.062)
    assert figures.predicted_tokens_per_second == pytest.approx(1000 / 55)
    assert runner.runs == [("prefill", 50)] + [("decode", 50)] * 6


def test_rows_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = bench(ClockedRunner(monkeypatch, num_rows=4), num_rows=4).measure_decode(50)
    assert figures.step_seconds.median == pytest.approx(0.04)
    assert figures.tokens_per_second == pytest.approx(100)
    assert figures.bytes_per_step == 1000 + 10 * 55 * 4
    assert figures.predicted_tokens_per_second == pytest.approx(4 * 1000 / 220)


def test_median_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ClockedRunner(monkeypatch)
    runner.slows_down_by = 0.1
    spread = bench(runner).measure_prompt(100).seconds
    assert (spread.median, spread.fastest, spread.slowest) == pytest.approx((1.3, 1.1, 1.5))
    assert spread.num_runs == 5


@pytest.mark.parametrize(("num_tokens", "num_runs"), [(400, 5), (1400, 2), (2900, 1), (9000, 1)])
def test_long_runs_are_repeated_less_often(num_tokens: int, num_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ClockedRunner(monkeypatch)
    spread = bench(runner).measure_prompt(num_tokens).seconds
    assert spread.num_runs == num_runs
    assert spread.median == pytest.approx(num_tokens / 100)
    # Of one that takes half a minute, the run that would have warmed up is the figure.
    assert len(runner.runs) == 2 * (num_runs + (num_tokens < 3000))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_tokens_are_those_of_generate(num_rows: int, tiny_llama: Path) -> None:
    runner = load(open_model(tiny_llama), max_seq_len=100, num_rows=num_rows)
    assert bench(runner, num_rows=num_rows, num_new_tokens=20).check_tokens() == 20
    assert bench(runner, num_rows=num_rows, num_new_tokens=49).check_tokens() == 32


class Wrong:
    """A runner that decodes another token than `generate` gets, in one place."""

    def __init__(self, runner: Any, wrong_row: int, wrong_step: int):
        self._runner = runner
        self._wrong = wrong_row, wrong_step
        self._num_decodes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def decode(self, rows: Sequence[int], samplers: Sequence[Any]) -> Generator[list[int], None, None]:
        self._num_decodes += 1
        for step, token_ids in enumerate(self._runner.decode(rows, samplers)):
            if self._num_decodes == 2 and step == self._wrong[1]:
                token_ids[self._wrong[0]] += 1
            yield token_ids


@pytest.mark.parametrize(("row", "step"), [(0, 0), (0, 9), (1, 4)])
def test_other_tokens_than_generates_are_refused(row: int, step: int, tiny_llama: Path) -> None:
    runner = load(open_model(tiny_llama), max_seq_len=100, num_rows=2)
    with pytest.raises(DeviceError, match=f"where generate decodes .* at new token {step} of row {row}"):
        bench(Wrong(runner, row, step), num_rows=2).check_tokens()
