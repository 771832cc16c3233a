"""`Fill`: the tokens that must run in a row before it can choose."""

import math
from collections.abc import Sequence
from typing import Generic, TypeVar

from llmcli.runners.base import BLOCK_TOKENS, MAX_SPAN, PAGE_TOKENS, Masks, Runner, Span

_FIRST_FILL_TOKENS, MOST_FILL_TOKENS = 256, 8192

Owner = TypeVar("Owner", covariant=True)


class Fill(Generic[Owner]):
    """Runs a prompt, then the tokens that a preempted text had already generated (`said`). Then the row may choose.

    Attributes: num_run: tokens that the row holds; num_shared: tokens that it held at the start
    """

    def __init__(
        self,
        owner: Owner,
        row: int,
        prompt: Sequence[int],
        said: Sequence[int],
        num_shared: int,
        first_read: int,
        *,
        chooses: bool,
    ):
        """`first_read`: the first token behind which logits are read; they are read behind all later ones, too."""
        self.owner = owner
        self.row = row
        self.prompt = prompt
        self.num_shared = num_shared
        self.num_run = num_shared
        self._said = said
        self._chooses = chooses
        self._first_read = first_read

    @property
    def num_computed(self) -> int:
        """Tokens of the prompt that have been run in this row."""
        return min(self.num_run, len(self.prompt)) - self.num_shared

    @property
    def is_done(self) -> bool:
        """Whether all tokens have run."""
        return self.num_run == len(self.prompt) + len(self._said)

    def next_span(self, runner: Runner, most: int, masks: Masks | None = None) -> Span:
        """The span to run next, of about `most` tokens at most. `masks` are those of the token chosen at the end."""
        if self.num_run < len(self.prompt):
            end = runner.span_end(self.row, most)
            token_ids = self.prompt[self.num_run : end]
        else:
            first = self.num_run - len(self.prompt)
            token_ids = self._said[first : first + MAX_SPAN]
            end = self.num_run + len(token_ids)
        is_last = end == len(self.prompt) + len(self._said)
        logits_from = min(max(self._first_read - self.num_run, 0), len(token_ids))
        if not (self._chooses and is_last):
            return Span(self.row, tuple(token_ids), "none", logits_from=logits_from)
        return Span(self.row, tuple(token_ids), masks=masks, logits_from=logits_from)

    def ends_with(self, span: Span) -> bool:
        """Whether all tokens have run once the span has."""
        return self.num_run + len(span.token_ids) == len(self.prompt) + len(self._said)

    @property
    def next_page(self) -> Sequence[int]:
        """The tokens of its prompt that fill the page after those that have run; fewer at the prompt's end."""
        return self.prompt[self.num_run : self.num_run + PAGE_TOKENS]

    def take(self, span: Span) -> bool:
        """Count a span as run. True if it was behind the prompt."""
        is_said = self.num_run >= len(self.prompt)
        self.num_run += len(span.token_ids)
        return is_said


class FillBudget:
    """Decides how many tokens of prompts a step runs while rows wait. It learns from the times of earlier spans.

    It raises the number by one block: a quarter more tokens may take half as much time again. One block is the least:
    fewer tokens take hardly less time, as even a short span reads all weights.

    Attributes: num_tokens: the most tokens of a span, whole blocks
    """

    def __init__(self, most_seconds: float) -> None:
        """`most_seconds` is the time that prompts may take in a step. Infinity: steps are long from the start."""
        self._most_seconds = most_seconds
        self.num_tokens = MOST_FILL_TOKENS if math.isinf(most_seconds) else _FIRST_FILL_TOKENS
        self._latest: dict[int, tuple[int, float]] = {}  # by blocks: the latest span's tokens and seconds

    def seconds(self, num_tokens: int) -> float:
        """Estimate a span's time from the latest span of as many blocks. Without one, assume all of `most_seconds`."""
        known_tokens, seconds = self._latest.get(_num_blocks(num_tokens), (num_tokens, self._most_seconds))
        return seconds * max(1.0, num_tokens / known_tokens)

    def has_room(self, spent_seconds: float, num_tokens: int) -> bool:
        """Whether a step may run one more span. Its first span always may."""
        return spent_seconds == 0 or spent_seconds + self.seconds(num_tokens) <= self._most_seconds

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Learn a span's time. If it took too long, run fewer tokens; if much time was left, run more."""
        num_blocks = _num_blocks(num_tokens)
        self._latest[num_blocks] = (num_tokens, seconds)
        share = seconds / self._most_seconds
        if share > 1:
            fewer = max(int(num_tokens / share) // BLOCK_TOKENS, 1) * BLOCK_TOKENS
            self.num_tokens = min(self.num_tokens, fewer)
        else:
            more = num_blocks if share < 1 / 3 else 1 if share < 4 / 5 else 0
            self.num_tokens = max(self.num_tokens, min((num_blocks + more) * BLOCK_TOKENS, MOST_FILL_TOKENS))


def _num_blocks(num_tokens: int) -> int:
    """Blocks that a span takes, the last one perhaps in part."""
    return -(-num_tokens // BLOCK_TOKENS)
