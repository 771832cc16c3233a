"""The scheduler's records: each text with its row, tokens, end and turn; and the usage so far."""

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from llmcli.engine.drafts import TextDrafts
from llmcli.engine.request import Failed, Finished, FinishReason, PromptScored, Request, Scored, ScoreRequest, Timings
from llmcli.errors import LLMCliError
from llmcli.runners.base import AllLogits, Logits, Runner, Step
from llmcli.runners.interrupts import interrupts_held_back
from llmcli.sampling.inspect import Inspection, inspect_choice, inspect_given
from llmcli.tokenizer.base import StreamDecoder, Tokenizer

# Stop strings, matched on decoded text, however the tokens cut it. No part of a match is shown.
#
# The matched text includes the strings of special tokens. Those are never shown.


class StopStrings:
    """Passes text through until one of the stop strings appears in it.

    Holds back text that may still become a stop string. If several match, the one that begins first counts.
    """

    def __init__(self, stop_strings: Sequence[str]):
        self._stop_strings = [stop for stop in stop_strings if stop]
        self._held = ""
        self._hidden: list[tuple[int, int]] = []  # the spans of special tokens in it

    @property
    def is_empty(self) -> bool:
        """Whether there are no stop strings, so that nothing is held back."""
        return not self._stop_strings

    def is_completed_by(self, special: str) -> bool:
        """Whether a special token's string completes a stop string that begins in the text held back."""
        return any(0 <= (self._held + special).find(stop) < len(self._held) for stop in self._stop_strings)

    def push(self, text: str, special: str = "") -> tuple[str, bool]:
        """Take new text, and the string of a special token after it.

        Return what is safe to show, and whether a stop string was found (nothing follows then).
        """
        if self.is_empty:
            return text, False
        self._held += text
        if special:
            self._hidden.append((len(self._held), len(self._held) + len(special)))
            self._held += special
        starts = [start for stop in self._stop_strings if (start := self._held.find(stop)) >= 0]
        if starts:
            shown, self._held, self._hidden = self._take(min(starts)), "", []
            return shown, True
        return self._take(len(self._held) - self._longest_open_suffix()), False

    def flush(self) -> str:
        """The text held back, at the end of the text."""
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        """Remove the first characters of the held text; return them without those of special tokens."""
        taken, self._held = self._held[:count], self._held[count:]
        if not self._hidden:
            return taken
        shown, position = "", 0
        for start, end in self._hidden:
            shown += taken[position:start]
            position = end
        self._hidden = [(max(start - count, 0), end - count) for start, end in self._hidden if end > count]
        return shown + taken[position:]

    def _longest_open_suffix(self) -> int:
        """Length of the longest suffix of the held text that begins a stop string."""
        longest = min(len(self._held), max((len(stop) - 1 for stop in self._stop_strings), default=0))
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop_strings):
                return length
        return 0


# `Sample`: one text under way: its tokens, the text that is certain so far, and its end.


