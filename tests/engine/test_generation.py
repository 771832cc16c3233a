"""The engine against a scripted runner: stopping, samples, streaming, interrupts. No model is involved."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_device import PageDevice
from tiny_models import BOS_ID, EOS_ID

from llmcli.engine import texts as sample_module
from llmcli.engine.request import Finished, PrefillProgress, Request, Token
from llmcli.engine.scheduler import Generation
from llmcli.runners.base import Logits
from llmcli.runners.stepping import SteppingRunner
from llmcli.sampling.inspect import Inspection
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.load import load_tokenizer

PROMPT = (BOS_ID, 65)
WARM = Sampler(SamplingParams(mirostat_tau=3), seed=1, eos_token_ids=frozenset({EOS_ID}))


class ScriptedRunner(SteppingRunner):
    """Plays one given text per sample index after a prompt of two tokens, and may be interrupted within it."""

    def __init__(self, scripts: Sequence[Sequence[int]], num_rows: int = 1, max_seq_len: int = 1000, **options: Any):
        self.scripts = scripts
        self.interrupt_after = 10**9
        self.samplers: list[Sampler] = []  # of each choice
        self.device = PageDevice(self._next_token, num_rows=num_rows, max_seq_len=max_seq_len, **options)
        super().__init__(self.device)

    def _next_token(self, history: Sequence[int], sampler: Sampler) -> int:
        num_drawn = len(history) - len(PROMPT)
        if num_drawn == self.interrupt_after:
            raise KeyboardInterrupt
        self.samplers.append(sampler)
        script = self.scripts[sampler.sample_index]
        return script[num_drawn] if num_drawn < len(script) else EOS_ID  # a device that works ahead continues


def sampler(eos_token_ids: frozenset[int]) -> Sampler:
    return Sampler(SamplingParams(temperature=0.0), seed=1, eos_token_ids=eos_token_ids)


def request(**changes: Any) -> Request:
    values = {
        "prompt_token_ids": PROMPT,
        "sampler": sampler(frozenset({EOS_ID, 5})),
        "samples": (0,),
        "max_new_tokens": 100,
    }
    return Request(**{**values, **changes})


def text_of(events: Iterator[Any], sample: int = 0) -> str:
    """The text that a streaming reader has at the end."""
    text = ""
    for event in events:
        if isinstance(event, Token) and event.sample == sample:
            text += event.text
        elif isinstance(event, Finished) and event.sample == sample:
            text += event.tail
    return text


def run(runner: ScriptedRunner, tokenizer: Tokenizer, **changes: Any) -> tuple[list[Any], list[Finished]]:
    events = list(Generation(runner, tokenizer, request(**changes)).events())
    finished = [event for event in events if isinstance(event, Finished)]
    for item in finished:
        assert text_of(iter(events), item.sample) == item.text
    return events, finished


def ids(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("eos", [EOS_ID, 5])
def test_every_end_token_ends_and_none_is_shown(tokenizer: Tokenizer, eos: int) -> None:
    _, (result,) = run(ScriptedRunner([[*ids("hi"), eos]]), tokenizer)
    assert (result.text, result.finish_reason) == ("hi", "eos")
    assert result.token_ids == (*ids("hi"), eos)


def test_the_number_of_tokens_is_a_limit(tokenizer: Tokenizer) -> None:
    _, (result,) = run(ScriptedRunner([ids("abcdef")]), tokenizer, max_new_tokens=3)
    assert (result.text, result.finish_reason, len(result.token_ids)) == ("abc", "length", 3)
    assert result.timings.decode_tokens == 2


def test_a_full_context_is_told_from_the_limit(tokenizer: Tokenizer) -> None:
    _, (result,) = run(ScriptedRunner([ids("abcdef")], max_seq_len=5), tokenizer)
    assert (result.text, result.finish_reason) == ("abc", "context")


def test_stop_strings_cut_across_tokens_are_dropped(tokenizer: Tokenizer) -> None:
    script = ids("One.\n\nTHE END and more")
    events, (result,) = run(ScriptedRunner([script]), tokenizer, stop_strings=("THE END", "never"))
    assert (result.text, result.finish_reason) == ("One.\n\n", "stop")
    assert not any("T" in event.text for event in events if isinstance(event, Token))


def test_held_back_text_comes_at_the_end(tokenizer: Tokenizer) -> None:
    _, (result,) = run(ScriptedRunner([[*ids("see THE"), EOS_ID]]), tokenizer, stop_strings=("THE END",))
    assert (result.text, result.tail, result.finish_reason) == ("see THE", "THE", "eos")


def test_characters_are_never_cut(tokenizer: Tokenizer) -> None:
    events, (result,) = run(ScriptedRunner([[*ids("a👩‍👩‍👧é"), EOS_ID]]), tokenizer)
    assert result.text == "a👩‍👩‍👧é"
    assert not any("\ufffd" in event.text for event in events if isinstance(event, Token))


def test_an_unfinished_character_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    _, (result,) = run(ScriptedRunner([[*ids("a👩")[:-1], EOS_ID]]), tokenizer)
    assert (result.text, result.tail) == ("a\ufffd", "\ufffd")


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
def test_samples_are_the_same_however_many_rows_there_are(tokenizer: Tokenizer, num_rows: int) -> None:
    texts = ["one", "sample two", "3", "the fourth", ""]
    runner = ScriptedRunner([[*ids(text), EOS_ID] for text in texts], num_rows)
    _, finished = run(runner, tokenizer, samples=(0, 1, 2, 3, 4))
    assert {item.sample: item.text for item in finished} == dict(enumerate(texts))
    prompts = [work for works in runner.device.works for work in works if work.position == 0]
    assert len(prompts) == 1


def test_one_sample_alone(tokenizer: Tokenizer) -> None:
    _, (result,) = run(ScriptedRunner([[EOS_ID], [*ids("second"), EOS_ID]]), tokenizer, samples=(1,))
    assert (result.sample, result.text) == (1, "second")


def test_prefill_progress_comes_first(tokenizer: Tokenizer) -> None:
    events, _ = run(ScriptedRunner([[EOS_ID]]), tokenizer)
    assert events[:2] == [PrefillProgress(0, 2, request=1), PrefillProgress(2, 2, request=1)]


def test_an_interrupt_in_the_runner_keeps_what_was_said(tokenizer: Tokenizer) -> None:
    runner = ScriptedRunner([ids("abc THE END")])
    runner.interrupt_after = 6
    running = Generation(runner, tokenizer, request(stop_strings=("THE END",)))
    seen = ""
    try:
        for event in running.events():
            seen += event.text if isinstance(event, Token) else ""
    except KeyboardInterrupt:
        seen += "|"
    (result,) = running.interrupt()
    assert (seen, result.tail) == ("abc |", "TH")
    assert (result.text, result.finish_reason) == ("abc TH", "interrupted")
    assert running.interrupt() == []


def test_an_interrupt_before_the_first_token(tokenizer: Tokenizer) -> None:
    running = Generation(ScriptedRunner([[EOS_ID]]), tokenizer, request())
    next(running.events())
    assert running.interrupt() == []


@pytest.mark.parametrize("works_ahead", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_an_interrupt_anywhere_loses_nothing(tokenizer: Tokenizer, num_rows: int, works_ahead: bool) -> None:
    """In the caller, after any number of events: each text that began ends once, and its parts make up the whole."""
    scripts = [[*ids(text), EOS_ID] for text in ("one", "two THE", "", "f", "the fifth")]
    for num_events in range(60):
        runner = ScriptedRunner(scripts, num_rows, works_ahead=works_ahead)
        changes = {"samples": range(5), "stop_strings": ("THE END",), "num_alternatives": num_events % 2 or None}
        running = Generation(runner, tokenizer, request(**changes))
        seen = list(islice(running.events(), num_events))
        seen += running.interrupt()
        ended = {event.sample: event for event in seen if isinstance(event, Finished)}
        assert len(ended) == sum(isinstance(event, Finished) for event in seen)
        assert {event.sample for event in seen if isinstance(event, Token)} <= ended.keys()
        for sample_index, event in ended.items():
            assert text_of(iter(seen), sample_index) == event.text
            token_ids = [seen.token_id for seen in seen if isinstance(seen, Token) and seen.sample == sample_index]
            assert (tuple(token_ids), token_ids) == (event.token_ids, scripts[sample_index][: len(token_ids)])
            assert event.finish_reason == ("eos" if EOS_ID in token_ids else "interrupted")
        assert runner.free_pages == runner.limits.num_pages
        assert running.interrupt() == []


def test_a_prompt_tells_how_far_it_is(tokenizer: Tokenizer) -> None:
    """Before any work, and after each part of it, not at the end."""
    runner = SteppingRunner(PageDevice(lambda history, sampler: EOS_ID, chunk=16))
    works = runner._device.works  # type: ignore[attr-defined]
    told = []
    for event in Generation(runner, tokenizer, request(prompt_token_ids=(65,) * 40)).events():
        if isinstance(event, PrefillProgress):
            told.append((event.num_computed, event.num_tokens, sum(work.num_tokens for step in works for work in step)))
    assert told == [(0, 40, 0), (16, 40, 16), (32, 40, 32), (40, 40, 40)]


def test_the_first_token_is_told_before_the_second_is_computed(tokenizer: Tokenizer) -> None:
    runner = ScriptedRunner([ids("abc")])
    events = Generation(runner, tokenizer, request()).events()
    assert any(isinstance(event, Token) for event in islice(events, 3))
    assert len(runner.samplers) == 1


def test_the_leading_space_belongs_to_the_encoder_only_where_a_text_begins(stories260k: Path) -> None:
    tokenizer = load_tokenizer(stories260k)
    word = tokenizer.token_id("▁was")
    assert word is not None
    script = [word, 2]
    for at_start, expected in ((True, "was"), (False, " was")):
        _, (result,) = run(ScriptedRunner([script]), tokenizer, at_start=at_start, sampler=sampler(frozenset({2})))
        assert result.text == expected


def test_inspections_are_the_model_s_view_of_each_choice(tokenizer: Tokenizer) -> None:
    """By the scripted runner's logits token 3 is certain, for any script."""
    script = [3, 3, EOS_ID]
    events, _ = run(ScriptedRunner([script]), tokenizer, num_alternatives=2)
    views = [event.inspection for event in events if isinstance(event, Token)]
    assert [view.chosen.token_id for view in views] == script
    assert [view.alternatives[0].token_id for view in views] == [3, 3, 3]
    assert views[0].chosen.logprob == pytest.approx(0, abs=1e-3)
    assert views[2].chosen.logprob == pytest.approx(-10 - np.log(EOS_ID), abs=1e-3)


