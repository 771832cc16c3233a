"""The figures of `bench` from a runner's times: a runner with its own clock, and a real one that must agree."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from page_device import PageDevice, PageStep

from llmcli.checkpoint.model import open_model
from llmcli.errors import DeviceError
from llmcli.measure.bench import Bench, BenchOptions, measure_draft_steps
from llmcli.runners.base import Span
from llmcli.runners.step_device import Work
from llmcli.runners.stepping import SteppingRunner
from llmcli.runners.torch.load import load
from llmcli.sampling.params import Sampler

OPTIONS = BenchOptions(prompts=(100,), depths=(50,), num_rows=1, num_new_tokens=10, repeats=5)


class ClockedRunner(SteppingRunner):
    """A prompt takes 10 ms a token, the choice after it 100 ms; a later step 20 ms, plus 5 ms for each row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_rows: int = 1, chunk: int = 10_000) -> None:
        self.now = 0.0
        self.slowness = 1.0
        self.slows_down_by = 0.0  # with each prompt
        self.num_prompt_tokens: list[int] = []  # computed for each prompt
        self.num_steps = 0
        super().__init__(_ClockedDevice(self, num_rows, chunk))
        monkeypatch.setattr("llmcli.measure.bench.time", SimpleNamespace(perf_counter=lambda: self.now))


class _ClockedDevice(PageDevice):
    def __init__(self, runner: ClockedRunner, num_rows: int, chunk: int):
        super().__init__(lambda history, sampler: 7, num_rows=num_rows, max_seq_len=10_000, chunk=chunk)
        self.config = SimpleNamespace(vocab_size=100)
        self._runner = runner

    def run(self, works: Sequence[Work]) -> PageStep:
        runner = self._runner
        prompts = [work for work in works if work.token_ids]
        for work in prompts:
            runner.num_prompt_tokens.append(work.num_tokens)
            runner.now += 0.01 * work.num_tokens * runner.slowness + 0.1 * (work.choose == "last")
            runner.slowness += runner.slows_down_by
        if not prompts:
            runner.num_steps += 1
            runner.now += (0.02 + 0.005 * len(works)) * runner.slowness
        return super().run(works)


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

    def decode_floor_seconds(self, depth: int, num_rows: int = 1) -> float:
        return depth * num_rows / 5000

    def prefill_floor_seconds(self, num_tokens: int) -> float | None:
        return num_tokens / 400


def bench(runner: Any, **changes: Any) -> Bench:
    return Bench(runner, Predictor(), BenchOptions(**{**vars(OPTIONS), **changes}))


def test_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ClockedRunner(monkeypatch, chunk=16)
    measuring = bench(runner)
    measuring.check_tokens()
    runner.num_prompt_tokens.clear()
    (figures,) = measuring.measure_prompt(100)
    assert figures.seconds.median == pytest.approx(1.0)
    assert figures.tokens_per_second == pytest.approx(100)
    assert figures.first_token_seconds.median == pytest.approx(1.1)
    assert (figures.predicted_tokens_per_second, figures.predicted_first_token_seconds) == (50, 3)
    assert figures.floor_share == pytest.approx(0.25)
    # Two a run, one run to warm up; none finds a beginning of its prompt in the cache.
    assert runner.num_prompt_tokens == [*[16] * 6, 4] * 12


