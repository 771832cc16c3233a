"""What a scheduler is asked for: texts behind a prompt, or the scores of a text."""

from dataclasses import dataclass

from llmcli.sampling.sampler import Sampler


@dataclass
class KeptRow:
    """A row that stays open between requests, so that what a prompt has in common with the one before is not run again.

    Whoever made it closes the row in the end, `row` being its number; None before the first request.
    """

    row: int | None = None


@dataclass(frozen=True)
class Request:
    """What to generate. `samples` are sample indices: index k draws the same text whichever others are asked for.

    - Without `max_new_tokens` a text goes on until it ends or the context is full.
    - `at_start` says that the generated text stands alone: then the leading space that some tokenizers put before a
      text's first word is dropped.
    - `sampler` serves every sample, each with its own index.
    - With `num_alternatives`, each token comes with the model's and the chain's view of it, listing that many other
      tokens; this costs some passes over the vocabulary a token.
    - `kept_row` is where one lone sample is generated, and what it leaves behind.
    """

    prompt_token_ids: tuple[int, ...]
    sampler: Sampler
    samples: tuple[int, ...]
    max_new_tokens: int | None
    stop_strings: tuple[str, ...] = ()
    at_start: bool = False
    num_alternatives: int | None = None
    kept_row: KeptRow | None = None


@dataclass(frozen=True)
class ScoreRequest:
    """The logits that predict token_ids[first:], 0 < first < len(token_ids)."""

    token_ids: tuple[int, ...]
    first: int

    def __post_init__(self) -> None:
        """Raises: ValueError"""
        if not 0 < self.first < len(self.token_ids):
            raise ValueError(f"scores from {self.first}, expected 1 to {len(self.token_ids) - 1}")
