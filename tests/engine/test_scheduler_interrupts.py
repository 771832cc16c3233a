"""Ctrl-C at any line of the engine and the runner: no row and no event is lost, and a conversation continues."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import interrupted_lines
import pytest
from page_device import PageDevice
from scripted_drafts import ScriptedSource
from tiny_models import EOS_ID

from llmcli.engine.drafts import Drafting
from llmcli.engine.request import Event, Finished, KeptRow, Request, Token
from llmcli.engine.scheduler import Generation, Scheduler
from llmcli.engine.steps import Fill
from llmcli.runners.stepping import SteppingRunner
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.base import Tokenizer

FILES = (
    *("drafts.py", "draft_sources.py", "scheduler.py", "steps.py", "texts.py"),
    *("stepping.py", "pages.py"),
)
TEXT = [*b"some words", EOS_ID]


strike_at = partial(interrupted_lines.strike_at, FILES)


def request(prompt: Sequence[int], samples: Sequence[int], kept: KeptRow | None = None) -> Request:
    sampler = Sampler(SamplingParams(temperature=0.0), seed=1, eos_token_ids=frozenset({EOS_ID}))
    return Request(tuple(prompt), sampler, tuple(samples), 50, kept_row=kept)


def runner_of(prompt_len: int, num_rows: int, works_ahead: bool) -> SteppingRunner:
    def next_token(history: Sequence[int], sampler: Sampler) -> int:
        said = len(history) - prompt_len
        return TEXT[said] if said < len(TEXT) else EOS_ID

    return SteppingRunner(PageDevice(next_token, num_rows=num_rows, chunk=16, works_ahead=works_ahead))


def right_drafts() -> Drafting:
    return Drafting(ScriptedSource(lambda history, sampler: (TEXT * 2)[len(history) - 20], chance=0.9), least=3)


@pytest.mark.parametrize(
    ("num_samples", "works_ahead", "drafts", "moment"),
    [(1, False, False, 1), (1, True, True, 2), (3, False, True, 1), (3, True, False, 2)],
)
def test_no_row_and_no_event_is_lost(
    tokenizer: Tokenizer, num_samples: int, works_ahead: bool, drafts: bool, moment: int
) -> None:
    """Struck before every second one of the first lines, the odd ones or the even ones, and before some later ones."""
    while True:
        runner = runner_of(20, 2, works_ahead)
        drafting = right_drafts() if drafts else None
        generation = Generation(runner, tokenizer, request(range(20), range(num_samples)), drafting)
        seen: list[Event] = []

        def work(generation: Generation = generation, seen: list[Event] = seen) -> None:
            for event in generation.events():
                seen.append(event)

        is_struck = strike_at(moment, work)
        seen += generation.interrupt()
        assert runner._rows == {}
        assert runner.free_pages == runner.limits.num_pages
        ends = {event.sample: event for event in seen if isinstance(event, Finished)}
        for sample in range(num_samples):
            tokens = [event for event in seen if isinstance(event, Token) and event.sample == sample]
            if sample not in ends:
                assert not tokens
                continue
            end = ends[sample]
            assert list(end.token_ids) == [token.token_id for token in tokens] == TEXT[: len(tokens)]
            assert "".join(token.text for token in tokens) + end.tail == end.text
        assert len(ends) == sum(isinstance(event, Finished) for event in seen)
        if not is_struck:
            assert len(ends) == num_samples
            return
        moment += 2 if moment < 150 else 31


@pytest.mark.parametrize("works_ahead", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_conversation_goes_on_in_its_row(tokenizer: Tokenizer, works_ahead: bool, drafts: bool) -> None:
    moment = 1
    while True:
        runner, kept = runner_of(20, 1, works_ahead), KeptRow()
        drafting = right_drafts() if drafts else None
        generation = Generation(runner, tokenizer, request(range(20), (0,), kept), drafting)
        is_struck = strike_at(moment, lambda generation=generation: [None for _ in generation.events()] and None)
        generation.interrupt()
        assert set(runner._rows) == ({kept.row} if kept.row is not None else set())
        again = Generation(runner, tokenizer, request(range(20), (0,), kept), drafting)
        (end,) = [event for event in again.events() if isinstance(event, Finished)]
        assert list(end.token_ids) == TEXT
        if not is_struck:
            return
        moment += 11


def test_prompts_that_run_in_one_step(tokenizer: Tokenizer) -> None:
    """Three of them with a running text; one has tokens already, another does not end with the step."""
    moment = 1
    while True:
        device = PageDevice(lambda history, sampler: 65, num_rows=4, chunk=16, works_ahead=True, joins_prompts=True)
        scheduler = Scheduler(SteppingRunner(device), tokenizer)
        scheduler.submit(request([1], (0,)))
        while not scheduler.usage.steps:
            scheduler.step()
        requests = [request([number + 2] * length, (0,)) for number, length in enumerate((10, 5, 40))]
        for one in (replace(requests[0], said=(65, 65)), *requests[1:]):
            scheduler.submit(one)

        def work(scheduler: Scheduler = scheduler) -> None:
            for _ in range(4):
                scheduler.step()

        device.works.clear()
        is_struck = strike_at(moment, work)
        scheduler.interrupt()
        assert scheduler.is_idle
        assert scheduler.runner._rows == {}  # type: ignore[attr-defined]
        assert scheduler.runner.free_pages == scheduler.runner.limits.num_pages
        if not is_struck:
            assert any(len([work for work in works if work.token_ids]) > 1 for works in device.works)
            return
        moment += 1 if moment < 600 else 31


def test_a_fill_runs_the_prompt_and_then_what_was_said() -> None:
    runner = runner_of(40, 1, False)
    prompt, said = list(range(40)), list(range(100, 120))
    row = runner.open(prompt, request(prompt, (0,)).sampler)
    fill = Fill("owner", row, prompt, said, 0, 59, chooses=True)
    spans = []
    while not fill.is_done:
        spans.append(fill.next_span(runner, 1000))
        runner.queue(spans[-1:])
        is_said = fill.take(spans[-1])
        assert is_said == (len(spans) > 3)
    assert [len(span.token_ids) for span in spans] == [16, 16, 8, 8, 8, 4]
    assert [token_id for span in spans for token_id in span.token_ids] == [*prompt, *said]
    assert [span.choose for span in spans] == ["none"] * 5 + ["last"]
    assert [span.logits_from for span in spans] == [16, 16, 8, 8, 8, 3]
    assert (fill.num_computed, fill.num_run) == (40, 60)


def test_a_fill_of_a_row_that_only_holds_a_prompt_chooses_nothing() -> None:
    runner = runner_of(20, 1, False)
    fill = Fill("owner", runner.open(range(20)), range(20), (), 0, 19, chooses=False)
    while not fill.is_done:
        span = fill.next_span(runner, 1000)
        assert span.choose == "none"
        runner.queue([span])
        fill.take(span)
    assert runner.num_tokens(fill.row) == 20
