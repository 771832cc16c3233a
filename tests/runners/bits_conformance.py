"""The bits that every runner promises, whatever its products; a part of `RunnerConformance`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from page_conformance import MAX_SEQ_LEN, NUM_ROWS
from row_steps import PROMPT, WARM, go_on, logits_of, one, relative_error, run_prompt, same, single_steps, start
from tiny_models import write_tiny_llama

from llmcli.runners.base import MAX_SPAN, Runner, Span
from llmcli.sampling.params import Sampler


class BitsConformance:
    """Subclasses define `load` and, if their rounding is coarser, `tolerance`."""

    tolerance = 1e-5  # between two ways to compute the same logits, relative to the largest

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_llama(tmp_path_factory.mktemp("conformance") / "model", with_tokenizer=False)

    @pytest.fixture(scope="class")
    @classmethod
    def shared_runner(cls, folder: Path) -> Runner:
        return cls.load(folder, max_seq_len=MAX_SEQ_LEN, num_rows=NUM_ROWS)

    @pytest.fixture
    def runner(self, shared_runner: Runner) -> Iterator[Runner]:
        """All rows closed, before and after: no page is lost."""
        yield shared_runner
        for row in list(shared_runner._rows):  # type: ignore[attr-defined]
            shared_runner.close(row)
        assert shared_runner.free_pages == shared_runner.limits.num_pages

    @pytest.mark.parametrize(
        ("begin", "length"), [(7, 2), (7, MAX_SPAN), (14, 3), (14, MAX_SPAN), (63, 2), (63, 5), (255, 3), (255, 5)]
    )
    def test_a_span_has_the_bits_of_single_steps(self, runner: Runner, begin: int, length: int) -> None:
        first, second = start(runner, PROMPT[:begin], None), start(runner, PROMPT[:begin], None)
        token_ids = PROMPT[begin : begin + length]
        together = runner.queue([Span(first, tuple(token_ids), "none")]).logits(0)
        assert same(together, single_steps(runner, second, token_ids))
        # And what they leave in the cache.
        assert same(single_steps(runner, first, [1, 2]), single_steps(runner, second, [1, 2]))

    def test_a_span_chooses_what_single_steps_choose(self, runner: Runner) -> None:
        sampler = Sampler(replace(WARM, repetition_penalty=1.3), seed=5, num_prompt_tokens=30)
        row = start(runner, PROMPT[:30], sampler)
        step = runner.queue([Span(row, tuple(PROMPT[30:36]), "every")])
        (together,) = step.choices()
        other = start(runner, PROMPT[:30], sampler)
        alone = [one(runner, Span(other, (token_id,))) for token_id in PROMPT[30:36]]
        assert isinstance(together, tuple)
        assert list(together) == alone

    @pytest.mark.parametrize("length", [5, 16, 17, 64, 130, 299])
    def test_a_prompt_s_bits_do_not_depend_on_its_cuts(self, runner: Runner, length: int) -> None:
        results = set()
        for most in (1, 20, 100, 10**9):
            row = runner.open(PROMPT[:length])
            runner.keep(row, 0)
            results.add(run_prompt(runner, row, PROMPT[:length], most, "none").tobytes())
            results.add(single_steps(runner, row, [1, 2, 3]).tobytes())
            runner.close(row)
        assert len(results) == 2

    def test_a_row_does_not_depend_on_the_others(self, runner: Runner) -> None:
        samplers = [Sampler(WARM, seed=3, sample_index=index) for index in range(3)]
        prompts = [PROMPT[:30], PROMPT[10:75], PROMPT[5:6]]
        alone = []
        for prompt, sampler in zip(prompts, samplers, strict=True):
            row = start(runner, prompt, sampler)
            alone.append(go_on(runner, row, 40))
            runner.close(row)
        rows = [start(runner, prompt, sampler) for prompt, sampler in zip(prompts, samplers, strict=True)]
        together: list[list[int]] = [[], [], []]
        for number in range(60):
            # The second begins late, and the first pauses.
            turn = [place for place in (2, 0, 1) if (place != 1 or number >= 20) and (place != 0 or number % 3)][:3]
            turn = [place for place in turn if len(together[place]) < 40]
            chosen = runner.queue([Span(rows[place]) for place in turn]).choices() if turn else []
            for place, choice in zip(turn, chosen, strict=True):
                together[place].append(choice[0].token_id)  # type: ignore[index]
        assert together == alone

    def test_steps_may_be_queued_ahead(self, runner: Runner) -> None:
        sampler = Sampler(WARM, seed=8)
        expected = go_on(runner, start(runner, PROMPT[:30], sampler), 30)
        row = start(runner, PROMPT[:30], sampler)
        found, ahead = [], runner.queue([Span(row)])
        for _ in range(29):
            step, ahead = ahead, runner.queue([Span(row)])
            found.append(step.choices()[0][0].token_id)  # type: ignore[index]
        found.append(ahead.choices()[0][0].token_id)  # type: ignore[index]
        assert found == expected
        assert list(runner.token_ids(row))[31:] == found[:-1]

    def test_same_input_same_bits(self, runner: Runner) -> None:
        results = set()
        for _ in range(10):
            row = start(runner, PROMPT[:64], Sampler(WARM, seed=4))
            token_ids = go_on(runner, row, 20)
            results.add((tuple(token_ids), single_steps(runner, row, [1]).tobytes()))
            runner.close(row)
        assert len(results) == 1

    def test_single_steps_equal_a_prompt_to_rounding(self, runner: Runner) -> None:
        row = start(runner, PROMPT[:20], None)
        stepped = single_steps(runner, row, PROMPT[20:60])[-1]
        assert relative_error(stepped, logits_of(runner, PROMPT[:60])) < self.tolerance
