"""Newcomers' prompts beside running rows: these wait for a moment only, and the prompts are run in few passes."""

from collections.abc import Sequence
from typing import Any

import pytest
from page_device import VOCAB_SIZE, PageDevice, PageStep

from llmcli.engine.events import Finished, Token
from llmcli.engine.fill import MOST_FILL_TOKENS, FillBudget
from llmcli.engine.request import Request
from llmcli.engine.scheduler import Scheduler
from llmcli.measure.bench import NoText
from llmcli.runners.base import BLOCK_TOKENS, PAGE_TOKENS, Chosen
from llmcli.runners.step_device import Work
from llmcli.runners.stepping import SteppingRunner
from llmcli.sampling.params import SamplingParams
from llmcli.sampling.sampler import Sampler

GREEDY = Sampler(SamplingParams(temperature=0.0), seed=0)


def scheduler_of(device: PageDevice) -> Scheduler:
    return Scheduler(SteppingRunner(device), NoText(VOCAB_SIZE))


def submit(scheduler: Scheduler, prompt: Sequence[int], max_new_tokens: int) -> int:
    return scheduler.submit(Request(tuple(prompt), GREEDY, (0,), max_new_tokens))


def test_running_rows_go_on_while_a_long_prompt_is_run() -> None:
    device = PageDevice(lambda history, sampler: 65, num_rows=2, max_seq_len=20_000, chunk=256)
    scheduler = scheduler_of(device)
    first = submit(scheduler, [1, 2, 3], 1000)
    while not scheduler.usage.steps:
        scheduler.step()
    submit(scheduler, [5] * 10_000, 1)
    waits = 0
    while True:
        events = scheduler.step()
        if any(isinstance(event, Finished) and event.request != first for event in events):
            break
        assert sum(isinstance(event, Token) and event.request == first for event in events) == 1
        waits += 1
    assert waits > 1


class FreeDevice(PageDevice):
    """Prompts may be cut at every page."""

    def method(self, position: int, prompt_len: int) -> int:
        return 1

    def span_end(self, position: int, most: int, prompt_len: int) -> int:
        end = max((position + most) // PAGE_TOKENS, position // PAGE_TOKENS + 1) * PAGE_TOKENS
        return min(end, prompt_len)


# A card that takes long for any span, one for which tokens are dear, a fast one, and one with slow attention.
@pytest.mark.parametrize(
    ("start", "per_token", "per_key"), [(0.031, 1.5e-5, 0), (0.008, 9e-5, 0), (0.002, 1e-5, 0), (0.012, 2.5e-5, 3e-9)]
)
def test_newcomers_hold_running_rows_up_for_a_moment_only(start: float, per_token: float, per_key: float) -> None:
    def seconds(position: int, num_tokens: int) -> float:
        return start + per_token * num_tokens + per_key * num_tokens * position

    device = FreeDevice(
        lambda history, sampler: 65,
        num_rows=40,
        max_seq_len=20_000,
        works_ahead=True,
        seconds=seconds,
    )
    scheduler = scheduler_of(device)
    submit(scheduler, [1, 2, 3], 10_000)
    while not scheduler.usage.steps:
        scheduler.step()
    first, held = 3, []
    for num_tokens, count in ((12, 30), (10_000, 3), (12, 30), (128, 30), (10_000, 3)):
        for _ in range(count):
            submit(scheduler, [first := first + 1] * num_tokens, 1)
        num_steps = scheduler.usage.steps
        while scheduler.num_waiting or len(scheduler._fills):
            device.works.clear()
            scheduler.step()
            spans = [work for works in device.works for work in works if work.token_ids]
            held.append(sum(seconds(work.position, work.num_tokens) for work in spans))
        num_steps = scheduler.usage.steps - num_steps
        room = (0.035 - start) / (per_token + per_key * num_tokens / 2)  # tokens of the longest span
        room = room // BLOCK_TOKENS * BLOCK_TOKENS
        fewest = count * num_tokens / room if num_tokens > room else count / (0.035 // seconds(0, num_tokens))
        assert num_steps <= 1.5 * fewest + 12  # some to learn in
    assert max(held) <= 0.05


class TimedDevice(FreeDevice):
    """Works one step after the other, 3 ms for choices, while the host goes on until it waits. Attributes: now"""

    def __init__(self, **options: Any) -> None:
        super().__init__(lambda history, sampler: 65, works_ahead=True, **options)
        self.now = self._is_done = 0.0

    def run(self, works: Sequence[Work]) -> PageStep:
        seconds = sum(self.seconds(work.position, work.num_tokens) for work in works if work.token_ids)
        is_decoding = any(not work.token_ids for work in works)
        self._is_done = max(self._is_done, self.now) + seconds + 0.003 * is_decoding
        return _TimedStep(self, super().run(works).choices(), seconds, self._is_done)


class _TimedStep(PageStep):
    def __init__(self, device: TimedDevice, chosen: list[Chosen], seconds: float, is_done: float):
        super().__init__(chosen, seconds)
        self._device = device
        self._is_done = is_done

    def choices(self) -> list[Chosen]:
        self._device.now = max(self._device.now, self._is_done)
        return super().choices()


def test_tokens_are_told_while_the_next_prompt_runs() -> None:
    device = TimedDevice(
        num_rows=8, max_seq_len=20_000, seconds=lambda position, num_tokens: 0.01 + 2.5e-5 * num_tokens
    )
    scheduler = scheduler_of(device)
    first = submit(scheduler, [1, 2, 3], 10_000)
    while not scheduler.usage.steps:
        scheduler.step()
    for number in range(20):
        submit(scheduler, [4 + number] * 2000, 3)
    told, num_finished = [device.now], 0
    while num_finished < 20:
        events = scheduler.step()
        told += [device.now for event in events if isinstance(event, Token) and event.request == first]
        num_finished += sum(isinstance(event, Finished) for event in events)
    assert max(later - earlier for earlier, later in zip(told, told[1:], strict=False)) < 0.05


def test_spans_become_shorter_when_tokens_become_dearer() -> None:
    budget = FillBudget(0.04)
    for per_token, fewest, most in ((5e-5, 512, 640), (1.5e-4, 128, 256), (5e-5, 512, 640)):
        for _ in range(40):
            budget.learn(budget.num_tokens, 0.01 + per_token * budget.num_tokens)
        assert fewest <= budget.num_tokens <= most


def test_a_span_takes_as_long_as_the_latest_of_as_many_blocks() -> None:
    budget = FillBudget(0.04)
    budget.learn(540, 0.01)
    assert budget.has_room(0.03, 530)
    assert not budget.has_room(0.031, 530)
    assert not budget.has_room(0.03, 640)  # it is longer
    assert not budget.has_room(0.001, 512)  # nothing is known of four blocks


def test_a_fast_card_soon_runs_long_spans() -> None:
    budget = FillBudget(0.04)
    for _ in range(6):
        budget.learn(budget.num_tokens, 0.001 + 1e-6 * budget.num_tokens)
    assert budget.num_tokens == MOST_FILL_TOKENS


def test_spans_are_whole_blocks() -> None:
    budget = FillBudget(0.04)
    for num_tokens, seconds in ((256, 0.02), (100, 0.05), (200, 0.01), (300, 0.041), (700, 0.001)):
        budget.learn(num_tokens, seconds)
        assert budget.num_tokens % BLOCK_TOKENS == 0
        assert budget.num_tokens >= BLOCK_TOKENS