def test_decoding_is_timed_from_its_first_token_on(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ClockedRunner(monkeypatch)
    (figures,) = bench(runner).measure_decode(50)
    assert figures.step_seconds.median == pytest.approx(0.025)
    assert figures.tokens_per_second == pytest.approx(40)
    assert figures.bytes_per_step == 1000 + 10 * 55  # halfway through
    assert figures.bytes_per_second == pytest.approx(1550 / 0.025)
    assert figures.floor_share == pytest.approx(55 / 5000 / 0.025)  # halfway through
    assert figures.predicted_tokens_per_second == pytest.approx(1000 / 55)
    assert runner.num_prompt_tokens == [50] * 7  # one beforehand; a chunk of this device is longer than the prompt
    assert runner.num_steps == 6 * (10 + 1)


def test_rows_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    (figures,) = bench(ClockedRunner(monkeypatch, num_rows=4), num_rows=4).measure_decode(50)
    assert figures.step_seconds.median == pytest.approx(0.04)
    assert figures.tokens_per_second == pytest.approx(100)
    assert figures.bytes_per_step == 1000 + 10 * 55 * 4
    assert figures.predicted_tokens_per_second == pytest.approx(4 * 1000 / 220)


def test_all_rows_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ClockedRunner(monkeypatch, num_rows=60)
    runner._device.seconds = lambda position, num_tokens: 1.0  # type: ignore[attr-defined]  # running rows would not wait so long
    (figures,) = bench(runner, num_rows=60).measure_decode(50)
    assert figures.step_seconds.median == pytest.approx(0.02 + 0.005 * 60)
    assert runner.num_steps == 10 + 1


def test_median_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ClockedRunner(monkeypatch)
    runner.slows_down_by = 0.05  # and a run has two prompts
    spread = bench(runner).measure_prompt(100)[0].seconds
    assert (spread.median, spread.fastest, spread.slowest) == pytest.approx((1.3, 1.1, 1.5))
    assert spread.num_runs == 5


@pytest.mark.parametrize(("num_tokens", "num_runs"), [(200, 5), (700, 2), (1450, 1), (9000, 1)])
def test_long_runs_are_repeated_less_often(num_tokens: int, num_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ClockedRunner(monkeypatch)
    spread = bench(runner).measure_prompt(num_tokens)[0].seconds
    assert spread.num_runs == num_runs
    assert spread.median == pytest.approx(num_tokens / 100)
    # If a run takes half a minute, the warm-up run is the figure.
    assert len(runner.num_prompt_tokens) == 2 * (num_runs + (num_tokens < 1500))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_tokens_are_those_of_generate(num_rows: int, tiny_llama: Path) -> None:
    runner = load(open_model(tiny_llama), max_seq_len=100, num_rows=num_rows)
    assert bench(runner, num_rows=num_rows, num_new_tokens=20).check_tokens() == 20
    assert bench(runner, num_rows=num_rows, num_new_tokens=49).check_tokens() == 32


class Wrong:
    """A runner that in one place chooses another token than alone."""

    def __init__(self, runner: Any, wrong_row: int, wrong_step: int):
        self._runner = runner
        self._wrong = wrong_row, wrong_step
        self._num_chosen: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def queue(self, spans: Sequence[Span]) -> Any:
        queued = self._runner.queue(spans)
        choices = queued.choices()
        for place, span in enumerate(spans):
            if span.choose == "last":
                self._num_chosen[span.row] = step = self._num_chosen.get(span.row, -1) + 1
                if (list(self._num_chosen).index(span.row), step) == (self._wrong[0] + 2, self._wrong[1]):
                    choices[place] = (choices[place][-1]._replace(token_id=choices[place][-1].token_id + 1),)
        return SimpleNamespace(choices=lambda: choices, prompt_seconds=queued.prompt_seconds)


@pytest.mark.parametrize(("row", "step"), [(0, 0), (0, 9), (1, 4)])
def test_other_tokens_than_generates_are_refused(row: int, step: int, tiny_llama: Path) -> None:
    """The first two rows are the single texts."""
    runner = load(open_model(tiny_llama), max_seq_len=100, num_rows=2)
    with pytest.raises(DeviceError, match=f"where generate decodes .* at new token {step} of row {row}:"):
        bench(Wrong(runner, row, step), num_rows=2).check_tokens()


class Beside:
    """A runner whose rows choose other tokens with others than alone."""

    def __init__(self, runner: Any):
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def queue(self, spans: Sequence[Span]) -> Any:
        queued = self._runner.queue(spans)
        choices = queued.choices()
        if len(spans) > 1:
            choices = [(one[-1]._replace(token_id=(one[-1].token_id + 1) % 64),) for one in choices]
        return SimpleNamespace(choices=lambda: choices, prompt_seconds=queued.prompt_seconds)


# Steps with drafts on a runner with its own clock.


PROMPT = list(range(1, 41))


class ClockedDevice(PageDevice):
    """A step takes 20 ms and 1 ms for each draft; one that is queued during another waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, works_ahead: bool, lies: bool = False):
        super().__init__(self._next, works_ahead=works_ahead)
        self.now, self.end, self.lies = 0.0, 0.0, lies
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr("llmcli.measure.bench.time", clock)

    def _next(self, history: Sequence[int], sampler: Sampler) -> int:
        is_lie = self.lies and any(work.drafts for work in self.works[-1]) and len(history) > 50
        return (7 * len(history) + is_lie) % 200

    def run(self, works: Sequence[Work]) -> PageStep:
        step = super().run(works)
        self.now += 0.002  # what the host takes
        end = self.end = max(self.end, self.now) + 0.02 + 0.001 * sum(len(work.drafts) for work in works)

        class Step(PageStep):
            def choices(step) -> list:  # type: ignore[type-arg]
                self.now = max(self.now, end)
                return super().choices()

        return Step(step.choices(), step.prompt_seconds(), [work.num_tokens for work in works])


@pytest.mark.parametrize(("works_ahead", "plain"), [(False, 0.022), (True, 0.02)])
def test_times_and_gains(works_ahead: bool, plain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    device = ClockedDevice(monkeypatch, works_ahead=works_ahead)
    runner = SteppingRunner(device)
    figures = measure_draft_steps(runner, PROMPT, 7, 40, 3)
    assert [item.num_drafts for item in figures] == list(range(8))
    for item in figures:
        assert item.depth == len(PROMPT)
        assert item.step_seconds.num_runs == 3
        assert item.plain_seconds == pytest.approx(plain)
        assert item.step_seconds.median == pytest.approx(0.022 + 0.001 * item.num_drafts)
        assert item.steps_of_one == pytest.approx((0.022 + 0.001 * item.num_drafts) / plain)
        assert item.gain(0.0) == pytest.approx(1 / item.steps_of_one)
        assert item.gain(1.0) == pytest.approx((item.num_drafts + 1) / item.steps_of_one)
    assert figures[2].gain(0.5) == pytest.approx(1.75 / figures[2].steps_of_one)
    assert runner.free_pages == runner.limits.num_pages


def test_drafts_that_change_the_text_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SteppingRunner(ClockedDevice(monkeypatch, works_ahead=False, lies=True))
    with pytest.raises(DeviceError, match="drafts change the text, in steps with 1"):
        measure_draft_steps(runner, PROMPT, 7, 40, 1)
    assert runner.free_pages == runner.limits.num_pages
