"""`Drafting`: what a run guesses of its texts, so that a step can choose several tokens. A guess changes no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from llmcli.engine.draft_length import DraftCost, KeptRates, StepTimes, best_length
from llmcli.errors import LLMCliError
from llmcli.runners.base import MAX_SPAN
from llmcli.sampling.sampler import Sampler

MAX_STEP_TOKENS = MAX_SPAN  # of all rows, drafts included
MAX_DRAFT_ROWS = MAX_STEP_TOKENS // 2  # a step with more rows has no drafts
T = TypeVar("T")
_TOKENS_BETWEEN_TRIALS = 32  # where drafts do not pay and cost something to make, one is made now and then


class Guesses(Protocol):
    """The guesses of one text."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take what the text has said since. Raises: LLMCliError"""

    def kind(self) -> int | None:
        """The kind of the next guess; None if there is none. Guesses of a kind are right about equally often."""

    def guess(self, count: int) -> tuple[int, ...]:
        """The next tokens, `count` at most, as `kind` has found them. Raises: LLMCliError"""

    def close(self) -> None:
        """The text is over."""


class DraftSource(Protocol):
    """Where guesses come from. `is_free` says that making one takes no time worth counting."""

    is_free: bool

    def begin(self, prompt: Sequence[int], sampler: Sampler) -> Guesses:
        """The guesses of a text behind its prompt. Raises: LLMCliError"""


@dataclass
class _OfRows:
    """Steps of one number of rows."""

    steps: int = 0
    num_kept: int = 0
    steps_with: int = 0
    seconds_with: float = 0.0
    seconds_without: float = 0.0

    @property
    def plain_seconds(self) -> float | None:
        """What a step without drafts takes; None if there was none."""
        steps = self.steps - self.steps_with
        return self.seconds_without / steps if steps else None


class DraftUsage:
    """Counts of steps that choose behind tokens, with drafts and without, and their times.

    Attributes: num_drafts: drafts made; num_kept: those that were right; steps: a step of three rows counts as three
    """

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_kept = 0
        self.steps = 0
        self._of_rows: dict[int, _OfRows] = {}

    def count(self, num_rows: int, num_drafts: int, num_kept: int, seconds: float) -> None:
        """Count a step of so many rows."""
        self.num_drafts += num_drafts
        self.num_kept += num_kept
        self.steps += num_rows
        those = self._of_rows.setdefault(num_rows, _OfRows())
        those.steps += 1
        those.num_kept += num_kept
        if num_drafts:
            those.steps_with += 1
            those.seconds_with += seconds
        else:
            those.seconds_without += seconds

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a row got in a step, on average."""
        return 1 + self.num_kept / self.steps if self.steps else 1.0

    @property
    def step_seconds(self) -> tuple[float, float] | None:
        """What a step with drafts took, on average, and what it would have taken without, by those of as many rows.

        None where one kind of step is missing.
        """
        pairs = [(of, plain) for of in self._of_rows.values() if of.steps_with and (plain := of.plain_seconds)]
        steps = sum(of.steps_with for of, _ in pairs)
        if not steps:
            return None
        without = sum(of.steps_with * plain for of, plain in pairs)
        return sum(of.seconds_with for of, _ in pairs) / steps, without / steps

    @property
    def gain(self) -> float | None:
        """How much faster decoding was than it would have been without drafts; None where one kind of step is missing.

        The time to make drafts is part of it.
        """
        if self.step_seconds is None:
            return None
        pairs = [(rows, of, plain) for rows, of in self._of_rows.items() if (plain := of.plain_seconds)]
        spent = sum(of.seconds_with + of.seconds_without for _, of, _ in pairs)
        return sum((of.steps + of.num_kept / rows) * plain for rows, of, plain in pairs) / spent


class TextDrafts:
    """The drafts of one text.

    Attributes: is_trial: whether drafts do not pay here, and the latest one is made all the same
    """

    def __init__(self, guesses: Guesses):
        self.is_trial = False
        self._guesses = guesses
        self._rates = KeptRates()
        self._num_known = 0
        self._kind = 0
        self._latest: tuple[int, ...] = ()
        self._num_since_trial = 0

    def drafts(
        self, token_ids: Sequence[int], most: int, *, least: int, cost: DraftCost, is_free: bool
    ) -> tuple[int, ...]:
        """Drafts behind the text's tokens so far, as many as are worth it. Raises: LLMCliError"""
        length = self._best_length(token_ids, most, least=least, cost=cost, is_free=is_free)
        if length > 0 or (length == 0 and is_free):
            self._guess(length)
        return self._latest[: max(length, 0)]

    def are_worth_waiting(
        self, token_ids: Sequence[int], most: int, *, least: int, cost: DraftCost, is_free: bool
    ) -> bool:
        """Whether there would be drafts behind these tokens; so there may be some behind the choice that comes next.

        What is free is guessed and judged, so that a text which runs ahead is known when it begins to repeat itself.
        Raises: LLMCliError
        """
        length = self._best_length(token_ids, most, least=least, cost=cost, is_free=is_free)
        if length >= 0 and is_free:
            self._guess(length)
        return length > 0

    def close(self) -> None:
        """The text is over."""
        self._guesses.close()

    def _best_length(self, token_ids: Sequence[int], most: int, *, least: int, cost: DraftCost, is_free: bool) -> int:
        """How many drafts are worth it behind these tokens; -1 if there are none to make."""
        self._learn(token_ids[self._num_known :])
        kind = self._guesses.kind()
        if kind is None or most < 1:
            return -1
        self._kind = kind
        length = best_length(self._rates.rate(kind), cost, most, least)
        self.is_trial = length == 0 and self._num_since_trial >= _TOKENS_BETWEEN_TRIALS and not is_free
        return 1 if self.is_trial else length

    def _guess(self, length: int) -> None:
        """Guess so many tokens, or one that is only judged."""
        self._latest = self._guesses.guess(max(length, 1))
        self._num_since_trial = 0

    def _learn(self, token_ids: Sequence[int]) -> None:
        num_judged = min(len(self._latest), len(token_ids))
        if num_judged:
            right = [a == b for a, b in zip(self._latest, token_ids, strict=False)]
            num_right = [*right, False].index(False)
            self._rates.learn(self._kind, num_right, ends_wrong=num_right < num_judged)
        self._latest = ()
        self._guesses.extend(token_ids)
        self._num_known += len(token_ids)
        self._num_since_trial += len(token_ids)


