"""`Plan`: a model's needs and speed, known before a weight is read; and the interface of predictors."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Predictor(Protocol):
    """Times and bytes of a model on a device. Each runner has its own, based on what it launches."""

    def decode_bytes(self, depth: int, num_rows: int = 1) -> int:
        """Bytes that one step reads for `num_rows` rows of `depth` tokens each: weights, keys and values."""

    def decode_seconds(self, depth: int, num_rows: int = 1) -> float:
        """The time of one step of `num_rows` rows of `depth` tokens each."""

    def prefill_seconds(self, num_tokens: int) -> float | None:
        """The time to the logits after a prompt; None if the rate of products is unknown."""

    def first_token_seconds(self, num_tokens: int) -> float | None:
        """The time of a prompt and the first token after it; None if the rate of products is unknown."""

    def decode_floor_seconds(self, depth: int, num_rows: int = 1) -> float:
        """The least time of a step: the longer of its bytes at the bandwidth and its operations at their rate.

        Without the operations if the rate of products is unknown.
        """

    def prefill_floor_seconds(self, num_tokens: int) -> float | None:
        """The same for a prompt's logits; None if the rate of products is unknown."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a device that a model needs at a context, with its KV cache in `cache_type`.

    `largest_context` is the largest that fits `available_bytes`.

    Units: bytes; `workspace_bytes` holds activations, the sampler's state and the needs of the device's library
    """

    weight_bytes: int
    cache_bytes: int
    cache_type: str
    workspace_bytes: int
    available_bytes: int
    largest_context: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.cache_bytes + self.workspace_bytes


@dataclass(frozen=True)
class DecodePrediction:
    """Decoding `num_rows` rows that hold `depth` tokens each; the rate counts the tokens of all rows."""

    depth: int
    num_rows: int
    bytes_per_step: int
    tokens_per_second: float


@dataclass(frozen=True)
class PromptPrediction:
    """The time of a prompt of `num_tokens` to its first new token; None if the rate of products is unknown."""

    num_tokens: int
    tokens_per_second: float | None
    first_token_seconds: float | None


@dataclass(frozen=True)
class DraftPlan:
    """A draft model for a model, and the bytes of both."""

    model: str
    memory: MemoryUse
    bytes_of_both: int


@dataclass(frozen=True)
class Plan:
    """A model on a device. `read_bytes_per_second` is measured, or given by the user."""

    model: str
    precision: str
    num_parameters: int
    device: str
    context: int
    num_rows: int
    memory: MemoryUse
    read_bytes_per_second: float
    decode: tuple[DecodePrediction, ...]
    prompts: tuple[PromptPrediction, ...]


def predict_decode(predictor: Predictor, depth: int, num_rows: int) -> DecodePrediction:
    """Decoding at one depth."""
    return DecodePrediction(
        depth,
        num_rows,
        predictor.decode_bytes(depth, num_rows),
        num_rows / predictor.decode_seconds(depth, num_rows),
    )


def predict_prompt(predictor: Predictor, num_tokens: int) -> PromptPrediction:
    """A prompt of one length."""
    seconds = predictor.prefill_seconds(num_tokens)
    return PromptPrediction(
        num_tokens, None if seconds is None else num_tokens / seconds, predictor.first_token_seconds(num_tokens)
    )


def depths_within(context: int, wanted: Iterable[int]) -> tuple[int, ...]:
    """The wanted lengths that leave room for a token in the context, and the longest that does."""
    return tuple(sorted({*(length for length in wanted if length < context), max(context - 1, 1)}))
