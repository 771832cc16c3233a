"""Steps with drafts on a runner with its own clock."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from page_device import PageDevice, PageStep

from llmcli.errors import DeviceError
from llmcli.measure.bench import measure_draft_steps
from llmcli.runners.step_device import Work
from llmcli.runners.stepping import SteppingRunner
from llmcli.sampling.params import Sampler

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
