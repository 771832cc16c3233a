"""Requests to a scheduler: texts after a prompt, or the scores of a text."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from llmcli.sampling.params import Sampler

if TYPE_CHECKING:
    from llmcli.errors import LLMCliError
    from llmcli.runners.base import AllLogits
    from llmcli.sampling.inspect import Inspection
    from llmcli.schema.schema import Schema

# Events of a scheduler. Samples are numbered from 0; `request` is the number that `submit` returned.

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
    inspection: "Inspection | None" = None
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
    error: "LLMCliError"
    request: int = 0


@dataclass(frozen=True)
class Scored:
    """The logits of the next tokens of a scored text. Shapes: logits float32 [num_tokens, vocab_size]"""

    logits: "AllLogits"
    request: int = 0


@dataclass(frozen=True)
class PromptScored:
    """The model's view of a prompt's tokens from token `first` on. Comes again if the prompt must run again."""

    first: int
    views: "tuple[Inspection, ...]"
    request: int = 0


Event = PrefillProgress | Token | Finished | Failed | Scored | PromptScored


@dataclass
class KeptRow:
    """A row that stays open between requests. The beginning of a prompt that it holds does not run again.

    `row` is its number, None if it is not open. The maker of a KeptRow closes the row in the end.
    """

    row: int | None = None


@dataclass(frozen=True)
class Request:
    """Texts to generate.

    - `samples` are sample indices. Index k gives the same text whatever other indices are requested.
    - Without `max_new_tokens` a text continues until it ends or the context is full.
    - With `at_start` the generated text stands alone: drop the space that some tokenizers put before the first word.
    - `sampler` serves every sample, each with its own index.
    - With `num_alternatives` each token comes with the model's and the chain's view of it, and that many other tokens.
      This costs some passes over the vocabulary a token.
    - With `scores_prompt` the tokens of the prompt after its first also come with the model's view of them, before the
      texts. It needs `num_alternatives`, and a prompt of two tokens or more.
    - `said` are the first tokens of every text, given by the request: the text continues as if it had chosen them.
      They count as its tokens in every way, but have no `Token` events.
    - With `keeps_pages` the cache keeps the pages of finished texts until it needs room. A request with the same
      prompt, whose `said` begins like such a text, then does not run these tokens again.
    - `kept_row` is the row in which a lone sample runs; it stays open afterwards.
    - With `schema` each text must match it. The runner must take masks.
    - `shown_token_ids` are special tokens whose strings belong to the text, as those that begin a tool call.
    - `client` is who asks. Rows are shared out between clients; see `FairOrder`.
    """

    prompt_token_ids: tuple[int, ...]
    sampler: Sampler
    samples: tuple[int, ...]
    max_new_tokens: int | None
    stop_strings: tuple[str, ...] = ()
    at_start: bool = False
    num_alternatives: int | None = None
    scores_prompt: bool = False
    kept_row: KeptRow | None = None
    said: tuple[int, ...] = ()
    keeps_pages: bool = False
    schema: "Schema | None" = None
    shown_token_ids: frozenset[int] = frozenset()
    client: Hashable = None

    @property
    def must_read_choices(self) -> bool:
        """Whether to read a choice before the next is queued, which overwrites the logits of its view."""
        return self.num_alternatives is not None


@dataclass(frozen=True)
class ScoreRequest:
    """The logits that predict token_ids[first:], 0 < first < len(token_ids).

    With `num_alternatives`: the log probabilities of these tokens and of that many others, instead of the logits.
    """

    token_ids: tuple[int, ...]
    first: int
    num_alternatives: int | None = None
    client: Hashable = None

    def __post_init__(self) -> None:
        """Raises: ValueError"""
        if not 0 < self.first < len(self.token_ids):
            raise ValueError(f"scores from {self.first}, expected 1 to {len(self.token_ids) - 1}")


def prompt_scores(request: Request) -> ScoreRequest:
    """The scores of the prompt of a request with `scores_prompt`. Raises: ValueError for a prompt of one token"""
    return ScoreRequest(request.prompt_token_ids, 1, request.num_alternatives, request.client)
