"""How every runner shares and hands out pages; a part of `RunnerConformance`."""

from dataclasses import replace

import pytest
from row_steps import (
    GREEDY,
    PROMPT,
    forget_prompts,
    go_on,
    logits_of,
    one,
    run_prompt,
    same,
    single_steps,
    start,
)

from llmcli.runners.base import Runner, Span
from llmcli.sampling.params import SamplingParams

MAX_SEQ_LEN = 400
NUM_ROWS = 3


class PageConformance:
    """Subclasses define the fixture `runner`, with room for NUM_ROWS rows of MAX_SEQ_LEN tokens."""

    @pytest.mark.parametrize(("length", "common"), [(40, 20), (100, 64), (299, 260), (64, 63)])
    def test_prompts_that_begin_alike_share_bits_and_pages(self, runner: Runner, length: int, common: int) -> None:
        prompt = [*PROMPT[:common], *reversed(PROMPT[common:length])]
        fresh = runner.open(prompt)
        runner.keep(fresh, 0)
        expected = run_prompt(runner, fresh, prompt, choose="none")
        runner.close(fresh)
        forget_prompts(runner)
        longer = start(runner, PROMPT, None)
        row = runner.open(prompt)
        assert runner.num_tokens(row) < length
        assert same(run_prompt(runner, row, prompt, choose="none"), expected)
        runner.close(longer)

    def test_a_shared_beginning_is_stored_once(self, runner: Runner) -> None:
        start(runner, PROMPT, None)
        free = runner.free_pages
        rows = [start(runner, [*PROMPT[:270], number, *PROMPT[271:]], None) for number in range(3)]
        assert len(rows) * 3 <= free - runner.free_pages <= len(rows) * 5

    def test_the_beginning_of_a_prompt_is_there_for_the_next(self, runner: Runner) -> None:
        first = start(runner, PROMPT[:280], None)
        runner.close(first)
        row = runner.open([*PROMPT[:200], 3, 1, *PROMPT[202:280]])
        assert runner.num_tokens(row) >= 128

    @pytest.mark.parametrize(
        ("num_prompt", "num_said"), [(5, 49), (16, 3), (16, 49), (21, 40), (64, 40), (100, 3), (100, 49)]
    )
    def test_an_offered_answer_is_found_with_its_bits(self, runner: Runner, num_prompt: int, num_said: int) -> None:
        prompt, answer = PROMPT[:num_prompt], PROMPT[150:200]
        other = [*answer[:num_said], *PROMPT[200:220]]
        fresh = start(runner, prompt, None)
        expected = single_steps(runner, fresh, other)[-3:]
        runner.close(fresh)
        forget_prompts(runner)
        row = start(runner, prompt, None)
        single_steps(runner, row, answer)
        runner.offer(row)
        runner.close(row)
        row = runner.open(prompt, None, other)
        num_found = (num_prompt + num_said) // 16 * 16
        assert runner.num_tokens(row) == num_found or runner.num_tokens(row) <= num_found < num_prompt
        assert list(runner.token_ids(row)) == [*prompt, *other][: runner.num_tokens(row)]
        if runner.num_tokens(row) < num_prompt:
            run_prompt(runner, row, prompt, choose="none")
        rest = other[runner.num_tokens(row) - num_prompt :]
        assert same(single_steps(runner, row, rest)[-3:], expected)

    def test_a_row_that_found_an_answer_chooses_as_one_that_ran_it(self, runner: Runner) -> None:
        """The history is the sampler's too: a penalty looks at tokens that this row has not run."""
        sampler = replace(GREEDY, params=SamplingParams(temperature=0.0, repetition_penalty=1.9))
        prompt, said = PROMPT[:21], PROMPT[150:182]
        found = []
        for is_offered in (False, True):
            row = start(runner, prompt, sampler)
            runner.keep(row, len(prompt))
            single_steps(runner, row, said)
            if is_offered:
                runner.offer(row)
                runner.close(row)
                row = runner.open(prompt, sampler, [*said, 1])
                assert runner.num_tokens(row) == 48
            chosen = one(runner, Span(row, (*said, 1)[runner.num_tokens(row) - len(prompt) :]))
            found.append([chosen.token_id, *go_on(runner, row, 10)])
            runner.close(row)
        assert found[0] == found[1]

    @pytest.mark.parametrize("kind", ["not offered", "another prompt", "a part of a prompt"])
    def test_only_offered_answers_of_whole_prompts_are_found(self, runner: Runner, kind: str) -> None:
        prompt, answer = PROMPT[:32], PROMPT[150:182]
        if kind == "another prompt":
            row = start(runner, PROMPT[:10], None)
            single_steps(runner, row, PROMPT[10:12])
            runner.change_prompt(row, prompt)
            run_prompt(runner, row, prompt, choose="none")
        elif kind == "a part of a prompt":
            row = runner.fork(start(runner, PROMPT[:60], None), 32)
        else:
            row = start(runner, prompt, None)
        single_steps(runner, row, answer)
        if kind != "not offered":
            runner.offer(row)
        runner.close(row)
        assert runner.num_tokens(runner.open(prompt, None, answer)) <= 32

    def test_room_that_is_not_there(self, runner: Runner) -> None:
        rows = [start(runner, (PROMPT * 2)[index : index + MAX_SEQ_LEN], None) for index in range(NUM_ROWS)]
        assert runner.free_pages == 0
        late = runner.open(PROMPT[50:90])
        assert not runner.reserve(late, 1)
        with pytest.raises(ValueError, match="no page"):
            runner.queue([Span(late, tuple(PROMPT[50:90][: runner.span_end(late, 16)]), "none")])
        runner.close(rows[1])
        assert runner.reserve(late, 40)
        assert same(run_prompt(runner, late, PROMPT[50:90], choose="none"), logits_of(runner, PROMPT[50:90]))

    def test_pages_in_any_order(self, runner: Runner) -> None:
        expected = start(runner, PROMPT[:200], None)
        expected_bits = single_steps(runner, expected, [1, 2, 3])
        runner.close(expected)
        # Rows that end in turns leave holes, in which another row then lies.
        rows = [start(runner, PROMPT[index : index + 10], None) for index in range(60)]
        for row in rows[::2]:
            runner.close(row)
        scattered = runner.open(PROMPT[:200])
        runner.keep(scattered, 0)
        run_prompt(runner, scattered, PROMPT[:200], most=16, choose="none")
        assert same(single_steps(runner, scattered, [1, 2, 3]), expected_bits)
