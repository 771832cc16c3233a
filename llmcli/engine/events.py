"""Events of a scheduler. Samples are numbered from 0; `request` is the number that `submit` returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from llmcli.errors import LLMCliError
    from llmcli.runners.base import AllLogits
    from llmcli.sampling.inspect import Inspection

FinishReason = Literal["eos", "stop", "length", "context", "interrupted"]


@dataclass(frozen=True)
class Timings:
    """Durations of one sample. Decode counts the tokens after the first, which prefill and one draw produce.

    Units: seconds
    """

    prefill_tokens: int
    prefill_seconds: float
    time_to_first_token_seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens computed per second, or None if none were."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_tokens and self.prefill_seconds else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first per second, or None if there was only one."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens and self.decode_seconds else None


@dataclass(frozen=True)
class PrefillProgress:
    """`num_computed` of `num_tokens` prompt tokens have been run; comes before the first chunk and after each."""

    num_computed: int
    num_tokens: int
    request: int = 0


class Token(NamedTuple):
    """One sampled token, the text that became certain with it (may be empty), and the view of its choice.

    A NamedTuple, the class that is fastest to make, as there is one for every token.
    """

    sample: int
    token_id: int
    text: str
    inspection: Inspection | None = None
    request: int = 0


@dataclass(frozen=True)
class Finished:
    """A sample has ended.

    `tail` is text that was held back until now; `text` is all of it. `token_ids` are the sampled ids, with the
    end-of-sequence id and those of a stop string, which `text` leaves out. With a schema, `is_complete` says whether
    it allows the text to end here; otherwise it is None.
    """

    sample: int
    tail: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    timings: Timings
    request: int = 0
    is_complete: bool | None = None


@dataclass(frozen=True)
class Failed:
    """A sample failed; the others continue."""

    sample: int
    error: LLMCliError
    request: int = 0


@dataclass(frozen=True)
class Scored:
    """The logits of the next tokens of a scored text. Shapes: logits float32 [num_tokens, vocab_size]"""

    logits: AllLogits
    request: int = 0


@dataclass(frozen=True)
class PromptScored:
    """The model's view of a prompt's tokens from token `first` on. Comes again if the prompt must run again."""

    first: int
    views: tuple[Inspection, ...]
    request: int = 0


Event = PrefillProgress | Token | Finished | Failed | Scored | PromptScored
