"""`Drafting`: guesses the next tokens of texts, and decides how many, so that a step can choose several tokens.

A guess never changes a text."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple, Protocol, TypeVar

from llmcli.errors import LLMCliError
from llmcli.runners.base import MAX_SPAN
from llmcli.sampling.params import Sampler

# How many drafts a step makes: one rule, from how often drafts were right and what they cost.
#
# With a chance p that a draft is right if those before it were, k drafts give 1 + p + ... + p^k tokens a step. They
# cost 1 + f + k * s steps. Each draft adds the share s of a step's time. Any draft at all adds f, since the step is
# queued only once the step before has been read. k is the number with the most tokens for the time; 0 if it gains
# less than LEAST_GAIN.
#
# f and s are a line through the latest times of each number of drafts. With s alone, short steps would seem dear, and
# long ones would not be tried. In a step of several texts each assumes that all do the same: k drafts of each cost
# R * k * s, and all R of them get the tokens.

LEAST_GAIN = 1.03
_FIRST_RATE = 0.6  # p before anything is known
_FIRST_RATE_WEIGHT = 4  # counted as this many drafts
_RATE_WEIGHT = 1 / 12  # of the latest draft, at least
_FEW_TIMES = 4  # the first step of a kind is slow, and another may be far off on a busy machine
_NUM_TIMES = 8  # the median of the latest times counts
_RECENT = 512  # steps, after which a time is forgotten: a wrong time costs no more than that


class DraftCost(NamedTuple):
    """What drafts add to a step, in steps: `fixed` for any at all, `each` for each draft of a text."""

    fixed: float
    each: float


FIRST_COST = DraftCost(0.0, 0.05)  # before any is measured


def best_length(rate: float, cost: DraftCost, most: int, least: int = 0) -> int:
    """The number of drafts, `least` to `most`, that gives the most tokens for the time."""
    best, best_gain = least, LEAST_GAIN if least == 0 else 0.0
    tokens = 1.0
    for length in range(1, most + 1):
        tokens += rate**length
        gain = tokens / (1 + cost.fixed + length * cost.each)
        if length >= least and gain > best_gain:
            best, best_gain = length, gain
    return min(best, most)


class KeptRates:
    """How often drafts were right lately, by kind."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def rate(self, kind: int) -> float:
        """The chance that a draft is right if those before it were."""
        return self._rates.get(kind, _FIRST_RATE)

    def learn(self, kind: int, num_right: int, *, ends_wrong: bool) -> None:
        """Learn that the first `num_right` drafts were right; with `ends_wrong` the next one was wrong."""
        rate, count = self.rate(kind), self._counts.get(kind, _FIRST_RATE_WEIGHT)
        for is_right in (*[1.0] * num_right, *[0.0] * ends_wrong):
            count += 1
            rate += max(1 / count, _RATE_WEIGHT) * (is_right - rate)
        self._rates[kind], self._counts[kind] = rate, count


class StepTimes:
    """What drafts cost in steps of one number of rows.

    Attributes: cost, of a text's drafts if all texts have as many as it
    """

    def __init__(self, num_rows: int):
        self.cost = FIRST_COST
        self._num_rows = num_rows
        self._plain = _Latest()
        self._added: dict[int, _Latest] = {}  # by the number of drafts: what they added, as a share of a step without
        self._num_steps = 0
        self._latest = 0  # the number of the latest step with drafts

    @property
    def knows_plain(self) -> bool:
        """Whether a step without drafts has been measured."""
        return self._plain.median > 0

    @property
    def is_measured(self) -> bool:
        """Whether enough steps with drafts have been measured lately."""
        return self.cost is not FIRST_COST

    def learn(self, num_drafts: int, seconds: float) -> None:
        """Learn the time of a step with `num_drafts` drafts in all texts together."""
        self._num_steps += 1
        since = self._num_steps - _RECENT
        if num_drafts == 0:
            self._plain.learn(seconds, self._num_steps)
            if self._latest <= since:  # drafts have not paid for this long: measure them again
                self.cost = FIRST_COST
        elif self.knows_plain:
            self._latest = self._num_steps
            added = self._added.get(num_drafts)
            if added is None or added.number <= since:
                added = self._added[num_drafts] = _Latest()
            added.learn(seconds / self._plain.median - 1, self._num_steps)
            places = [(count, one.median) for count, one in self._added.items() if one.counts and one.number > since]
            if places:
                fixed, each = _line(places)
                self.cost = DraftCost(fixed, each * self._num_rows)


