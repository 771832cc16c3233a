"""The contract for a view between a runner's layers; a part of `RunnerConformance`."""

import numpy as np
import pytest
from row_steps import GREEDY, PROMPT, same, single_steps, start

from llmcli.runners.base import Runner, Span


class LayerConformance:
    """Hidden states are those of a step, and layers take given inputs."""

    @pytest.mark.parametrize("num_prompt_tokens", [1, 5, 70, 150])
    def test_hidden_states_are_those_of_a_step(self, runner: Runner, num_prompt_tokens: int) -> None:
        """For a prompt, a single token and a span; logits and the choices after them have the same bits."""
        prompt, others = PROMPT[:num_prompt_tokens], (PROMPT[150:151], PROMPT[151:154])
        looked, expected = runner.open(prompt, GREEDY), runner.open(prompt, GREEDY)
        embeddings: dict[int, bytes] = {}
        for row in (looked, expected):
            runner.keep(row, 0)
        while (begin := runner.num_tokens(looked)) < len(prompt):
            end = runner.span_end(looked, len(prompt))
            states = runner.hidden_states(Span(looked, tuple(prompt[begin:end]), "none"))
            runner.queue([Span(expected, tuple(prompt[begin:end]), "none")]).choices()
            self.check_states(runner, states, prompt[begin:end], embeddings)
        for token_ids in others:
            states = runner.hidden_states(Span(looked, tuple(token_ids), "none"))
            runner.queue([Span(expected, tuple(token_ids), "none")]).choices()
            self.check_states(runner, states, token_ids, embeddings)
        steps = [runner.queue([Span(row, (PROMPT[160],))]) for row in (looked, expected)]
        (first,), (second,) = (step.choices() for step in steps)
        assert first == second
        assert same(single_steps(runner, looked, PROMPT[161:163]), single_steps(runner, expected, PROMPT[161:163]))
        assert list(runner.token_ids(looked)) == list(runner.token_ids(expected))

    @pytest.mark.parametrize("num_prompt_tokens", [5, 40])
    def test_layers_take_what_they_are_given(self, runner: Runner, num_prompt_tokens: int) -> None:
        """Given its own states a runner repeats them; given others from the second layer on, only that changes."""
        rows = [runner.open(PROMPT[:num_prompt_tokens]) for _ in range(4)]
        spans = []
        for row in rows:
            runner.keep(row, 0)
            spans.append(Span(row, tuple(PROMPT[: runner.span_end(row, num_prompt_tokens)]), "none"))
        own = runner.hidden_states(spans[0])
        assert same(runner.hidden_states(spans[1], own), own)
        inputs = own.copy()
        inputs[1] = own[1, ::-1]
        inputs[-1] = np.nan  # no layer is left to take it
        changed = runner.hidden_states(spans[2], inputs)
        assert same(changed[:2], own[:2])
        assert (changed[2] != own[2]).all(-1).any()
        assert same(changed[3:], own[3:])
        assert same(runner.hidden_states(spans[3]), own)

    def check_states(
        self, runner: Runner, states: np.ndarray, token_ids: list[int], embeddings: dict[int, bytes]
    ) -> None:
        config = runner.config
        assert states.shape == (config.num_hidden_layers + 1, len(token_ids), config.hidden_size)
        assert states.dtype == np.float32
        assert np.isfinite(states).all()
        for token_id, embedding in zip(token_ids, states[0], strict=True):  # the same wherever the token stands
            assert embeddings.setdefault(token_id, embedding.tobytes()) == embedding.tobytes()
        assert (states[1:] != states[:-1]).any((1, 2)).all()

    def test_hidden_states_of_what_chooses_or_names_nothing_are_refused(self, runner: Runner) -> None:
        row = start(runner, PROMPT[:5])
        for span in (Span(row), Span(row, (), "none"), Span(row, (3,)), Span(row, (3,), "every")):
            with pytest.raises(ValueError, match="hidden_states"):
                runner.hidden_states(span)
        assert runner.num_tokens(row) == 5