class Drafting:
    """Makes the drafts of a run, and measures whether they pay.

    With `least` a step has so many drafts wherever there are guesses; without it drafts stop where they do not pay. An
    error of the source ends drafting, and is passed to `on_problem`; the texts go on without.
    Attributes: read_time: when the latest step was read
    """

    def __init__(
        self, source: DraftSource, *, least: int = 0, on_problem: Callable[[LLMCliError], None] = lambda error: None
    ):
        self.usage = DraftUsage()
        self.read_time = 0.0
        self._source: DraftSource | None = source
        self._least = least
        self._on_problem = on_problem
        self._times: dict[int, StepTimes] = {}  # by the number of rows
        self._has_trial = False  # in the step that is read next; what has come since the last one is made up for there

    def begin(
        self, prompt: Sequence[int], sampler: Sampler, wrap: Callable[[Guesses], Guesses] = lambda guesses: guesses
    ) -> TextDrafts | None:
        """The drafts of a text, of guesses as `wrap` makes them from those of the source; None if there can be none."""
        try:
            return None if self._source is None else TextDrafts(wrap(self._source.begin(prompt, sampler)))
        except LLMCliError as error:
            self._stop(error)
            return None

    def drafts(self, text: TextDrafts, token_ids: Sequence[int], most: int, num_rows: int) -> tuple[int, ...]:
        """Drafts behind the text's tokens so far, `most` at most, for a step of so many rows."""
        drafts = self._ask(text.drafts, token_ids, most, num_rows) or ()
        self._has_trial = self._has_trial or (bool(drafts) and text.is_trial)
        return drafts

    def are_worth_waiting(self, text: TextDrafts, token_ids: Sequence[int], most: int, num_rows: int) -> bool:
        """Whether a text, of which a choice is under way, waits for it: it may then have drafts. See `TextDrafts`."""
        return bool(self._ask(text.are_worth_waiting, token_ids, most, num_rows))

    def _ask(self, ask: Callable[..., T], token_ids: Sequence[int], most: int, num_rows: int) -> T | None:
        most = min(most, MAX_STEP_TOKENS // num_rows - 1)
        times = self._times.get(num_rows)
        if self._source is None or most < 1 or times is None or not times.knows_plain:
            return None  # a text of many rows learns what it has said once they are fewer
        if not self._least and not times.is_measured:
            most = min(most, 1)  # to see what a draft costs
        cost, is_free = times.cost, self._source.is_free
        try:
            return ask(token_ids, most, least=min(self._least, most), cost=cost, is_free=is_free)
        except LLMCliError as error:
            self._stop(error)
            return None

    def learn(self, num_rows: int, num_drafts: int, num_kept: int, seconds: float) -> None:
        """Learn how long a step took, its drafts included, and how many of those were kept."""
        if not self._has_trial:
            self._times.setdefault(num_rows, StepTimes(num_rows)).learn(num_drafts, seconds)
        self._has_trial = False
        self.usage.count(num_rows, num_drafts, num_kept, seconds)

    def _stop(self, error: LLMCliError) -> None:
        if self._source is not None:
            self._source = None
            self._on_problem(error)
