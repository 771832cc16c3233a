"""Roads against the plain chain: a loop of `choose` over the logits of rows that share nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from page_device import PageDevice
from tiny_models import EOS_ID

from llmcli.checkpoint.model import open_model
from llmcli.engine.request import Finished, Request, Token
from llmcli.engine.roads import ENOUGH_TOKENS, MOST_TOKENS, Fork, Road, Roads, find_forks
from llmcli.engine.scheduler import Generation
from llmcli.errors import CheckpointError
from llmcli.runners.base import Runner, Span
from llmcli.runners.stepping import SteppingRunner
from llmcli.runners.torch.load import load
from llmcli.sampling.chain import choose, next_mu, run_steps
from llmcli.sampling.inspect import Inspection, StepEffect, TokenLogprob, TokenProbability
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.base import Tokenizer

PROMPT = tuple(range(60, 81))
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4, "top_k": 40}
Texts = Mapping[int, Sequence[Inspection]]


def make_request(params: SamplingParams, samples: tuple[int, ...] = (0,), **changes: Any) -> Request:
    sampler = Sampler(params, 5, num_prompt_tokens=len(PROMPT))
    values = {"max_new_tokens": 60, "num_alternatives": 5, "keeps_pages": True, **changes}
    return Request(PROMPT, sampler, samples, **values)


def texts_of(runner: Runner, tokenizer: Tokenizer, request: Request) -> dict[int, list[Inspection]]:
    texts: dict[int, list[Inspection]] = {sample: [] for sample in request.samples}
    for event in Generation(runner, tokenizer, request).events():
        if isinstance(event, Token):
            assert event.inspection is not None
            texts[event.sample].append(event.inspection)
    return texts


def follow(runner: Runner, tokenizer: Tokenizer, request: Request, texts: Texts, forks: Sequence[Fork]) -> list[Road]:
    roads = Roads(runner, tokenizer, request, texts, forks)
    for _ in roads.steps():
        assert roads.num_tokens <= len(forks) * MOST_TOKENS
    return roads.found()


def said_by_hand(runner: Runner, sampler: Sampler, beginning: Sequence[int], fork: int | None, count: int) -> list[int]:
    """The text after `beginning` if its next token is `fork`; mirostat's state comes from every choice."""
    row = runner.open(PROMPT)
    runner.keep(row, 0)
    end = 0
    while end < len(PROMPT):
        begin, end = end, runner.span_end(row, 1000)
        step = runner.queue([Span(row, PROMPT[begin:end], "none")])
    logits = step.logits(0)[-1]
    said: list[int] = []
    while len(said) < count:
        history = [*PROMPT, *said]
        choice = choose(logits, history, sampler)
        wanted = beginning[len(said)] if len(said) < len(beginning) else fork if len(said) == len(beginning) else None
        if wanted is not None and wanted != choice.token_id:
            # The state after a token that was not drawn follows from the chain.
            *_, (_, candidates) = run_steps(logits, history, sampler)
            choice = choice._replace(token_id=wanted, mirostat_mu=next_mu(candidates, sampler, wanted))
        sampler = replace(sampler, mirostat_mu=choice.mirostat_mu)
        said.append(choice.token_id)
        logits = runner.queue([Span(row, (said[-1],), "none")]).logits(0)[0]
    runner.close(row)
    return said


@pytest.mark.parametrize(
    ("params", "num_rows"),
    [
        (SamplingParams(temperature=0.0), 4),
        (SamplingParams(temperature=1.0, top_p=0.9), 1),
        (SamplingParams(temperature=1.2, **PENALTIES), 4),
        (SamplingParams(temperature=1.0, mirostat_tau=4.0, mirostat_eta=0.3), 4),
        (SamplingParams(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.1), 4),
    ],
)
def test_a_road_is_what_the_text_would_have_said(
    tiny_llama: Path, tokenizer: Tokenizer, params: SamplingParams, num_rows: int
) -> None:
    request = make_request(params, (0, 2))
    runner = load(open_model(tiny_llama), max_seq_len=128, num_rows=num_rows)
    texts = texts_of(runner, tokenizer, request)
    forks = find_forks(texts, 3)
    assert len(forks) == 3
    for road in follow(runner, tokenizer, request, texts, forks):
        fork = road.fork
        said = [choice.chosen.token_id for choice in texts[fork.sample][: fork.place]]
        sampler = replace(request.sampler, sample_index=fork.sample)
        found = [token.token_id for token in road.tokens]
        expected = said_by_hand(runner, sampler, said, fork.token_id, len(said) + len(found))
        assert found == expected[fork.place :]
        assert road.end in ("sentence", "tokens")
        assert found[0] == fork.token_id != texts[fork.sample][fork.place].chosen.token_id


