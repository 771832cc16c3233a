"""`Fill`: the tokens that must run in a row before it can choose."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from llmcli.runners.base import MAX_SPAN, Runner, Span

# Running rows wait about so long for newcomers' prompts, in seconds a step; how many tokens that is, shows.
_WAIT_SECONDS = 0.03
_FIRST_FILL_TOKENS = 256
_FEWEST_FILL_TOKENS, MOST_FILL_TOKENS = 64, 8192

Owner = TypeVar("Owner", covariant=True)


class Fill(Generic[Owner]):
    """Runs a prompt, then the tokens that a preempted text had already generated (`said`). Then the row may choose.

    Attributes: num_run: tokens that the row holds; num_shared: tokens that it held at the start
    """

    def __init__(
        self, owner: Owner, row: int, prompt: Sequence[int], said: Sequence[int], num_shared: int, *, chooses: bool
    ):
        self.owner = owner
        self.row = row
        self.prompt = prompt
        self.num_shared = num_shared
        self.num_run = num_shared
        self._said = said
        self._chooses = chooses

    @property
    def num_computed(self) -> int:
        """Tokens of the prompt that have been run in this row."""
        return min(self.num_run, len(self.prompt)) - self.num_shared

    @property
    def is_done(self) -> bool:
        """Whether all tokens have run."""
        return self.num_run == len(self.prompt) + len(self._said)

    def next_span(self, runner: Runner, most: int) -> Span:
        """The span to run next, of about `most` tokens at most."""
        if self.num_run < len(self.prompt):
            end = runner.span_end(self.row, most)
            token_ids = self.prompt[self.num_run : end]
        else:
            first = self.num_run - len(self.prompt)
            token_ids = self._said[first : first + MAX_SPAN]
            end = self.num_run + len(token_ids)
        is_last = end == len(self.prompt) + len(self._said)
        return Span(self.row, tuple(token_ids), "last" if self._chooses and is_last else "none")

    def take(self, span: Span) -> bool:
        """Count a span as run. True if it was behind the prompt."""
        is_said = self.num_run >= len(self.prompt)
        self.num_run += len(span.token_ids)
        return is_said


class FillBudget:
    """How many tokens of prompts a step may run, so that running rows need not wait longer than they may.

    Attributes: num_tokens
    """

    def __init__(self) -> None:
        self.num_tokens = _FIRST_FILL_TOKENS
        self._num_filled = 0  # in the step before

    def adapt(self, num_filled: int, seconds: float, *, is_ahead: bool) -> None:
        """Learn from a step that ran so many tokens and took so long; halve or double the number at most.

        Ahead of the device, what took so long was the step before.
        """
        num_waited_for, self._num_filled = self._num_filled if is_ahead else num_filled, num_filled
        if num_waited_for:
            wanted = num_waited_for * _WAIT_SECONDS / seconds
            bounded = min(max(wanted, self.num_tokens / 2), self.num_tokens * 2)
            self.num_tokens = min(max(int(bounded), _FEWEST_FILL_TOKENS), MOST_FILL_TOKENS)