class _Latest:
    """The latest measurements. Attributes: median; number, of the step measured last"""

    def __init__(self) -> None:
        self.median = 0.0
        self.number = 0
        self._values: deque[float] = deque(maxlen=_NUM_TIMES)

    @property
    def counts(self) -> bool:
        """Whether there are enough of them."""
        return len(self._values) >= _FEW_TIMES

    def learn(self, value: float, number: int) -> None:
        """Take a measurement of the step with this number."""
        self._values.append(value)
        self.number = number
        self.median = median_low(self._values)


def _line(places: list[tuple[int, float]]) -> DraftCost:
    """The least-squares line; if it falls or begins below zero, the best line that does neither.

    For a single point half is taken as fixed, so that a step with more drafts is tried.
    """
    if len(places) == 1:
        ((count, share),) = places
        return DraftCost(max(share, 0.0) / 2, max(share, 0.0) / 2 / count)
    counts = shares = squares = products = 0.0
    for count, share in places:
        counts += count
        shares += share
        squares += count * count
        products += count * share
    num = len(places)
    each = (num * products - counts * shares) / (num * squares - counts * counts)
    fixed = (shares - each * counts) / num
    if fixed < 0:
        fixed, each = 0.0, products / squares
    elif each < 0:
        fixed, each = shares / num, 0.0
    return DraftCost(max(fixed, 0.0), max(each, 0.0))


MAX_STEP_TOKENS = MAX_SPAN  # of all rows, drafts included
MAX_DRAFT_ROWS = MAX_STEP_TOKENS // 2  # a step with more rows has no drafts
T = TypeVar("T")
_TOKENS_BETWEEN_TRIALS = 32  # drafts that do not pay and cost time are tried once in this many tokens


class Guesses(Protocol):
    """The guesses for one text."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the tokens that the text has chosen since. Raises: LLMCliError"""

    def kind(self) -> int | None:
        """The kind of the next guess, None if there is none. Guesses of a kind are right about equally often."""

    def guess(self, count: int) -> tuple[int, ...]:
        """The next tokens, `count` at most, as found by `kind`. Raises: LLMCliError"""

    def close(self) -> None:
        """The text has ended."""


class DraftSource(Protocol):
    """Where guesses come from. `is_free`: making a guess takes no time worth counting."""

    is_free: bool

    def begin(self, prompt: Sequence[int], sampler: Sampler) -> Guesses:
        """The guesses for a text after its prompt. Raises: LLMCliError"""


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
        """The time of a step without drafts; None if there was none."""
        steps = self.steps - self.steps_with
        return self.seconds_without / steps if steps else None


class DraftUsage:
    """Counts and times of decode steps, with drafts and without.

    Attributes: num_drafts: drafts made; num_kept: those that were right; steps: a step of three rows counts as three
    """

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_kept = 0
        self.steps = 0
        self._of_rows: dict[int, _OfRows] = {}

    def count(self, num_rows: int, num_drafts: int, num_kept: int, seconds: float) -> None:
        """Count a step of `num_rows` rows."""
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
        """Mean tokens of a row in a step."""
        return 1 + self.num_kept / self.steps if self.steps else 1.0

    @property
    def step_seconds(self) -> tuple[float, float] | None:
        """The mean time of a step with drafts, and the time it would have taken without, by steps of as many rows.

        None if one kind of step is missing.
        """
        pairs = [(of, plain) for of in self._of_rows.values() if of.steps_with and (plain := of.plain_seconds)]
        steps = sum(of.steps_with for of, _ in pairs)
        if not steps:
            return None
        without = sum(of.steps_with * plain for of, plain in pairs)
        return sum(of.seconds_with for of, _ in pairs) / steps, without / steps

    @property
    def gain(self) -> float | None:
        """How much faster decoding was than without drafts; None if one kind of step is missing.

        Includes the time to make drafts.
        """
        if self.step_seconds is None:
            return None
        pairs = [(rows, of, plain) for rows, of in self._of_rows.items() if (plain := of.plain_seconds)]
        spent = sum(of.seconds_with + of.seconds_without for _, of, _ in pairs)
        return sum((of.steps + of.num_kept / rows) * plain for rows, of, plain in pairs) / spent


