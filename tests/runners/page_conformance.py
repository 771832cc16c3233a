"""How every runner shares and hands out pages; a part of `RunnerConformance`."""

import pytest
from row_steps import PROMPT, forget_prompts, logits_of, run_prompt, same, single_steps, start

from llmcli.runners.base import Runner, Span

MAX_SEQ_LEN = 400
NUM_ROWS = 3


class PageConformance:
    """Subclasses define the fixture `runner`, with room for NUM_ROWS rows of MAX_SEQ_LEN tokens."""

    @pytest.mark.parametrize(("length", "common"), [(40, 20), (100, 64), (140, 130), (299, 260), (64, 63), (30, 29)])
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
