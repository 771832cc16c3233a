"""The contract of runners that verify drafts: choose what single steps choose, for any guesses."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from row_steps import GREEDY, PROMPT, WARM, go_on, one, same, single_steps, start
from tiny_models import CONFIG

from llmcli.errors import LLMCliError
from llmcli.runners.base import Runner, Span
from llmcli.sampling.chain import Choice
from llmcli.sampling.params import Sampler, SamplingParams

VOCAB_SIZE = CONFIG["vocab_size"]
NUM_TOKENS = 18
SAMPLERS = {
    "greedy": GREEDY,
    "warm": Sampler(WARM, seed=5, sample_index=2),
    "penalties": Sampler(
        replace(WARM, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.3), seed=6, num_prompt_tokens=30
    ),
    "dry": Sampler(SamplingParams(temperature=0.0, dry_multiplier=5.0, dry_allowed_length=1), seed=7),
    "xtc": Sampler(replace(WARM, xtc_probability=0.5, xtc_threshold=0.001), seed=8),
    "mirostat": Sampler(replace(WARM, mirostat_tau=3, mirostat_eta=0.4), seed=9),
    "min_new_tokens": Sampler(
        replace(WARM, min_new_tokens=12), seed=10, num_prompt_tokens=30, eos_token_ids=frozenset(range(100))
    ),
    "bias": Sampler(WARM, seed=11, logit_bias={3: 4.0, 5: -np.inf}, sequence_bias=(((3, 3), -5.0),)),
}

Guess = Callable[[Sequence[Choice], int], Sequence[int]]  # what follows the text's first n tokens, from the real text


def mixed(text: Sequence[Choice], n: int) -> list[int]:
    """Any number of drafts, two in three of them right."""
    rng = np.random.default_rng(n)
    wrong = rng.integers(1, VOCAB_SIZE, 7) * (rng.random(7) < 1 / 3)
    right = [choice.token_id for choice in text[n : n + rng.integers(0, 8)]]
    return [(token_id + int(by)) % VOCAB_SIZE for token_id, by in zip(right, wrong, strict=False)]


GUESSES: dict[str, Guess] = {
    "right": lambda text, n: [choice.token_id for choice in text[n : n + 7]],
    "wrong": lambda text, n: [(choice.token_id + 1) % VOCAB_SIZE for choice in text[n : n + 7]],
    "mixed": mixed,
}
CASES = [("greedy", "right"), ("greedy", "wrong"), *((name, "mixed") for name in SAMPLERS)]


class DraftConformance:
    """Mixed into `RunnerConformance`; skipped where `Limits.max_drafts` is 0."""

    @pytest.fixture
    def verifier(self, runner: Runner) -> Runner:
        if not runner.limits.max_drafts:
            pytest.skip("this runner verifies no drafts")
        return runner

    @pytest.mark.parametrize(("name", "how"), CASES)
    def test_drafts_change_no_choice(self, verifier: Runner, name: str, how: str) -> None:
        sampler, guess = SAMPLERS[name], GUESSES[how]
        alone = start(verifier, PROMPT[:30], sampler)
        expected = [one(verifier, Span(alone)) for _ in range(NUM_TOKENS + 8)]
        row = start(verifier, PROMPT[:30], sampler)
        found: list[Choice] = []
        num_steps = 0
        while len(found) < NUM_TOKENS:
            drafts = tuple(guess(expected, len(found)))
            (chosen,) = verifier.queue([Span(row, drafts=drafts)]).choices()
            assert isinstance(chosen, tuple)
            kept = [one == choice.token_id for one, choice in zip(drafts, expected[len(found) :], strict=False)]
            assert len(chosen) == 1 + ([*kept, False].index(False))
            found += chosen
            num_steps += 1
            assert verifier.num_tokens(row) == 30 + len(found)
            assert len(verifier.token_ids(row)) == 30 + len(found)
        assert found == expected[: len(found)]
        verifier.keep(alone, verifier.num_tokens(row))
        assert list(verifier.token_ids(row)) == list(verifier.token_ids(alone))
        assert (num_steps == 3) == (how == "right")
        assert (num_steps == NUM_TOKENS) == (how == "wrong")
        # And what they leave in the cache.
        assert same(single_steps(verifier, row, [1, 2]), single_steps(verifier, alone, [1, 2]))

    def test_logits_behind_drafts(self, verifier: Runner) -> None:
        row, other = (start(verifier, PROMPT[:30], GREEDY) for _ in range(2))
        expected, tokens = [], []
        for _ in range(3):
            step = verifier.queue([Span(other)])
            expected.append(step.logits(0)[0])
            tokens.append(step.choices()[0][0].token_id)  # type: ignore[index]
        step = verifier.queue([Span(row, drafts=(*tokens[:2], 0, 1))])
        assert same(step.logits(0)[:3], np.stack(expected))
        assert same(step.logits(0, 2)[0], expected[2])

    def test_drafts_beside_other_rows(self, verifier: Runner) -> None:
        prompts = (PROMPT[:30], PROMPT[40:61], PROMPT[7:23])
        expected = []
        for prompt in prompts:
            row = start(verifier, prompt)
            expected.append(go_on(verifier, row, 12))
            verifier.close(row)
        rows = [start(verifier, prompt) for prompt in prompts]
        found: list[list[int]] = [[], [], []]
        while min(map(len, found)) < 12:
            lengths = (7, 0, 2)
            spans = [
                Span(row, drafts=tuple(expected[place][len(found[place]) :][: lengths[place]]))
                for place, row in enumerate(rows)
                if len(found[place]) < 12
            ]
            places = [place for place in range(3) if len(found[place]) < 12]
            for place, chosen in zip(places, verifier.queue(spans).choices(), strict=True):
                found[place] += [choice.token_id for choice in chosen]  # type: ignore[union-attr]
        assert [one[:12] for one in found] == expected

    def test_a_row_whose_choice_is_not_read_yet_beside_drafts(self, verifier: Runner) -> None:
        prompts = (PROMPT[:30], PROMPT[40:61])
        expected = []
        for prompt in prompts:
            row = start(verifier, prompt)
            expected.append(go_on(verifier, row, 4))
            verifier.close(row)
        row, other = (start(verifier, prompt) for prompt in prompts)
        ahead = verifier.queue([Span(other)])
        beside = verifier.queue([Span(row, drafts=tuple(expected[0][:3])), Span(other)])
        chosen = [*ahead.choices(), *beside.choices()]
        assert (
            [[choice.token_id for choice in one] for one in chosen]
            == [  # type: ignore[union-attr]
                expected[1][:1],
                expected[0],
                expected[1][1:2],
            ]
        )

    def test_a_choice_that_fails_behind_a_kept_draft(self, verifier: Runner) -> None:
        """Earlier choices are there; the next span fails, as the single step would."""
        row = start(verifier, PROMPT[:30])
        first, second = go_on(verifier, row, 2)
        bans = tuple(((second, token_id), -np.inf) for token_id in range(VOCAB_SIZE))
        row = start(verifier, PROMPT[:30], replace(GREEDY, sequence_bias=bans))
        (chosen,) = verifier.queue([Span(row, drafts=(first, second, 1))]).choices()
        assert isinstance(chosen, tuple)
        assert [choice.token_id for choice in chosen] == [first, second]
        assert isinstance(verifier.queue([Span(row)]).choices()[0], LLMCliError)

    def test_a_choice_that_would_fail_behind_a_wrong_draft(self, verifier: Runner) -> None:
        row = start(verifier, PROMPT[:30])
        first, second = go_on(verifier, row, 2)
        wrong = next(token_id for token_id in range(VOCAB_SIZE) if token_id not in (first, second))
        bans = tuple(((wrong, token_id), -np.inf) for token_id in range(VOCAB_SIZE))
        row = start(verifier, PROMPT[:30], replace(GREEDY, sequence_bias=bans))
        (chosen,) = verifier.queue([Span(row, drafts=(wrong, wrong))]).choices()
        assert isinstance(chosen, tuple)
        assert [choice.token_id for choice in chosen] == [first]

    def test_refuses_drafts_that_cannot_be(self, verifier: Runner) -> None:
        row = start(verifier, PROMPT[:30])
        most = verifier.limits.max_drafts
        for span, problem in (
            (Span(row, drafts=(1,) * (most + 1)), "the most"),
            (Span(row, drafts=(VOCAB_SIZE,)), "vocabulary"),
            (Span(row, (1,), drafts=(2,)), "chose last"),
            (Span(row, choose="none", drafts=(2,)), "chose last"),
        ):
            with pytest.raises(ValueError, match=problem):
                verifier.queue([span])
        step = verifier.queue([Span(row, drafts=(1, 2))])
        with pytest.raises(ValueError, match="not been read"):
            verifier.queue([Span(row)])
        step.choices()
        verifier.keep(row, 30)
        with pytest.raises(ValueError, match="been read"):
            verifier.queue([Span(row, drafts=(1,))])

    def test_a_row_may_close_before_its_drafts_are_read(self, verifier: Runner) -> None:
        row = start(verifier, PROMPT[:30])
        step = verifier.queue([Span(row, drafts=(1, 2))])
        verifier.close(row)
        assert len(step.choices()) == 1

    def test_a_fork_keeps_its_page_while_the_other_drafts(self, verifier: Runner) -> None:
        """Wrong drafts are written into pages, of which a fork has copies."""
        plain = start(verifier, PROMPT[:36])
        expected = single_steps(verifier, plain, PROMPT[40:44])
        verifier.close(plain)
        row = start(verifier, PROMPT[:36])
        other = verifier.fork(row, 36)
        chosen = one(verifier, Span(row)).token_id
        verifier.queue([Span(row, drafts=((chosen + 1) % VOCAB_SIZE,) * 7)]).choices()
        assert same(single_steps(verifier, other, PROMPT[40:44]), expected)
