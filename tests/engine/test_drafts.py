"""Texts with drafts are the texts without, for any source of drafts."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_runs import PROMPT, loop, request, run, told
from page_device import PageDevice, PageStep
from scripted_drafts import ScriptedSource
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.engine.draft_sources import DraftModel, NgramSource
from llmcli.engine.drafts import Drafting, DraftSource, DraftUsage, Guesses
from llmcli.engine.request import Finished, KeptRow, Token
from llmcli.engine.scheduler import Scheduler
from llmcli.runners.base import Chosen
from llmcli.runners.numpy.load import load
from llmcli.runners.step_device import Work
from llmcli.runners.stepping import SteppingRunner
from llmcli.sampling.params import Sampler
from llmcli.tokenizer.base import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("drafts") / "model")


# A draft model


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.3])
@pytest.mark.parametrize("samples", [(0,), (0, 1, 2)])
def test_a_draft_model_that_is_the_model_is_always_right(
    folder: Path, tokenizer: Tokenizer, temperature: float, samples: tuple[int, ...]
) -> None:
    """It draws with the text's random numbers, so at any temperature."""
    model, wanted = open_model(folder), request(temperature, samples)
    expected = told(run(load(model, max_seq_len=200, num_rows=3), tokenizer, wanted))
    runner = load(model, max_seq_len=200, num_rows=3)
    drafting = Drafting(DraftModel(load(model, max_seq_len=200, num_rows=3)), least=7)
    assert told(run(runner, tokenizer, wanted, drafting)) == expected
    usage = drafting.usage
    assert usage.num_kept == usage.num_drafts > 0
    assert usage.tokens_per_step == pytest.approx({1: 8, 3: 2}[len(samples)], rel=0.2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_draft_model(folder: Path, tmp_path: Path, tokenizer: Tokenizer, temperature: float) -> None:
    other = write_tiny_llama(tmp_path / "other", num_hidden_layers=1)
    wanted = request(temperature)
    expected = told(run(load(open_model(folder), max_seq_len=200), tokenizer, wanted))
    # Its context is shorter than the text.
    drafting = Drafting(DraftModel(load(open_model(other), max_seq_len=70)), least=3)
    assert told(run(load(open_model(folder), max_seq_len=200), tokenizer, wanted, drafting)) == expected
    assert drafting.usage.num_drafts > 10


def test_a_draft_model_goes_on_with_a_conversation(folder: Path, tokenizer: Tokenizer) -> None:
    model, drafter = open_model(folder), load(open_model(folder), max_seq_len=300)
    drafting, prompt = Drafting(DraftModel(drafter), least=5), PROMPT
    for turn in range(3):
        wanted = replace(request(1.0, most=20), prompt_token_ids=prompt)
        wanted = replace(wanted, sampler=replace(wanted.sampler, num_prompt_tokens=len(prompt), seed=turn))
        expected = told(run(load(model, max_seq_len=300), tokenizer, wanted))
        assert told(run(load(model, max_seq_len=300), tokenizer, wanted, drafting)) == expected
        said = next(event.token_ids for event in expected if isinstance(event, Finished))
        prompt = (*prompt, *said, *b" and")
    assert drafting.usage.num_kept == drafting.usage.num_drafts
    assert len(drafter._rows) == 1


# n-grams


@pytest.mark.parametrize("works_ahead", [False, True])
def test_a_text_that_repeats_itself_needs_few_steps(tokenizer: Tokenizer, works_ahead: bool) -> None:
    expected = told(run(SteppingRunner(PageDevice(loop)), tokenizer, request(most=100)))
    device, drafting = PageDevice(loop, works_ahead=works_ahead), Drafting(NgramSource(), least=7)
    assert told(run(SteppingRunner(device), tokenizer, request(most=100), drafting)) == expected
    assert drafting.usage.steps < 35
    assert len(device.works) < 40


@pytest.mark.parametrize("works_ahead", [False, True])
def test_many_rows_have_no_drafts(tokenizer: Tokenizer, works_ahead: bool) -> None:
    for num_rows, least_drafts, most_drafts in ((1, 1, 7), (2, 1, 6), (4, 1, 4), (5, 0, 0), (9, 0, 0)):
        device = PageDevice(loop, num_rows=num_rows, works_ahead=works_ahead)
        source = ScriptedSource(loop, 0.5)
        run(SteppingRunner(device), tokenizer, request(1.0, range(num_rows)), Drafting(source, least=7))
        drafts = [sum(len(work.drafts) for work in works) for works in device.works if len(works) == num_rows]
        assert least_drafts <= max(drafts) <= most_drafts
        assert source.num_open == 0


# Ahead of the device


class LateDevice(PageDevice):
    """Returns choices late; records for every step whether the previous one had been read."""

    def __init__(self, **options: Any):
        super().__init__(works_ahead=True, **options)
        self.unread: list[PageStep] = []
        self.was_ahead: list[bool] = []

    def run(self, works: Sequence[Work]) -> PageStep:
        step = super().run(works)
        self.was_ahead.append(bool(self.unread))
        self.unread.append(step)
        step.choices = partial(self._read, step)  # type: ignore[method-assign]
        return step

    def _read(self, step: PageStep) -> list[Chosen]:
        if step in self.unread:
            self.unread.remove(step)
        return PageStep.choices(step)


def shuffled(history: Sequence[int], sampler: Sampler) -> int:
    """A text that repeats some pairs of tokens, and continues differently each time."""
    return 65 + int(np.random.default_rng([len(history), sampler.sample_index]).integers(64))


def drafting_at(share: float) -> Drafting:
    """By n-grams, on a device where a draft takes this share of a step."""
    drafting = Drafting(NgramSource())
    for num_drafts in (0, 1, 1, 1, 1):
        drafting.learn(1, num_drafts, 0, 1.0 + share * num_drafts)
    drafting.usage = DraftUsage()
    drafting.learn = lambda *numbers: None  # type: ignore[method-assign]
    return drafting


def test_a_text_that_does_not_repeat_itself_runs_ahead(tokenizer: Tokenizer) -> None:
    device = LateDevice(next_token=shuffled)
    events = run(SteppingRunner(device), tokenizer, request(most=600), drafting_at(share=0.25))
    assert told(events) == told(run(SteppingRunner(LateDevice(next_token=shuffled)), tokenizer, request(most=600)))
    assert sum(device.was_ahead[100:]) >= 0.98 * len(device.was_ahead[100:])


def test_steps_that_were_queued_ahead_are_timed(tokenizer: Tokenizer) -> None:
    drafting = Drafting(NgramSource())
    begin = time.perf_counter()
    run(SteppingRunner(LateDevice(next_token=shuffled)), tokenizer, request(most=300), drafting)
    usage = drafting.usage
    assert usage.steps + usage.num_kept >= 298
    steps = usage._of_rows[1]
    assert 0 < steps.seconds_with + steps.seconds_without <= time.perf_counter() - begin


def test_a_text_that_begins_to_repeat_itself_has_drafts(tokenizer: Tokenizer) -> None:
    def late_loop(history: Sequence[int], sampler: Sampler) -> int:
        return (shuffled if len(history) < 300 else loop)(history, sampler)

    device = LateDevice(next_token=late_loop)
    events = run(SteppingRunner(device), tokenizer, request(most=700), drafting_at(share=0.04))
    assert told(events) == told(run(SteppingRunner(PageDevice(late_loop)), tokenizer, request(most=700)))
    assert sum(len(work.drafts) for works in device.works for work in works) > 250
    assert len(device.works) < 450


def test_a_prompt_is_looked_through_while_the_device_runs_it(tokenizer: Tokenizer) -> None:
    class Noted(NgramSource):
        def begin(self, prompt: Sequence[int], sampler: Sampler) -> Guesses:
            begun.append((len(device.works), len(device.unread)))
            return super().begin(prompt, sampler)

    begun: list[tuple[int, int]] = []
    device = LateDevice(next_token=loop)
    run(SteppingRunner(device), tokenizer, request(), Drafting(Noted()))
    assert begun == [(1, 1)]


def test_the_device_works_while_a_client_takes_the_events(tokenizer: Tokenizer) -> None:
    """Also if each step is read before the next, which is queued before the events are delivered."""
    device = LateDevice(next_token=loop)
    scheduler = Scheduler(SteppingRunner(device), tokenizer, drafting=Drafting(NgramSource(), least=3))
    scheduler.submit(request(most=200))
    was_working = []
    while not scheduler.is_idle:
        events = scheduler.step()
        if not scheduler.is_idle and any(isinstance(event, Token) for event in events):
            was_working.append(bool(device.unread))
    assert len(was_working) > 20
    assert all(was_working)
    assert sum(len(work.drafts) for works in device.works for work in works) > 100


def test_texts_side_by_side_share_every_step(tokenizer: Tokenizer) -> None:
    """One that has drafts and one that does not: both are in each step, till one of them ends."""

    def one_loops(history: Sequence[int], sampler: Sampler) -> int:
        return (shuffled if sampler.sample_index else loop)(history, sampler)

    device = LateDevice(next_token=one_loops, num_rows=2)
    run(SteppingRunner(device), tokenizer, request(samples=(0, 1), most=60), Drafting(NgramSource(), least=2))
    both = [len(works) == 2 for works in device.works]
    first = both.index(True)
    together = both[first : len(both) - both[::-1].index(True)]
    assert len(together) > 10
    assert all(together)


# The end of a text


@pytest.mark.parametrize("place", range(1, 10))
@pytest.mark.parametrize("how", ["eos", "stop", "length", "context"])
def test_a_text_ends_in_the_middle_of_a_span(tokenizer: Tokenizer, how: str, place: int) -> None:
    """The kept row holds the same tokens as without drafts."""
    wanted, max_seq_len = request(most=None), 300
    if how == "eos":
        wanted = replace(wanted, sampler=replace(wanted.sampler, eos_token_ids=frozenset({200})))
    elif how == "stop":
        wanted = replace(wanted, stop_strings=("z!",))
    elif how == "length":
        wanted = replace(wanted, max_new_tokens=10 + place)
    else:
        max_seq_len = len(PROMPT) + 10 + place

    def next_token(history: Sequence[int], sampler: Sampler) -> int:
        ending = {"eos": [200], "stop": [*b"z!"]}.get(how, [])
        num_said = len(history) - len(PROMPT) - 10 - place
        return ending[num_said] if 0 <= num_said < len(ending) else loop(history, sampler)

    found = []
    for drafting in (None, Drafting(ScriptedSource(next_token, 1.0), least=7)):
        kept, runner = KeptRow(), SteppingRunner(PageDevice(next_token, max_seq_len=max_seq_len))
        events = run(runner, tokenizer, replace(wanted, kept_row=kept), drafting)
        assert kept.row is not None
        found.append((told(events), list(runner.token_ids(kept.row)), runner.num_tokens(kept.row)))
        end = events[-1]
        assert isinstance(end, Finished)
        assert end.finish_reason == how
    assert found[0] == found[1]
    assert drafting is not None
    assert drafting.usage.num_kept > 5


# Room


def test_drafts_take_no_page_from_a_text(tokenizer: Tokenizer) -> None:
    """With one page less than both texts need, the same one waits, equally long."""
    preemptions = []
    for drafting in (None, Drafting(ScriptedSource(loop, 0.0), least=3)):
        runner = SteppingRunner(PageDevice(loop, num_rows=2, max_seq_len=160, num_pages=7))
        scheduler = Scheduler(runner, tokenizer, drafting=drafting)
        for sample in range(2):
            scheduler.submit(request(samples=(sample,), most=40))
        while not scheduler.is_idle:
            scheduler.step()
        preemptions.append(scheduler.usage.preemptions)
        assert runner.free_pages == 7
    assert preemptions == [1, 1]


# What is measured


class SlowSource:
    """A source whose drafts cost something; counts how often it is asked."""

    is_free = False

    def __init__(self, inner: DraftSource):
        self.inner = inner

    def begin(self, prompt: Sequence[int], sampler: Sampler):  # type: ignore[no-untyped-def]
        return self.inner.begin(prompt, sampler)


@pytest.mark.parametrize("is_free", [True, False])
def test_drafts_that_are_wrong_are_given_up(tokenizer: Tokenizer, is_free: bool) -> None:
    """Also if they are free. Drafts with a cost are tried again now and then."""
    device = PageDevice(loop)
    source: DraftSource = ScriptedSource(loop, 0.0)
    run(SteppingRunner(device), tokenizer, request(most=500), Drafting(source if is_free else SlowSource(source)))
    with_drafts = [bool(work.drafts) for works in device.works for work in works]
    assert sum(with_drafts[:40]) > 0
    assert sum(with_drafts[100:]) <= (2 if is_free else 20)


def test_drafts_that_cost_time_come_back_once_they_are_right() -> None:
    """A trial costs more than a draft: the source first processes all tokens of the text since its last use."""
    drafting = Drafting(SlowSource(ScriptedSource(lambda history, sampler: history[-1] % 100 + 1, 1.0)))
    text = drafting.begin((1,), request().sampler)
    assert text is not None
    drafting.learn(1, 0, 0, 1.0)
    said, lengths = [2], []
    for step in range(400):
        drafts = drafting.drafts(text, said, 7, 1)
        is_wrong = 20 <= step < 200
        said += [0] if is_wrong else [said[-1] % 100 + 1 + place for place in range(len(drafts) + 1)]
        made_up = 5.0 * (text.is_trial and bool(drafts))
        drafting.learn(1, len(drafts), 0 if is_wrong else len(drafts), 1.0 + 0.1 * len(drafts) + made_up)
        lengths.append(len(drafts))
    assert lengths[10:20] == [7] * 10
    assert 2 < sum(lengths[60:200]) < 8  # one in 32 tokens
    assert lengths[-10:] == [7] * 10


def test_what_a_draft_costs_is_measured_before_there_are_many(tokenizer: Tokenizer) -> None:
    """With `auto`: one draft a step, four times."""
    device = PageDevice(loop)
    run(SteppingRunner(device), tokenizer, request(most=60), Drafting(ScriptedSource(loop, 1.0)))
    lengths = [len(work.drafts) for works in device.works for work in works if work.drafts]
    assert lengths[:4] == [1, 1, 1, 1]


def test_gain_compares_with_steps_without_drafts() -> None:
    usage = DraftUsage()
    for _ in range(10):
        usage.count(1, 0, 0, 0.010)
        usage.count(1, 3, 2, 0.012)
    assert (usage.num_drafts, usage.num_kept, usage.steps) == (30, 20, 20)
    assert usage.tokens_per_step == 2
    assert usage.step_seconds == pytest.approx((0.012, 0.010))
    assert usage.gain == pytest.approx(40 * 0.010 / 0.22)


def test_gain_compares_steps_of_as_many_rows() -> None:
    usage = DraftUsage()
    assert usage.gain is usage.step_seconds is None
    usage.count(16, 0, 0, 0.080)
    usage.count(1, 7, 7, 0.012)
    assert usage.gain is usage.step_seconds is None  # a single row never ran without
    usage.count(1, 0, 0, 0.006)
    assert usage.step_seconds == pytest.approx((0.012, 0.006))
    assert usage.gain == pytest.approx((0.080 + (1 + 1 + 7) * 0.006) / (0.080 + 0.018))
    usage.count(2, 2, 2, 0.010)
    usage.count(2, 0, 0, 0.008)
    assert usage.step_seconds == pytest.approx((0.011, 0.007))
    assert usage.gain == pytest.approx((0.080 + 9 * 0.006 + 3 * 0.008) / (0.080 + 0.018 + 0.018))