class Sample:
    """A sample of a request, with the tokens given by the request. It knows nothing of rows and steps.

    Attributes: finish_reason: set by the token that ends the sample; max_tokens: the most tokens it can have;
    constrained_text: its state in its schema, None without one
    """

    def __init__(self, number: int, request: Request, index: int, tokenizer: Tokenizer, max_seq_len: int):
        """`number` is the request's, `index` the sample's."""
        room = max_seq_len - len(request.prompt_token_ids)
        limit = request.max_new_tokens
        self.number = number
        self.request = request
        self.index = index
        self.max_tokens = room if limit is None else min(limit, room)
        self.sampler = replace(
            request.sampler,
            sample_index=index,
            # A text with a schema ends only where the schema allows it.
            forced_eos_position=None if request.schema else len(request.prompt_token_ids) + self.max_tokens - 1,
        )
        self.constrained_text = None if request.schema is None else request.schema.begin(at_start=request.at_start)
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = "length" if limit == 0 else None
        self.start_time = 0.0  # of the request's prompt
        self.prefill_tokens = 0
        self.prefill_seconds = 0.0
        self._first_token_time = 0.0
        self._last_token_time = 0.0
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer, at_start=request.at_start, shown=request.shown_token_ids)
        self._stop_strings = StopStrings(request.stop_strings)
        for token_id in request.said:
            self.push(token_id, None)
        self._first_token_time = 0.0

    def push(self, token_id: int, mirostat_mu: float | None) -> str:
        """Take the next token; return the text that became certain. Set `finish_reason` if the sample is over."""
        self._last_token_time = time.perf_counter()
        self._first_token_time = self._first_token_time or self._last_token_time
        self.token_ids.append(token_id)
        if self.constrained_text is not None:
            self.constrained_text.push(token_id)
        if mirostat_mu is not None:
            self.sampler = replace(self.sampler, mirostat_mu=mirostat_mu)
        is_end = token_id in self.sampler.eos_token_ids
        text = "" if is_end else self._decoder.push(token_id)
        special = "" if text or self._stop_strings.is_empty else self._tokenizer.special_text(token_id)
        if is_end and not self._stop_strings.is_completed_by(special):
            self.finish_reason = "eos"
            return ""
        text, is_stopped = self._stop_strings.push(text, special)
        self.text += text
        if is_stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.max_tokens:
            self.finish_reason = "length" if self.max_tokens == self.request.max_new_tokens else "context"
        return text

    def fitting(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """The first drafts, as far as the text can take them."""
        return drafts if self.constrained_text is None else drafts[: self.constrained_text.num_fitting(drafts)]

    def inspection(self, logits: Logits) -> Callable[[int], Inspection] | None:
        """A function that inspects the choice made from these logits; None if the request wants no alternatives."""
        count = self.request.num_alternatives
        if count is None:
            return None
        history, sampler = [*self.request.prompt_token_ids, *self.token_ids], self.sampler
        mask = None if self.constrained_text is None else self.constrained_text.mask()
        return lambda token_id: inspect_choice(logits, history, sampler, token_id, count, mask)

    def finish(self, reason: FinishReason) -> Finished:
        """End the sample; flush held-back text: an unfinished character, or a possible start of a stop string.

        With a schema an unfinished character is dropped: the schema may not allow a replacement character.
        """
        self.finish_reason = reason
        tail = ""
        if reason != "stop":
            text, is_stopped = self._stop_strings.push(
                "" if self.constrained_text is not None else self._decoder.flush()
            )
            tail = text if is_stopped else text + self._stop_strings.flush()
            self.text += tail
        num_chosen = len(self.token_ids) - len(self.request.said)
        timings = Timings(
            prefill_tokens=self.prefill_tokens,
            prefill_seconds=self.prefill_seconds,
            time_to_first_token_seconds=self._first_token_time - self.start_time if num_chosen else 0.0,
            decode_tokens=max(num_chosen - 1, 0),
            decode_seconds=self._last_token_time - self._first_token_time,
        )
        is_complete = None
        if self.constrained_text is not None:
            is_complete = reason != "stop" and self.constrained_text.is_complete
        return Finished(self.index, tail, self.text, tuple(self.token_ids), reason, timings, self.number, is_complete)


# `FairOrder`: the order in which the texts of several clients get rows: weighted fair queueing.
#
# Texts are sorted by the time at which each would end if all clients shared the steps equally [Demers, Keshav and
# Shenker 1989, Analysis and simulation of a fair queueing algorithm]. So small requests do not wait for large ones, and
# every text gets its turn, since time passes for waiting texts too. The texts of one client keep their order.

_PROMPT_SHARE = 1 / 16  # the time of a prompt's token, in new tokens; a rough figure
_WORTH = 4  # a row changes hands for a text that needs this many times fewer tokens


class Order(NamedTuple):
    """A text's place in the order: by the time of its end, then by the time of its request."""

    end: float
    number: int


class FairOrder:
    """See above. Time is in new tokens of each client. A client is known while it has an open text."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[Hashable, float] = {}  # of each client's latest text
        self._num_open: Counter[Hashable] = Counter()
        self._numbers = count(1)

    def enter(self, client: Hashable, num_prompt_tokens: int, num_new_tokens: int) -> Order:
        """The place of a new text."""
        self._num_open[client] += 1
        begin = max(self._now, self._ends.get(client, 0.0))
        end = self._ends[client] = begin + num_prompt_tokens * _PROMPT_SHARE + num_new_tokens
        return Order(end, next(self._numbers))

    def leave(self, client: Hashable, num_unused: int) -> None:
        """Note that a text has ended; its unused new tokens go back to the client."""
        self._num_open[client] -= 1
        if self._num_open[client]:
            self._ends[client] -= num_unused
        else:
            del self._num_open[client], self._ends[client]

    def pass_time(self, num_tokens: int) -> None:
        """Count a step's new tokens, shared equally by all clients."""
        self._now += num_tokens / max(1, len(self._num_open))


def is_worth_a_row(num_wanted: int, num_left: int, rows_of_wanting: int, rows_of_holder: int) -> bool:
    """Whether a running text should give its row to another client's text that goes first.

    `num_wanted` and `num_left` are the new tokens that each still needs; the rows are those of each one's client.
    """
    return rows_of_wanting + 1 < rows_of_holder or num_wanted * _WORTH <= num_left


@dataclass
class Usage:
    """Counts of the work so far. `row_steps` adds up the rows in use over all steps."""

    num_rows: int
    steps: int = 0
    row_steps: int = 0
    most_rows: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_shared: int = 0
    preemptions: int = 0


@dataclass(eq=False)
class Shared:
    """The prompt that several samples share, with its row and its last logits, both None until it has them."""

    order: Order
    request: Request
    number: int
    num_waiting: int  # samples that have no token and no row yet
    row: int | None = None
    logits: Logits | None = None
    start_time: float = 0.0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0


class SharedPrompts:
    """Shared prompts whose row is open and complete."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self._prompts: list[Shared] = []

    def add(self, shared: Shared) -> None:
        """Add a shared prompt."""
        self._prompts.append(shared)

    def release_latest(self) -> bool:
        """Close the row of the latest prompt; it runs again when needed. False if there is none."""
        if not self._prompts:
            return False
        latest = self._prompts[-1]
        self.close(lambda shared: shared is latest)
        return True

    def close(self, is_over: Callable[[Shared], bool]) -> None:
        """Close the rows of prompts that are over."""
        for shared in [shared for shared in self._prompts if is_over(shared)]:
            assert shared.row is not None
            with interrupts_held_back():
                self._runner.close(shared.row)
                shared.row = None
                self._prompts.remove(shared)


@dataclass(eq=False)
class Text:
    """A sample and its row. `turn` counts changes of the row, to recognize steps that ran in an earlier one.

    `drafts` is made when the text can first have some. `has_unread_drafts`: the number of tokens that a queued step
    has chosen is not known yet.
    """

    order: Order
    sample: Sample
    shared: Shared | None
    row: int | None = None
    turn: int = 0
    num_queued: int = 0  # tokens chosen by queued steps and those read; a step with drafts counts as one
    drafts: TextDrafts | None = None
    has_unread_drafts: bool = False
    unread: deque[tuple[Step, int]] = field(default_factory=deque)  # queued steps that choose for it, with span index

    def take_queued(self, step: Step, place: int, *, has_drafts: bool = False) -> None:
        """Note a queued step that chooses for this text."""
        self.num_queued += 1
        self.has_unread_drafts = has_drafts
        self.unread.append((step, place))

    def read_ahead(self) -> tuple[int, ...] | None:
        """Wait for the queued steps that choose for this text; return the tokens, or None if a choice has failed.

        The steps stay queued; their events come later.
        """
        chosen = [step.choices()[place] for step, place in self.unread]
        tokens = [tuple(choice.token_id for choice in one) for one in chosen if isinstance(one, tuple)]
        return sum(tokens, ()) if len(tokens) == len(chosen) else None

    def __lt__(self, other: "Text | Score") -> bool:
        """Whether this text goes first."""
        return self.order < other.order

    def leave_row(self) -> None:
        """Forget the row and the steps queued in it."""
        self.row = None
        self.turn += 1
        self.has_unread_drafts = False
        self.unread.clear()
        if self.drafts is not None:
            self.drafts.close()
            self.drafts = None


@dataclass(eq=False)
class Score:
    """A text whose logits, or the views of its tokens, are requested."""

    order: Order
    request: ScoreRequest
    number: int
    row: int | None = None

    def told(self, first: int, logits: AllLogits) -> Scored | PromptScored | Failed:
        """The event for the logits that predict the tokens from token `first` on."""
        count = self.request.num_alternatives
        if count is None:
            return Scored(logits, self.number)
        token_ids = self.request.token_ids[first : first + len(logits)]
        try:
            views = [inspect_given(row, first + index, token_ids[index], count) for index, row in enumerate(logits)]
        except LLMCliError as error:
            return Failed(0, error, self.number)
        return PromptScored(first, tuple(views), self.number)

    def __lt__(self, other: "Text | Score") -> bool:
        """Whether this score goes first."""
        return self.order < other.order


@dataclass(frozen=True)
class Queued:
    """A queued step and the texts that it chooses for."""

    step: Step
    texts: Sequence[tuple[Text, int]]  # for each span that chooses: the text, and its turn
    last_tokens: Sequence[int]  # the place of each span's last token
    fills: Sequence[tuple[Step, int]]  # spans of prompts that rows waited for: their steps and tokens
    num_drafts: int = 0
    start_time: float | None = None  # before the drafts were made; None if its time shows nothing about drafts


def number_of(one: Text | Score | Shared) -> int:
    """The number of its request."""
    return one.sample.number if isinstance(one, Text) else one.number


def client_of(one: Text | Score | Shared) -> Hashable:
    """The client that asks for it."""
    return one.sample.request.client if isinstance(one, Text) else one.request.client


def open_row(runner: Runner, sample: Sample) -> int:
    """Open a row for a sample's prompt and tokens, or reuse the kept one. Raises: as `Runner.open`"""
    prompt, kept = sample.request.prompt_token_ids, sample.request.kept_row
    if kept is None:
        return runner.open(prompt, sample.sampler, sample.token_ids)
    if kept.row is None:
        kept.row = runner.open(prompt, sample.sampler)
    else:
        runner.change_prompt(kept.row, prompt, sample.sampler)
    return kept.row
