"""The contract of every runner, on any device: subclass `RunnerConformance` and load a runner.

The suite needs torch and tiny random models only. Bits are compared where bits are promised: nearly everywhere.
"""

import time
from dataclasses import replace

import numpy as np
import pytest
from bits_conformance import BitsConformance
from draft_conformance import DraftConformance
from layer_conformance import LayerConformance
from loading_conformance import LoadingConformance
from mask_conformance import MaskConformance
from page_conformance import MAX_SEQ_LEN, NUM_ROWS, PageConformance
from row_steps import (
    GREEDY,
    PROMPT,
    WARM,
    go_on,
    logits_of,
    one,
    relative_error,
    run_prompt,
    same,
    single_steps,
    start,
)
from tiny_models import CONFIG

from llmcli.errors import LLMCliError
from llmcli.runners.base import MAX_SPAN, PAGE_TOKENS, Runner, Span
from llmcli.sampling.chain import choose
from llmcli.sampling.params import Sampler, SamplingParams


class RunnerConformance(
    BitsConformance, LoadingConformance, PageConformance, LayerConformance, DraftConformance, MaskConformance
):
    """Subclasses define `load` and, if their rounding is coarser, `tolerance`."""

    def test_describes_itself(self, runner: Runner) -> None:
        limits = runner.limits
        assert (limits.num_rows, limits.max_seq_len) == (NUM_ROWS, MAX_SEQ_LEN)
        assert limits.num_pages == NUM_ROWS * MAX_SEQ_LEN // PAGE_TOKENS
        assert runner.config.hidden_size == CONFIG["hidden_size"]
        assert runner.description
        assert "\n" not in runner.description

    def test_prompts_are_timed_and_decoding_is_not(self, runner: Runner) -> None:
        decoding, row = start(runner, PROMPT[:20]), runner.open(PROMPT[30:])
        runner.queue([Span(decoding)]).choices()
        begin = time.perf_counter()
        end = runner.span_end(row, 1)
        step = runner.queue([Span(decoding), Span(row, tuple(PROMPT[30 : 30 + end]), "none")])
        assert 0 < step.prompt_seconds() < time.perf_counter() - begin
        step = runner.queue([Span(decoding)])
        assert step.prompt_seconds() == 0
        step.choices()

    def test_a_prompt_gives_logits(self, runner: Runner) -> None:
        row = runner.open(PROMPT)
        logits = run_prompt(runner, row, PROMPT, choose="none")
        assert logits.shape == (CONFIG["vocab_size"],)
        assert logits.dtype == np.float32
        assert (runner.num_tokens(row), list(runner.token_ids(row))) == (len(PROMPT), PROMPT)

    @pytest.mark.parametrize("token_ids", [[], [CONFIG["vocab_size"]], [-1], [0] * (MAX_SEQ_LEN + 1)])
    def test_refuses_prompts_that_cannot_be(self, runner: Runner, token_ids: list[int]) -> None:
        with pytest.raises(ValueError, match="prompt|vocabulary"):
            runner.open(token_ids)
        row = runner.open(PROMPT[:5])
        with pytest.raises(ValueError, match="prompt|vocabulary"):
            runner.change_prompt(row, token_ids)

    def test_refuses_one_row_too_many(self, runner: Runner) -> None:
        rows = [runner.open(PROMPT[:5], GREEDY) for _ in range(NUM_ROWS)]
        with pytest.raises(ValueError, match="rows are open"):
            runner.open(PROMPT[:5], GREEDY)
        runner.open(PROMPT[:5])  # a row that does not choose takes no place
        runner.close(rows[1])
        runner.open(PROMPT[:5], GREEDY)

    def test_refuses_spans_that_cannot_be(self, runner: Runner) -> None:
        row = runner.open(PROMPT[:40], GREEDY)
        runner.keep(row, 0)
        other = runner.open(PROMPT[:5])
        run_prompt(runner, other, PROMPT[:5], choose="none")
        for spans, problem in (
            ([Span(row, tuple(PROMPT[1:41]))], "comes next"),
            ([Span(row, tuple(PROMPT[:41]))], "comes next"),
            ([Span(other, (1,), "none"), Span(other, (2,), "none")], "one span"),
            ([Span(other, (1,))], "sampler"),
            ([Span(other, tuple(range(MAX_SPAN + 1)), "none")], "at most|the most"),
            ([Span(other, (CONFIG["vocab_size"],), "none")], "vocabulary"),
        ):
            with pytest.raises(ValueError, match=problem):
                runner.queue(spans)
        assert runner.num_tokens(row) == 0

    # Choices

    def test_greedy_takes_the_highest_logit(self, runner: Runner) -> None:
        row = runner.open(PROMPT[:20], GREEDY)
        logits, span = run_prompt(runner, row, PROMPT[:20], choose="none"), Span(row, (PROMPT[20],))
        for _ in range(10):
            step = runner.queue([span])
            (chosen,) = step.choices()
            logits = step.logits(0)[0]
            assert chosen[0].token_id == int(logits.argmax())  # type: ignore[index]
            span = Span(row)

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01),
            SamplingParams(temperature=0.0, repetition_penalty=1.8),
            SamplingParams(temperature=1.0, top_p=1.0, mirostat_tau=3, mirostat_eta=0.4),
        ],
        ids=["filters", "penalty", "mirostat"],
    )
    def test_a_choice_is_the_host_sampler_s(self, runner: Runner, params: SamplingParams) -> None:
        sampler = Sampler(params, seed=7, sample_index=3, num_prompt_tokens=20)
        row = start(runner, PROMPT[:20], sampler)
        runner.keep(row, 20)
        runner.set_sampler(row, sampler)
        history, span = PROMPT[:21], Span(row, (PROMPT[20],))
        for _ in range(30):
            step = runner.queue([span])
            (chosen,) = step.choices()
            assert isinstance(chosen, tuple)
            expected = choose(step.logits(0)[0], history, sampler)
            assert chosen[0].token_id == expected.token_id
            if expected.mirostat_mu is None:
                assert chosen[0].mirostat_mu is None
            else:
                assert chosen[0].mirostat_mu == pytest.approx(expected.mirostat_mu, rel=1e-12)
            sampler = replace(sampler, mirostat_mu=expected.mirostat_mu)
            history, span = [*history, expected.token_id], Span(row)

    def test_a_row_whose_choice_fails_leaves_the_others_alone(self, runner: Runner) -> None:
        every = dict.fromkeys(range(CONFIG["vocab_size"]), -np.inf)
        expected = go_on(runner, start(runner, PROMPT[:30], GREEDY), 2)
        failing, well = start(runner, PROMPT[:20], GREEDY), start(runner, PROMPT[:30], GREEDY)
        runner.set_sampler(failing, replace(GREEDY, logit_bias=every))
        first, second = runner.queue([Span(failing), Span(well)]).choices()
        assert isinstance(first, LLMCliError)
        assert isinstance(second, tuple)
        assert [second[0].token_id, *go_on(runner, well, 1)] == expected

    def test_a_row_whose_choice_failed_goes_on(self, runner: Runner) -> None:
        every = dict.fromkeys(range(CONFIG["vocab_size"]), -np.inf)
        row, other = start(runner, PROMPT[:20], GREEDY), start(runner, PROMPT[:20], GREEDY)
        expected = [one(runner, Span(other, (token_id,))).token_id for token_id in PROMPT[20:24]]
        runner.set_sampler(row, replace(GREEDY, logit_bias=every))
        assert isinstance(runner.queue([Span(row, (PROMPT[20],))]).choices()[0], LLMCliError)
        runner.set_sampler(row, GREEDY)
        assert [one(runner, Span(row, (token_id,))).token_id for token_id in PROMPT[21:24]] == expected[1:]
        assert list(runner.token_ids(row)) == PROMPT[:24]
        assert go_on(runner, row, 5) == go_on(runner, other, 5)

    def test_chooses_from_given_logits(self, runner: Runner) -> None:
        row = start(runner, PROMPT[:20])
        logits = np.random.default_rng(1).standard_normal(CONFIG["vocab_size"]).astype(np.float32)
        sampler = Sampler(WARM, seed=4)
        other = runner.fork(row, 20, sampler)
        assert one(runner, Span(other, logits=logits)).token_id == choose(logits, PROMPT[:20], sampler).token_id
        assert runner.num_tokens(other) == 20
        assert runner.num_tokens(row) == 20

    def test_another_sampler_from_the_next_step_on(self, runner: Runner) -> None:
        row = start(runner, PROMPT[:20])
        before = one(runner, Span(row)).token_id
        sampler = Sampler(SamplingParams(temperature=0.0), seed=0, logit_bias={5: 1000.0})
        runner.set_sampler(row, sampler)
        assert one(runner, Span(row)).token_id == 5
        assert list(runner.token_ids(row))[-1] == before

    def test_a_full_row(self, runner: Runner) -> None:
        prompt = (PROMPT * 2)[: MAX_SEQ_LEN - 3]
        row = start(runner, prompt)
        go_on(runner, row, 3)
        assert runner.num_tokens(row) == MAX_SEQ_LEN
        with pytest.raises(ValueError, match=str(MAX_SEQ_LEN)):
            runner.queue([Span(row)])

    # Rows

    @pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 50, 100])
    def test_a_fork_goes_on_alike(self, runner: Runner, num_tokens: int) -> None:
        row = start(runner, PROMPT[:100], None)
        first, second = runner.fork(row, num_tokens), runner.fork(row, num_tokens)
        assert list(runner.token_ids(first)) == PROMPT[:num_tokens]
        found = single_steps(runner, first, [5, 6, 7])
        expected = logits_of(runner, [*PROMPT[:num_tokens], 5, 6, 7])
        assert relative_error(found[-1], expected) < self.tolerance
        # Tokens of the first do not affect the second, nor the row they come from.
        assert same(single_steps(runner, second, [5, 6, 7]), found)
        third = runner.fork(row, num_tokens)
        assert same(single_steps(runner, third, [5, 6, 7]), found)

    def test_forks_do_not_share_their_future(self, runner: Runner) -> None:
        samplers = [Sampler(WARM, seed=index) for index in range(3)]
        expected = []
        for sampler in samplers:
            row = start(runner, PROMPT[:50], sampler)
            expected.append(go_on(runner, row, 20))
            runner.close(row)
        holder = runner.open(PROMPT[:50])
        logits = run_prompt(runner, holder, PROMPT[:50], choose="none")
        rows = [runner.fork(holder, 50, sampler) for sampler in samplers]
        runner.queue([Span(row, logits=logits) for row in rows]).choices()
        runner.close(holder)
        steps = [runner.queue([Span(row) for row in rows]).choices() for _ in range(20)]
        assert [[step[place][0].token_id for step in steps] for place in range(3)] == expected  # type: ignore[index]

    def test_forks_share_pages(self, runner: Runner) -> None:
        row = start(runner, PROMPT[:96], None)
        free = runner.free_pages
        forks = [runner.fork(row, 96) for _ in range(10)]
        assert runner.free_pages == free
        single_steps(runner, forks[0], [1])
        assert runner.free_pages == free - 1

    @pytest.mark.parametrize("num_tokens", [40, 45, 47, 48, 59])
    def test_roll_back_into_the_answer_is_exact(self, runner: Runner, num_tokens: int) -> None:
        row, other = start(runner, PROMPT[:40], None), start(runner, PROMPT[:40], None)
        single_steps(runner, row, PROMPT[40:60])
        runner.keep(row, num_tokens)
        assert list(runner.token_ids(row)) == PROMPT[:num_tokens]
        single_steps(runner, other, [*PROMPT[40:num_tokens], 9])
        runner.keep(other, num_tokens)
        assert same(single_steps(runner, row, [7, 8]), single_steps(runner, other, [7, 8]))

    def test_roll_back_refuses_lengths_the_row_never_had(self, runner: Runner) -> None:
        row = start(runner, PROMPT[:10], None)
        for num_tokens in (-1, 11):
            with pytest.raises(ValueError, match="keep"):
                runner.keep(row, num_tokens)
            with pytest.raises(ValueError, match="fork"):
                runner.fork(row, num_tokens)

    def test_a_changed_prompt_keeps_the_common_beginning(self, runner: Runner) -> None:
        """A conversation: the last sampled token may not have been run yet, and must be."""
        sampler = Sampler(WARM, seed=2)
        row = start(runner, PROMPT[:40], sampler)
        answer = [one(runner, Span(row)).token_id for _ in range(5)]
        history = [*runner.token_ids(row), answer[-1], *PROMPT[40:60]]
        runner.change_prompt(row, history, sampler)
        assert runner.num_tokens(row) >= 45
        extended = run_prompt(runner, row, history)
        assert relative_error(extended, logits_of(runner, history)) < self.tolerance

    def test_a_changed_prompt_is_never_found_by_others(self, runner: Runner) -> None:
        row = start(runner, PROMPT[:30])
        go_on(runner, row, 30)
        history = [*runner.token_ids(row), 1, 2, 3, *PROMPT[:40]]
        runner.change_prompt(row, history, GREEDY)
        run_prompt(runner, row, history)
        fresh = runner.open(history)
        assert runner.num_tokens(fresh) <= 30
