"""A device without a model, whose steps take a fixed time: so only the host's part is measured.

It works ahead, as a card does, and chooses a token by its seed and position alone.
"""

import time
from collections.abc import Sequence

from llmcli.config.llama import LlamaConfig
from llmcli.runners.base import PAGE_TOKENS, AllLogits, Arithmetic, Chosen, HiddenStates, Limits, pages_of
from llmcli.runners.step_device import SINGLE, Work
from llmcli.sampling.chain import Choice
from llmcli.sampling.params import Sampler


class SteadyDevice:
    """A `StepDevice`. A step that chooses takes `step_seconds`, and a prompt's token `prompt_token_seconds`."""

    cache_type = "nothing"
    arithmetic = Arithmetic("nothing", "auto", None, ())

    def __init__(
        self,
        config: LlamaConfig,
        *,
        num_rows: int,
        max_seq_len: int,
        step_seconds: float,
        prompt_token_seconds: float = 10e-6,
    ):
        self.config = config
        self.description = f"a device whose steps take {1e3 * step_seconds:g} ms"
        self.limits = Limits(num_rows, max_seq_len, 2 * num_rows * pages_of(max_seq_len), works_ahead=True)
        self._step_seconds = step_seconds
        self._prompt_token_seconds = prompt_token_seconds
        self._seeds = [0] * num_rows
        self._free_time = 0.0  # when all that is queued is done

    def method(self, position: int, prompt_len: int) -> int:
        """All tokens are alike."""
        return SINGLE

    def cut(self, position: int, prompt_len: int) -> int:
        """The position of the page's first token."""
        return position // PAGE_TOKENS * PAGE_TOKENS

    def span_end(self, position: int, most: int, prompt_len: int) -> int:
        """The end of the page or the prompt."""
        return min((position + max(most, PAGE_TOKENS)) // PAGE_TOKENS * PAGE_TOKENS, prompt_len)

    def copy_page(self, source: int, target: int) -> None:
        """Do nothing: pages hold nothing."""

    def set_slot(self, slot: int, sampler: Sampler, token_ids: Sequence[int]) -> None:
        """Keep the seed."""
        self.set_sampler(slot, sampler)

    def set_sampler(self, slot: int, sampler: Sampler) -> None:
        """Keep the seed."""
        self._seeds[slot] = sampler.seed + sampler.sample_index

    def run(self, works: Sequence[Work]) -> "SteadyStep":
        """Queue a step after the others."""
        prompt_seconds = self._prompt_token_seconds * sum(len(work.token_ids) for work in works)
        seconds = prompt_seconds + self._step_seconds * any(not work.token_ids for work in works)
        self._free_time = max(self._free_time, time.perf_counter()) + seconds
        return SteadyStep([self._choose(work) for work in works], self._free_time, prompt_seconds)

    def hidden_states(self, work: Work, inputs: HiddenStates | None) -> HiddenStates:
        """Not available."""
        raise NotImplementedError

    def _choose(self, work: Work) -> tuple[Choice, ...]:
        if work.choose == "none":
            return ()
        assert work.slot is not None
        end = work.position + work.num_tokens
        return (Choice((self._seeds[work.slot] + 40503 * end) % self.config.vocab_size, None, None),)


class SteadyStep:
    """A step that is done at `end_time`."""

    def __init__(self, chosen: list[Chosen], end_time: float, prompt_seconds: float):
        self._chosen, self._end_time, self._prompt_seconds = chosen, end_time, prompt_seconds

    def choices(self) -> list[Chosen]:
        """What was chosen, once the step is done."""
        if (rest := self._end_time - time.perf_counter()) > 0:
            time.sleep(rest)
        return self._chosen

    def logits(self, span: int, first: int = 0) -> AllLogits:
        """Not available."""
        raise NotImplementedError

    def prompt_seconds(self) -> float:
        """How long its prompts took."""
        return self._prompt_seconds
