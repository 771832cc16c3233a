"""The engine against a scripted runner: stopping, samples, streaming, interrupts. No model is involved."""

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import BOS_ID, EOS_ID, write_byte_tokenizer

from llmcli.engine import generation
from llmcli.engine.events import Finished, PrefillProgress, Token
from llmcli.engine.generation import Generation, Request
from llmcli.runners.base import Logits
from llmcli.sampling.inspect import Inspection
from llmcli.sampling.params import SamplingParams
from llmcli.sampling.sampler import Sampler
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.load import load_tokenizer


class ScriptedRunner:
    """Plays one given text per sample index; checks that it is driven as the protocol allows."""

    config: Any = None
    description = "scripted"

    def __init__(self, scripts: Sequence[Sequence[int]], num_rows: int = 1, max_seq_len: int = 1000):
        self.scripts = scripts
        self.num_rows = num_rows
        self.max_seq_len = max_seq_len
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.num_prompt_tokens = 0
        self.prefills = 0
        self.interrupt_after = 10**9
        self.streams: list[list[Sampler]] = []

    def mirostat_mu(self, row: int) -> float | None:
        """A state that tells which row it is and how many tokens were drawn in it."""
        return row + 100.0 * (len(self.rows[row]) - self.num_prompt_tokens)

    def token_ids(self, row: int) -> Sequence[int]:
        return self.rows[row]

    def prefill(self, row: int, token_ids: Sequence[int]) -> Generator[int, None, None]:
        self.prefills += 1
        yield 0
        self.rows[row] = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        yield len(token_ids)

    def decode(self, rows: Sequence[int], samplers: Sequence[Sampler]) -> Generator[list[int], None, None]:
        self.streams.append(list(samplers))
        while all(len(self.rows[row]) < self.max_seq_len for row in rows):
            step = []
            for row, sampler in zip(rows, samplers, strict=True):
                drawn = len(self.rows[row]) - self.num_prompt_tokens
                if drawn == self.interrupt_after:
                    raise KeyboardInterrupt
                step.append(self.scripts[sampler.sample_index][drawn])
                self.rows[row].append(step[-1])
            yield step

    def logits(self, row: int) -> Logits:
        logits = np.zeros(EOS_ID + 1, np.float32)
        logits[3] = 10 + np.log(EOS_ID)
        return logits

    def truncate(self, row: int, num_tokens: int) -> None:
        del self.rows[row][num_tokens:]

    def copy_row(self, source: int, target: int) -> None:
        self.rows[target] = list(self.rows[source])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return load_tokenizer(folder)


def sampler(eos_token_ids: frozenset[int]) -> Sampler:
    return Sampler(SamplingParams(temperature=0.0), seed=1, eos_token_ids=eos_token_ids)


def request(**changes: Any) -> Request:
    values = {
        "prompt_token_ids": (BOS_ID, 65),
        "sampler": sampler(frozenset({EOS_ID, 5})),
        "samples": (0,),
        "max_new_tokens": 100,
    }
    return Request(**{**values, **changes})


def text_of(events: Iterator[Any], sample: int = 0) -> str:
    """What a streaming reader has seen in the end."""
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
    assert runner.prefills == 1


def test_one_sample_alone(tokenizer: Tokenizer) -> None:
    _, (result,) = run(ScriptedRunner([[EOS_ID], [*ids("second"), EOS_ID]]), tokenizer, samples=(1,))
    assert (result.sample, result.text) == (1, "second")


def test_prefill_progress_comes_first(tokenizer: Tokenizer) -> None:
    events, _ = run(ScriptedRunner([[EOS_ID]]), tokenizer)
    assert events[:2] == [PrefillProgress(0, 2), PrefillProgress(2, 2)]


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


def test_the_leading_space_belongs_to_the_encoder_only_where_a_text_begins(stories260k: Path) -> None:
    tokenizer = load_tokenizer(stories260k)
    word = tokenizer.token_id("▁was")
    assert word is not None
    script = [word, 2]
    for at_start, expected in ((True, "was"), (False, " was")):
        _, (result,) = run(ScriptedRunner([script]), tokenizer, at_start=at_start, sampler=sampler(frozenset({2})))
        assert result.text == expected


def test_inspections_are_the_model_s_view_of_each_choice(tokenizer: Tokenizer) -> None:
    """The scripted runner's logits say that token 3 is certain, whatever it plays."""
    script = [3, 3, EOS_ID]
    events, _ = run(ScriptedRunner([script]), tokenizer, num_alternatives=2)
    views = [event.inspection for event in events if isinstance(event, Token)]
    assert [view.chosen.token_id for view in views] == script
    assert [view.alternatives[0].token_id for view in views] == [3, 3, 3]
    assert views[0].chosen.logprob == pytest.approx(0, abs=1e-3)
    assert views[2].chosen.logprob == pytest.approx(-10 - np.log(EOS_ID), abs=1e-3)


def test_each_text_begins_mirostat_anew_and_keeps_its_state_when_another_ends(tokenizer: Tokenizer) -> None:
    runner = ScriptedRunner([[*ids("ab"), EOS_ID], [*ids("abcd"), EOS_ID], [*ids("a"), EOS_ID]], num_rows=2)
    warm = Sampler(SamplingParams(mirostat_tau=3), seed=1, eos_token_ids=frozenset({EOS_ID}))
    run(runner, tokenizer, samples=(0, 1, 2), sampler=warm)
    states = [[(each.sample_index, each.mirostat_mu) for each in stream] for stream in runner.streams]
    # Sample 0 ends after three tokens; sample 1, in row 1, goes on alone; sample 2 takes row 0 again.
    assert states == [[(0, None), (1, None)], [(1, 301.0)], [(2, None)]]


def test_an_inspection_sees_the_state_that_its_token_was_drawn_with(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float | None] = []
    original = generation.inspect_choice

    def inspect(logits: Logits, history: list[int], sampler: Sampler, *others: int) -> Inspection:
        seen.append(sampler.mirostat_mu)
        return original(logits, history, sampler, *others)

    monkeypatch.setattr(generation, "inspect_choice", inspect)
    warm = Sampler(SamplingParams(mirostat_tau=3), seed=1, eos_token_ids=frozenset({EOS_ID}))
    run(ScriptedRunner([[3, 3, EOS_ID]]), tokenizer, sampler=warm, num_alternatives=0)
    assert seen == [None, 100.0, 200.0]


@pytest.mark.parametrize(
    ("limit", "context", "position"), [(5, 100, 6), (None, 100, 99), (200, 100, 99), (98, 100, 99)]
)
def test_the_forced_end_is_the_last_token_that_limit_and_context_allow(
    tokenizer: Tokenizer, limit: int | None, context: int, position: int
) -> None:
    runner = ScriptedRunner([[EOS_ID]], max_seq_len=context)
    run(runner, tokenizer, max_new_tokens=limit)
    assert [each.forced_eos_position for stream in runner.streams for each in stream] == [position]
