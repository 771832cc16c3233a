"""The contract of runners that take masks; a part of `RunnerConformance`."""

from dataclasses import replace

import numpy as np
import pytest
from row_steps import PROMPT, WARM, start
from tiny_models import CONFIG

from llmcli.errors import UsageError
from llmcli.runners.base import Runner, Span
from llmcli.sampling.candidates import TokenMask, pack_mask
from llmcli.sampling.chain import choose
from llmcli.sampling.params import Sampler

SAMPLER = Sampler(replace(WARM, repetition_penalty=1.3), seed=5, num_prompt_tokens=20)


def some_masks(count: int, seed: int) -> TokenMask:
    generator = np.random.default_rng(seed)
    return np.stack([pack_mask(generator.random(CONFIG["vocab_size"]) < 0.02) for _ in range(count)])


class MaskConformance:
    """Tests over the fixture `runner`."""

    def test_a_runner_without_masks_refuses_them(self, runner: Runner) -> None:
        if not runner.limits.takes_masks:
            row = start(runner, PROMPT[:20], SAMPLER)
            with pytest.raises(ValueError, match="no masks"):
                runner.queue([Span(row, masks=lambda: some_masks(1, 0))])
            assert runner.num_tokens(row) == 20

    def test_a_choice_under_a_mask_is_the_host_sampler_s(self, runner: Runner) -> None:
        if not runner.limits.takes_masks:
            pytest.skip("this runner takes no masks")
        row, history = start(runner, PROMPT[:20], SAMPLER), list(PROMPT[:20])
        span = Span(row, (PROMPT[20],))
        for seed in range(10):
            history = [*history, *span.token_ids] if span.token_ids else history
            masks = some_masks(1, seed)
            step = runner.queue([span._replace(masks=lambda masks=masks: masks)])  # type: ignore[misc]
            (chosen,) = step.choices()
            expected = choose(step.logits(0)[0], history, SAMPLER, mask=masks[0])
            assert isinstance(chosen, tuple)
            assert chosen[0].token_id == expected.token_id
            history, span = [*history, expected.token_id], Span(row)

    def test_a_mask_is_for_its_step_only(self, runner: Runner) -> None:
        if not runner.limits.takes_masks:
            pytest.skip("this runner takes no masks")
        row, history, span = start(runner, PROMPT[:20], SAMPLER), list(PROMPT[:21]), Span(-1, (PROMPT[20],))
        for masks in (some_masks(1, 3), None, None, some_masks(1, 4), None):
            span = span._replace(row=row, masks=None if masks is None else lambda masks=masks: masks)  # type: ignore[misc]
            step = runner.queue([span])
            (chosen,) = step.choices()
            expected = choose(step.logits(0)[0], history, SAMPLER, mask=None if masks is None else masks[0])
            assert isinstance(chosen, tuple)
            assert chosen[0].token_id == expected.token_id
            history, span = [*history, expected.token_id], Span(row)

    def test_each_choice_of_a_span_has_its_mask(self, runner: Runner) -> None:
        if not runner.limits.takes_masks:
            pytest.skip("this runner takes no masks")
        masks, row = some_masks(5, 1), start(runner, PROMPT[:20], SAMPLER)
        (chosen,) = runner.queue([Span(row, tuple(PROMPT[20:25]), "every", masks=lambda: masks)]).choices()
        other, alone = start(runner, PROMPT[:20], SAMPLER), []
        for place, token_id in enumerate(PROMPT[20:25]):
            step = runner.queue([Span(other, (token_id,), masks=lambda place=place: masks[place : place + 1])])  # type: ignore[misc]
            alone += step.choices()[0]
        assert list(chosen) == alone  # type: ignore[arg-type]

    def test_each_choice_behind_a_draft_has_its_mask(self, runner: Runner) -> None:
        """Drafts that are right up to the fourth; with a row whose mask cannot be made, and then alone."""
        if not (runner.limits.takes_masks and runner.limits.max_drafts):
            pytest.skip("this runner takes no masks for drafts")
        masks, alone, other = some_masks(6, 2), [], start(runner, PROMPT[:20], SAMPLER)
        for place in range(6):
            step = runner.queue([Span(other, masks=lambda place=place: masks[place : place + 1])])  # type: ignore[misc]
            alone += step.choices()[0]  # type: ignore[arg-type]
        right = [choice.token_id for choice in alone]
        wrong = (right[3] + 1) % CONFIG["vocab_size"]
        row, failing = start(runner, PROMPT[:20], SAMPLER), start(runner, PROMPT[:25], SAMPLER)

        def fail() -> TokenMask:
            raise UsageError("too complex")

        first = Span(row, drafts=(*right[:3], wrong), masks=lambda: masks[:5])
        chosen, error = runner.queue([first, Span(failing, drafts=(1, 2), masks=fail)]).choices()
        assert list(chosen) == alone[:4]  # type: ignore[arg-type]
        assert isinstance(error, UsageError)
        assert str(error) == "too complex"
        (chosen,) = runner.queue([Span(row, drafts=(right[4],), masks=lambda: masks[4:])]).choices()
        assert list(chosen) == alone[4:]  # type: ignore[arg-type]

    def test_only_the_row_with_a_mask_feels_it(self, runner: Runner) -> None:
        if not runner.limits.takes_masks:
            pytest.skip("this runner takes no masks")
        held, free = start(runner, PROMPT[:20], SAMPLER), start(runner, PROMPT[:30], SAMPLER)
        alone = start(runner, PROMPT[:30], SAMPLER)
        is_allowed = np.arange(CONFIG["vocab_size"]) == 77
        span = Span(held, (PROMPT[20],), masks=lambda: pack_mask(is_allowed)[None])
        first, second = runner.queue([span, Span(free, (PROMPT[30],))]).choices()
        assert first[0].token_id == 77  # type: ignore[index]
        assert second == runner.queue([Span(alone, (PROMPT[30],))]).choices()[0]

    def test_a_mask_that_cannot_be_made_is_the_row_s_error(self, runner: Runner) -> None:
        if not runner.limits.takes_masks:
            pytest.skip("this runner takes no masks")

        def fail() -> TokenMask:
            raise UsageError("too complex")

        held, free = start(runner, PROMPT[:20], SAMPLER), start(runner, PROMPT[:30], SAMPLER)
        first, second = runner.queue([Span(held, masks=fail), Span(free)]).choices()
        assert isinstance(first, UsageError)
        assert str(first) == "too complex"
        assert isinstance(second, tuple)
