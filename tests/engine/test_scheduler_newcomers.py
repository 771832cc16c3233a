"""Newcomers' prompts with running rows: these wait only briefly, and the prompts run in few passes."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from page_device import VOCAB_SIZE, NextToken, PageDevice, PageStep

from llmcli.engine.request import Finished, Request, ScoreRequest, Token
from llmcli.engine.scheduler import WAIT_SECONDS, Scheduler
from llmcli.engine.steps import MOST_FILL_TOKENS, FillBudget
from llmcli.runners.base import BLOCK_TOKENS, PAGE_TOKENS, Chosen
from llmcli.runners.step_device import Work
from llmcli.runners.stepping import SteppingRunner
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.base import NoText

GREEDY = Sampler(SamplingParams(temperature=0.0), seed=0)


def scheduler_of(device: PageDevice, wait_seconds: float = WAIT_SECONDS) -> Scheduler:
    return Scheduler(SteppingRunner(device), NoText(VOCAB_SIZE), wait_seconds=wait_seconds)


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
        if position + most >= prompt_len:
            return prompt_len
        return max((position + most) // PAGE_TOKENS, position // PAGE_TOKENS + 1) * PAGE_TOKENS


# A card that takes long for any span, one with slow tokens, a fast one, and one with slow attention.
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
    scheduler = scheduler_of(device, 0.035)
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
        assert num_steps <= 1.5 * fewest + 12  # some for learning
    assert max(held) <= 0.05


class JoiningDevice(FreeDevice):
    """The prompts of a step share one pass, of 7 ms and 25 us a token. Attributes: passes: the tokens of each prompt"""

    def __init__(self, next_token: NextToken, num_rows: int, **options: Any) -> None:
        options = {"max_seq_len": 5000, "works_ahead": True, **options}
        super().__init__(next_token, num_rows=num_rows, joins_prompts=True, **options)
        self.passes: list[list[int]] = []

    def run(self, works: Sequence[Work]) -> PageStep:
        lengths = [work.num_tokens for work in works if work.token_ids]
        if lengths:
            self.passes.append(lengths)
        seconds = pass_seconds(lengths) if lengths else 0.0
        return PageStep(super().run(works).choices(), seconds, [work.num_tokens for work in works])


def pass_seconds(lengths: Sequence[int]) -> float:
    return 0.007 + 2.5e-5 * sum(lengths)


def scheduler_that_runs(device: PageDevice, wait_seconds: float = WAIT_SECONDS) -> Scheduler:
    """With a text whose prompt has run."""
    scheduler = scheduler_of(device, wait_seconds)
    submit(scheduler, [1, 2, 3], device.limits.max_seq_len - 3)
    while not scheduler.usage.steps:
        scheduler.step()
    return scheduler


def tokens_of(scheduler: Scheduler, requests: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Run these requests to their ends; the tokens of each."""
    said: dict[int, tuple[int, ...]] = {}
    while len(said) < len(requests):
        for event in scheduler.step():
            if isinstance(event, Finished) and event.request in requests:
                said[event.request] = event.token_ids
    return said


def test_prompts_share_the_passes_over_the_weights() -> None:
    """Newcomers come in the time of few passes, each chooses what it chooses alone, and no row waits long."""

    def next_token(history: Sequence[int], sampler: Sampler) -> int:
        return 65 + hash(tuple(history)) % 20

    device = JoiningDevice(next_token, 100)
    scheduler = scheduler_that_runs(device, 0.035)
    lengths = [20 + 37 * number % 220 for number in range(90)]
    prompts = [[number + 4] * length for number, length in enumerate(lengths)]
    device.passes.clear()
    said = tokens_of(scheduler, [submit(scheduler, prompt, 3) for prompt in prompts])
    alone = []
    for prompt in prompts:
        history = list(prompt)
        for _ in range(3):
            history.append(next_token(history, GREEDY))
        alone.append(tuple(history[-3:]))
    assert [said[number] for number in sorted(said)] == alone
    assert sum(map(sum, device.passes)) == sum(lengths)
    room = int((0.035 - 0.007) / 2.5e-5) // BLOCK_TOKENS * BLOCK_TOKENS
    assert len(device.passes) <= 1.5 * sum(lengths) / room + 6  # some for learning
    assert max(map(pass_seconds, device.passes)) <= 0.045