def test_each_text_begins_mirostat_anew(tokenizer: Tokenizer) -> None:
    runner = ScriptedRunner([[*ids("ab"), EOS_ID], [*ids("abcd"), EOS_ID], [*ids("a"), EOS_ID]], num_rows=2)
    run(runner, tokenizer, samples=(0, 1, 2), sampler=replace(WARM, mirostat_mu=7.0))
    assert {each.mirostat_mu for each in runner.samplers} == {7.0}


def test_an_inspection_sees_the_state_that_its_token_was_drawn_with(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float | None] = []
    original = sample_module.inspect_choice

    def inspect(logits: Logits, history: list[int], sampler: Sampler, *others: int) -> Inspection:
        seen.append(sampler.mirostat_mu)
        return original(logits, history, sampler, *others)

    monkeypatch.setattr(sample_module, "inspect_choice", inspect)
    run(ScriptedRunner([[3, 3, EOS_ID]]), tokenizer, sampler=WARM, num_alternatives=0)
    assert seen == [None, 2.0, 3.0]  # the device's state is the number of tokens before the choice


@pytest.mark.parametrize(
    ("limit", "context", "position"), [(5, 100, 6), (None, 100, 99), (200, 100, 99), (98, 100, 99)]
)
def test_the_forced_end_is_the_last_token_that_limit_and_context_allow(
    tokenizer: Tokenizer, limit: int | None, context: int, position: int
) -> None:
    runner = ScriptedRunner([[EOS_ID]], max_seq_len=context)
    run(runner, tokenizer, max_new_tokens=limit)
    assert [each.forced_eos_position for each in runner.samplers] == [position]