@pytest.mark.parametrize("params", [SamplingParams(temperature=1.0, mirostat_tau=4.0), SamplingParams(**PENALTIES)])
def test_the_road_of_the_token_that_was_drawn_is_the_text(
    tiny_llama: Path, tokenizer: Tokenizer, params: SamplingParams
) -> None:
    request = make_request(params, (0, 1))
    runner = load(open_model(tiny_llama), max_seq_len=128)
    texts = texts_of(runner, tokenizer, request)
    forks = [
        Fork(sample, place, inspection.chosen.token_id, inspection.steps[-1].chosen_probability)
        for sample, choices in texts.items()
        for place, inspection in enumerate(choices)
        if place in (0, 17, 40)
    ]
    for road in follow(runner, tokenizer, request, texts, forks):
        text = [inspection.chosen.token_id for inspection in texts[road.fork.sample]][road.fork.place :]
        assert len(road.tokens) > ENOUGH_TOKENS
        assert [token.token_id for token in road.tokens][: len(text)] == text[: len(road.tokens)]
        logprobs = [inspection.chosen.logprob for inspection in texts[road.fork.sample]][road.fork.place :]
        assert [token.probability for token in road.tokens[1 : len(text)]] == pytest.approx(
            [math.exp(logprob) for logprob in logprobs[1 : len(road.tokens)]], rel=1e-12
        )


def inspected(chosen: int, *left: tuple[int, float]) -> Inspection:
    probabilities = tuple(TokenProbability(*pair) for pair in left)
    chance = dict(left).get(chosen, 0.01)
    step = StepEffect("top_p", True, 0, len(left), (), probabilities[0], chance)
    return Inspection(TokenLogprob(chosen, math.log(0.5)), (), (step,), probabilities)


def test_forks_are_the_likeliest_tokens_that_were_not_drawn() -> None:
    texts = {
        1: [inspected(3, (3, 0.6), (4, 0.4)), inspected(5, (6, 0.5), (7, 0.3))],
        0: [inspected(8, (8, 1.0)), inspected(9, (9, 0.6), (2, 0.2), (1, 0.4))],
    }
    places = [(fork.sample, fork.place, fork.token_id, fork.probability) for fork in find_forks(texts, 4)]
    assert places == [(1, 1, 6, 0.5), (0, 1, 1, 0.4), (1, 0, 4, 0.4), (1, 1, 7, 0.3)]
    assert len(find_forks(texts, 100)) == 5


def test_what_the_sampler_removed_has_no_road(tiny_llama: Path, tokenizer: Tokenizer) -> None:
    runner = load(open_model(tiny_llama), max_seq_len=128)
    texts = texts_of(runner, tokenizer, make_request(SamplingParams(top_k=1)))
    assert find_forks(texts, 10) == []


class Scripted:
    """Plays `script` after the prompt, whatever the row holds there."""

    def __init__(self, script: str, eos_at: int = 10**9, **options: Any) -> None:
        self.script = [*script.encode(), EOS_ID]
        self.runner = SteppingRunner(PageDevice(self.next_token, max_seq_len=200, **options))
        self.num_chosen = 0
        self.interrupt_at = self.fail_at = 10**9

    def next_token(self, history: Sequence[int], sampler: Sampler) -> int:
        self.num_chosen += 1
        if self.num_chosen == self.interrupt_at:
            raise KeyboardInterrupt
        if self.num_chosen == self.fail_at:
            raise CheckpointError("the logits are NaN")
        return self.script[min(len(history) - len(PROMPT), len(self.script) - 1)]


def scripted_road(
    tokenizer: Tokenizer, script: str, fork: str, place: int = 0, said: bytes = b"", **changes: Any
) -> tuple[str, str]:
    request = make_request(SamplingParams(temperature=1.0), **changes)
    request = replace(request, sampler=replace(request.sampler, eos_token_ids=frozenset({EOS_ID})))
    texts = {0: [inspected(token_id, (token_id, 0.5)) for token_id in said]}
    (road,) = follow(Scripted(script).runner, tokenizer, request, texts, [Fork(0, place, fork.encode()[0], 0.25)])
    return "".join(token.text for token in road.tokens), road.end