def test_what_a_prompt_has_chosen_beside_others_can_be_read_ahead() -> None:
    device = JoiningDevice(lambda history, sampler: history[0], 10)
    scheduler = scheduler_that_runs(device)
    device.passes.clear()
    numbers = [submit(scheduler, [50 + number] * 30, 3) for number in range(3)]
    scheduler.step()
    assert device.passes == [[30] * 3]
    texts = [text for text in scheduler._running if text.sample.number in numbers]
    assert [text.read_ahead() for text in texts] == [(50,) * 2, (51,) * 2, (52,) * 2]  # with the next step


def test_a_short_prompt_counts_as_a_longer_one() -> None:
    """Cards compute short ones separately: fewer share a step than its tokens would allow."""
    device = JoiningDevice(lambda history, sampler: 65, 100)
    scheduler = scheduler_that_runs(device)
    device.passes.clear()
    tokens_of(scheduler, [submit(scheduler, [4 + number] * 10, 1) for number in range(60)])
    assert device.passes[:2] == [[10] * 4] * 2  # as of 256 tokens


def test_where_nobody_waits_prompts_share_the_longest_steps_at_once() -> None:
    """As in `batch`. With little time for prompts a step begins with few of them."""
    longest = []
    for wait_seconds in (0.035, math.inf):
        device = JoiningDevice(lambda history, sampler: 65, 100, max_seq_len=600)
        scheduler = scheduler_that_runs(device, wait_seconds)
        device.passes.clear()
        tokens_of(scheduler, [submit(scheduler, [4 + number] * 128, 1) for number in range(90)])
        longest.append(device.passes[0])
    assert longest == [[128, 128], [128] * (MOST_FILL_TOKENS // 128)]


def test_prompts_that_begin_alike_are_run_once() -> None:
    """The first of them runs alone; the others find its pages, and share a step."""
    device = JoiningDevice(lambda history, sampler: 65, 10)
    scheduler = scheduler_that_runs(device)
    device.passes.clear()
    common = list(range(100, 164))
    tokens_of(scheduler, [submit(scheduler, [*common, number, *([7] * 40)], 1) for number in range(4)])
    assert device.passes == [[105], [41, 41, 41]]
    device.passes.clear()
    tokens_of(scheduler, [submit(scheduler, [*common[:15], number, *([8] * 40)], 1) for number in range(4)])
    assert device.passes == [[56] * 4]  # less than a page is not shared


def test_who_runs_in_a_step_alone() -> None:
    """Prompts whose logits are read, also for scores; prompts of several samples, whose logits are kept."""
    device = JoiningDevice(lambda history, sampler: 65, 10)
    scheduler = scheduler_that_runs(device)
    device.passes.clear()
    plain = Request((1,) * 30, GREEDY, (0,), 1)
    last = [
        scheduler.submit(one)
        for one in (
            plain,
            replace(plain, prompt_token_ids=(2,) * 30),
            replace(plain, prompt_token_ids=(3,) * 31, num_alternatives=2),
            replace(plain, prompt_token_ids=(4,) * 30),
            ScoreRequest((5,) * 33, 1),
            replace(plain, prompt_token_ids=(6,) * 33, samples=(0, 1)),
            replace(plain, prompt_token_ids=(7,) * 30),
            replace(plain, prompt_token_ids=(8,) * 30),
        )
    ][-1]
    tokens_of(scheduler, [last])
    assert device.passes == [[30, 30], [31], [30], [32], [33], [30, 30]]


def test_rows_and_pages_that_are_not_there() -> None:
    """No more prompts start than there are rows; a prompt without pages waits, with its row."""
    device = JoiningDevice(lambda history, sampler: 65, 4)
    scheduler = scheduler_that_runs(device)
    device.passes.clear()
    tokens_of(scheduler, [submit(scheduler, [4 + number] * 20, 2) for number in range(7)])
    assert device.passes[0] == [20] * 3
    assert max(map(len, device.passes)) <= 3
    device = JoiningDevice(lambda history, sampler: 65, 4, num_pages=14, max_seq_len=224)
    scheduler = scheduler_that_runs(device)
    device.passes.clear()
    tokens_of(scheduler, [submit(scheduler, [4 + number] * 80, 2) for number in range(3)])
    assert device.passes == [[80, 80], [80]]


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
        super().__init__(chosen, seconds, [0] * len(chosen))  # nobody reads logits
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
