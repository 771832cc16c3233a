"""`StepDevice`: what a device does for `SteppingRunner`, and `Work`, a span as it gets it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llmcli.config.llama import LlamaConfig
from llmcli.runners.base import Choose, Limits, Logits, Step
from llmcli.sampling.sampler import Sampler

# What is not part of a prompt goes token by token, in spans of any length, with the same bits.
SINGLE = 0


@dataclass(frozen=True)
class Work:
    """A span as the device gets it.

    - `slot`: the place of the row's sampler and history on the device, None for a row without one.
    - `pages`: the row's page table, with room for the new tokens.
    - `position`: that of the first new token.
    - `token_ids`: the new tokens; () is one token, the one that was chosen last in the slot.
    - `method`: how they are computed, as `StepDevice.method` said; SINGLE gives each the bits of a step of its own.
    """

    slot: int | None
    pages: Sequence[int]
    position: int
    token_ids: tuple[int, ...]
    method: int
    choose: Choose
    logits: Logits | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that are run."""
        return 0 if self.logits is not None else max(len(self.token_ids), 1)


class StepDevice(Protocol):
    """What a device can do with pages and slots. Everything happens in the order of the calls."""

    @property
    def config(self) -> LlamaConfig:
        """The shape of the loaded model."""

    @property
    def description(self) -> str:
        """Device and precision for the user."""

    @property
    def cache_type(self) -> str:
        """Type of the KV cache's elements."""

    @property
    def limits(self) -> Limits:
        """What there is room for."""

    def method(self, position: int, prompt_len: int) -> int:
        """How the token at `position` of a prompt of so many tokens is computed: SINGLE, or another number.

        It is the same for all tokens of a page.

        Tokens with the same number, and the same tokens and numbers before them, have the same keys and values.
        """

    def cut(self, position: int, prompt_len: int) -> int:
        """The last place up to `position` at which a prompt of so many tokens may be cut without changing a bit."""

    def span_end(self, position: int, most: int, prompt_len: int) -> int:
        """Where a prompt's span from `position` on may end, about `most` tokens on; beyond `position`."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy the keys and values of a page."""

    def set_slot(self, slot: int, sampler: Sampler, token_ids: Sequence[int]) -> None:
        """Give a slot its sampler and the first tokens of its row. Raises: UsageError for what it cannot hold"""

    def set_sampler(self, slot: int, sampler: Sampler) -> None:
        """Give a slot another sampler. Raises: UsageError for what it cannot hold"""

    def run(self, works: Sequence[Work]) -> Step:
        """Queue a step. Raises: DeviceError"""