@pytest.mark.parametrize(
    ("script", "expected", "end"),
    [
        ("xbcdefghijklmnop. And so on", "abcdefghijklmnop.", "sentence"),
        ("x. That was short. And so on", "a. That was short.", "sentence"),
        ('x said "that was it." And so on', 'a said "that was it."', "sentence"),
        ("x costs 3.50 pounds, 4.5 dollars! Ha", "a costs 3.50 pounds, 4.5 dollars!", "sentence"),
        ("x new line begins\nhere", "a new line begins\n", "sentence"),
        ("x夕方になった。それから", "a夕方になった。", "sentence"),
        ("x" * 50, "a" + "x" * 39, "tokens"),
        ("xbc", "abc", "eos"),
        ("xbcd STOP", "abcd ", "stop"),
    ],
)
def test_where_a_road_ends(tokenizer: Tokenizer, script: str, expected: str, end: str) -> None:
    assert scripted_road(tokenizer, script, "a", stop_strings=("STOP",), max_new_tokens=None) == (expected, end)


def test_a_stop_string_that_the_fork_completes_ends_the_road_at_once(tokenizer: Tokenizer) -> None:
    assert scripted_road(tokenizer, "ST", "P", 3, b"STO", stop_strings=("STOP",)) == ("", "stop")


def test_half_a_character_before_the_fork_belongs_to_the_road(tokenizer: Tokenizer) -> None:
    """The first byte of é is the text's; a fork to its second byte writes the whole character."""
    request = make_request(SamplingParams(temperature=1.0), max_new_tokens=5)
    texts = {0: [inspected(0xC3, (0xC3, 0.5)), inspected(0xA8, (0xA8, 0.5), (0xA9, 0.4))]}
    (road,) = follow(Scripted("__abc").runner, tokenizer, request, texts, find_forks(texts, 1))
    assert ("".join(token.text for token in road.tokens), road.end) == ("éabc", "tokens")


@pytest.mark.parametrize("works_ahead", [False, True])
def test_ctrl_c_leaves_the_roads_so_far(tokenizer: Tokenizer, works_ahead: bool) -> None:
    request = make_request(SamplingParams(temperature=1.0), max_new_tokens=None)
    forks = [Fork(0, 0, 65 + index, 0.5) for index in range(3)]
    scripted = Scripted("x" * 100, works_ahead=works_ahead)
    scripted.interrupt_at = MOST_TOKENS + 10
    roads = Roads(scripted.runner, tokenizer, request, {0: []}, forks)
    with pytest.raises(KeyboardInterrupt):
        list(roads.steps())
    first, second = roads.found()
    assert (first.end, len(first.tokens)) == ("tokens", MOST_TOKENS)
    assert (second.end, second.fork) == ("interrupted", forks[1])
    assert 5 < len(second.tokens) < MOST_TOKENS


def test_a_road_whose_token_cannot_be_chosen_ends_there_and_the_others_go_on(tokenizer: Tokenizer) -> None:
    request = make_request(SamplingParams(temperature=1.0), max_new_tokens=None)
    scripted = Scripted("x" * 100)
    scripted.fail_at = 5
    roads = follow(scripted.runner, tokenizer, request, {0: []}, [Fork(0, 0, 65, 0.5), Fork(0, 0, 66, 0.5)])
    assert [(road.end, len(road.tokens)) for road in roads] == [("failed", 5), ("tokens", MOST_TOKENS)]


def test_roads_of_a_text_that_filled_its_cache(tokenizer: Tokenizer) -> None:
    """Its pages are released for the roads; its lost tokens run again."""
    device = PageDevice(lambda history, sampler: (len(history) * 7 + sampler.seed) % 256, max_seq_len=100, num_pages=7)
    runner = SteppingRunner(device)
    request = make_request(SamplingParams(temperature=1.0), max_new_tokens=None, num_alternatives=None)
    (end,) = (event for event in Generation(runner, tokenizer, request).events() if isinstance(event, Finished))
    assert end.finish_reason == "context"
    texts = {0: [inspected(token_id, (token_id, 0.5), (8, 0.4)) for token_id in end.token_ids]}
    forks = [Fork(0, place, 8, 0.4) for place in (5, 77, 40, 78, 20)]
    roads = follow(runner, tokenizer, request, texts, forks)
    for road in roads:
        place = road.fork.place
        assert [token.token_id for token in road.tokens[1:]] == list(
            end.token_ids[place + 1 : place + len(road.tokens)]
        )
    assert [len(road.tokens) for road in roads] == [40, 2, 39, 1, 40]
    assert runner.free_pages == 7
