"""Requests to a scheduler: texts after a prompt, or the scores of a text."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcli.sampling.params import Sampler

if TYPE_CHECKING:
    from llmcli.schema.schema import Schema


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
    schema: Schema | None = None
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
