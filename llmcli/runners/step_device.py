"""`StepDevice`: what a device does for `SteppingRunner`; `Work`: a span in the form a device gets."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from llmcli.config.llama import LlamaConfig
from llmcli.runners.base import Arithmetic, Choose, HiddenStates, Limits, Logits, Masks, Step
from llmcli.sampling.params import Sampler

# The method of every token outside a prompt: it has the bits of a step of its own, however long its span is.
SINGLE = 0


class Work(NamedTuple):
    """A span as the device gets it. A plain tuple, as `Span` is.

    - `slot`: the place of the row's sampler and history on the device; None for a row without a sampler.
    - `pages`: the row's page table, with room for the new tokens.
    - `position`: the position of the first new token.
    - `token_ids`: the new tokens; () means the one token that the slot chose last.
    - `method`: how the tokens are computed, from `StepDevice.method`. SINGLE gives each the bits of a step of its own.
    - `drafts`: tokens that run after the slot's last one, each kept while it equals the choice before it; see `Span`.
    - `masks`: of each choice; only devices with `Limits.takes_masks` get any.
    - `logits_from`: the first token of the span whose logits may be read.
    - `latest`: the token that runs first, if the host knows it and `token_ids` does not name it.
    """

    slot: int | None
    pages: list[int]
    position: int
    token_ids: tuple[int, ...]
    method: int
    choose: Choose
    logits: Logits | None = None
    drafts: tuple[int, ...] = ()
    masks: Masks | None = None
    latest: int | None = None
    logits_from: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the device runs, with drafts; 0 if the token is chosen from given logits."""
        return 0 if self.logits is not None else (len(self.token_ids) or 1) + len(self.drafts)


class StepDevice(Protocol):
    """What a device does with pages and slots. It works in the order of the calls.

    The attributes are those of the `Runner` over it.
    """

    config: LlamaConfig
    description: str
    cache_type: str
    arithmetic: Arithmetic
    limits: Limits

    def method(self, position: int, prompt_len: int) -> int:
        """The method that computes a prompt's token at `position`: SINGLE, or another number.

        All tokens of a page have the same method. Equal tokens that follow equal tokens, all computed by the same
        methods, have equal keys and values.
        """

    def cut(self, position: int, prompt_len: int) -> int:
        """The last position, `position` at most, where the prompt can be cut without changing a bit."""

    def span_end(self, position: int, most: int, prompt_len: int) -> int:
        """Where a prompt's span from `position` on may end: about `most` tokens further, at least one."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy the keys and values of a page."""

    def set_slot(self, slot: int, sampler: Sampler, token_ids: Sequence[int]) -> None:
        """Give a slot its sampler and the first tokens of its row. Raises: UsageError if they do not fit"""

    def set_sampler(self, slot: int, sampler: Sampler) -> None:
        """Give a slot another sampler. Raises: UsageError if it does not fit"""

    def run(self, works: Sequence[Work]) -> Step:
        """Queue a step. Raises: DeviceError"""

    def hidden_states(self, work: Work, inputs: HiddenStates | None) -> HiddenStates:
        """Run a work that names its tokens and chooses nothing; see `Runner.hidden_states`. Raises: DeviceError"""