class TextDrafts:
    """The drafts of one text.

    Attributes: is_trial: whether drafts do not pay here, and the latest was made only to try
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
        """The drafts after the text's tokens so far, as many as pay. Raises: LLMCliError"""
        length = self._best_length(token_ids, most, least=least, cost=cost, is_free=is_free)
        if length > 0 or (length == 0 and is_free):
            self._guess(length)
        return self._latest[: max(length, 0)]

    def are_worth_waiting(
        self, token_ids: Sequence[int], most: int, *, least: int, cost: DraftCost, is_free: bool
    ) -> bool:
        """Whether these tokens would get drafts; then the next choice may get some too.

        Free guesses are made and judged, so that a text that runs ahead is noticed when it begins to repeat itself.
        Raises: LLMCliError
        """
        length = self._best_length(token_ids, most, least=least, cost=cost, is_free=is_free)
        if length >= 0 and is_free:
            self._guess(length)
        return length > 0

    def close(self) -> None:
        """The text has ended."""
        self._guesses.close()

    def _best_length(self, token_ids: Sequence[int], most: int, *, least: int, cost: DraftCost, is_free: bool) -> int:
        """How many drafts pay after these tokens; -1 if there are no guesses."""
        self._learn(token_ids[self._num_known :])
        kind = self._guesses.kind()
        if kind is None or most < 1:
            return -1
        self._kind = kind
        length = best_length(self._rates.rate(kind), cost, most, least)
        self.is_trial = length == 0 and self._num_since_trial >= _TOKENS_BETWEEN_TRIALS and not is_free
        return 1 if self.is_trial else length

    def _guess(self, length: int) -> None:
        """Guess `length` tokens; if 0, guess one only to judge it."""
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

    With `least` a step has that many drafts wherever there are guesses; without it drafts stop where they do not pay.
    An error of the source ends drafting and is passed to `on_problem`; the texts continue without drafts.
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
        self._has_trial = False  # in the step read next: its time does not count, as its guesses catch up first

    def begin(
        self, prompt: Sequence[int], sampler: Sampler, wrap: Callable[[Guesses], Guesses] = lambda guesses: guesses
    ) -> TextDrafts | None:
        """The drafts of a text, from the source's guesses as changed by `wrap`; None if it can have none."""
        try:
            return None if self._source is None else TextDrafts(wrap(self._source.begin(prompt, sampler)))
        except LLMCliError as error:
            self._stop(error)
            return None

    def drafts(self, text: TextDrafts, token_ids: Sequence[int], most: int, num_rows: int) -> tuple[int, ...]:
        """The drafts after the text's tokens so far, `most` at most, for a step of `num_rows` rows."""
        drafts = self._ask(text.drafts, token_ids, most, num_rows) or ()
        self._has_trial = self._has_trial or (bool(drafts) and text.is_trial)
        return drafts

    def are_worth_waiting(self, text: TextDrafts, token_ids: Sequence[int], most: int, num_rows: int) -> bool:
        """Whether a text waits for its queued choice, as it may then get drafts. See `TextDrafts`."""
        return bool(self._ask(text.are_worth_waiting, token_ids, most, num_rows))

    def _ask(self, ask: Callable[..., T], token_ids: Sequence[int], most: int, num_rows: int) -> T | None:
        most = min(most, MAX_STEP_TOKENS // num_rows - 1)
        times = self._times.get(num_rows)
        if self._source is None or most < 1 or times is None or not times.knows_plain:
            return None  # a text in a step of many rows learns its tokens once rows are fewer
        if not self._least and not times.is_measured:
            most = min(most, 1)  # to measure what a draft costs
        cost, is_free = times.cost, self._source.is_free
        try:
            return ask(token_ids, most, least=min(self._least, most), cost=cost, is_free=is_free)
        except LLMCliError as error:
            self._stop(error)
            return None

    def learn(self, num_rows: int, num_drafts: int, num_kept: int, seconds: float) -> None:
        """Learn how long a step took, with its drafts, and how many of them were kept."""
        if not self._has_trial:
            self._times.setdefault(num_rows, StepTimes(num_rows)).learn(num_drafts, seconds)
        self._has_trial = False
        self.usage.count(num_rows, num_drafts, num_kept, seconds)

    def _stop(self, error: LLMCliError) -> None:
        if self._source is not None:
            self._source = None
            self._on_problem(error)
