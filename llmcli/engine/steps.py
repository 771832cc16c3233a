"""What a step of the scheduler runs: spans of prompts and of texts, their masks and drafts, and the tokens chosen."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Generic, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcli.engine.drafts import MAX_DRAFT_ROWS, Drafting, Guesses, TextDrafts
from llmcli.engine.request import Event, Failed, Token
from llmcli.engine.texts import Queued, Sample, Score, Shared, Text
from llmcli.errors import LLMCliError
from llmcli.runners.base import BLOCK_TOKENS, MAX_SPAN, PAGE_TOKENS, Chosen, Logits, Masks, Runner, Span

if TYPE_CHECKING:
    from llmcli.schema.schema import ConstrainedText


# `Fill`: the tokens that must run in a row before it can choose.

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
        """Logits are read after token `first_read` and all later ones."""
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
        """The next span, of about `most` tokens at most. `masks` are those of the token chosen at its end."""
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
        """Whether all tokens will have run after this span."""
        return self.num_run + len(span.token_ids) == len(self.prompt) + len(self._said)

    @property
    def next_page(self) -> Sequence[int]:
        """The tokens of its prompt that fill the next page; fewer at the prompt's end."""
        return self.prompt[self.num_run : self.num_run + PAGE_TOKENS]

    def take(self, span: Span) -> bool:
        """Count a span as run. True if it came after the prompt."""
        is_said = self.num_run >= len(self.prompt)
        self.num_run += len(span.token_ids)
        return is_said


class FillBudget:
    """Decides how many tokens of prompts a step runs while rows wait. It learns from the times of earlier spans.

    It raises the number by one block: a quarter more tokens may take half as much time again. One block is the least:
    even a short span reads all weights, so fewer tokens take hardly less time.

    Attributes: num_tokens: the most tokens of a span, whole blocks
    """

    def __init__(self, most_seconds: float) -> None:
        """`most_seconds` is the time that prompts may take in a step. If infinite, steps are long from the start."""
        self._most_seconds = most_seconds
        self.num_tokens = MOST_FILL_TOKENS if math.isinf(most_seconds) else _FIRST_FILL_TOKENS
        self._latest: dict[int, tuple[int, float]] = {}  # by blocks: the latest span's tokens and seconds

    def seconds(self, num_tokens: int) -> float:
        """Estimate a span's time from the latest span of as many blocks. Without one, assume `most_seconds`."""
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
    """Blocks of a span; the last one may be partial."""
    return -(-num_tokens // BLOCK_TOKENS)


# `StepMasks`: the masks of a step's texts, made together when the first is asked for.

ReadAhead = Callable[[], Sequence[int] | None]  # waits for queued choices that the text has not taken yet


class StepMasks:
    """Masks for the spans of one step. Rows with a schema of their own need one each."""

    def __init__(self) -> None:
        self._wanted: list[tuple[ConstrainedText, ReadAhead, Sequence[int]]] = []
        self._made: Sequence[NDArray[np.uint32] | LLMCliError] = ()

    def of(self, sample: Sample, read_ahead: ReadAhead = tuple, drafts: Sequence[int] = ()) -> Masks | None:
        """What may come next, and after each fitting draft; None if every token may.

        `read_ahead` returns the tokens that the sample has not taken yet, None if a choice has failed.
        """
        if sample.constrained_text is None:
            return None
        self._wanted.append((sample.constrained_text, read_ahead, drafts))
        index = len(self._wanted) - 1
        return lambda: self._masks(index)

    def _masks(self, index: int) -> NDArray[np.uint32]:
        if not self._made:
            wanted = [(held, read_ahead(), drafts) for held, read_ahead, drafts in self._wanted]
            self._made = wanted[0][0].masks_of_all(wanted)
        made = self._made[index]
        if isinstance(made, LLMCliError):
            raise made
        return made


# Which prompts run together in one step.
#
# Prompts of several texts share passes over the weights, so one step runs as many as rows can wait for.

AnyFill = Fill[Text | Score | Shared]
FillSpan = tuple[AnyFill, Span]

_SCORED_TOKENS = 256  # tokens scored at a time if no row waits; their logits are in memory together
# A shorter span counts as this many tokens: cards multiply a short prompt apart from long ones.
_LEAST_TOKENS = 64


def prompt_spans(
    runner: Runner,
    budget: FillBudget,
    fills: Sequence[AnyFill],
    start_next: Callable[[Sequence[AnyFill]], AnyFill | None],
    *,
    is_alone: bool,
) -> list[FillSpan]:
    """The fills that run in the next step, each with its span. Only the last one may be cut.

    They come from `fills`, then from `start_next`, which takes the fills chosen so far and adds to `fills`. If no row
    runs, or if prompts share nothing on this runner, it is one fill.
    """
    joins = runner.limits.joins_prompts and not is_alone
    room = MOST_FILL_TOKENS if is_alone else budget.num_tokens
    together: list[FillSpan] = []
    while room >= _LEAST_TOKENS:
        fill = fills[len(together)] if len(together) < len(fills) else start_next([fill for fill, _ in together])
        if fill is None:
            break
        owner = fill.owner
        masks = StepMasks().of(owner.sample) if isinstance(owner, Text) else None
        most = room if not isinstance(owner, Score) else _SCORED_TOKENS if is_alone else _LEAST_TOKENS
        span = fill.next_span(runner, most, masks)
        if together and num_tokens([(fill, span)]) > room:
            break
        together.append((fill, span))
        room -= num_tokens([(fill, span)])
        if not (joins and fill.ends_with(span) and _shares_steps(owner)):
            break
    return together


def num_tokens(spans: Sequence[FillSpan]) -> int:
    """Tokens of all spans, as counted for a step's time."""
    return sum(max(len(span.token_ids), _LEAST_TOKENS) for _, span in spans)


def may_join(first: Text | Score, beside: Sequence[AnyFill]) -> bool:
    """Whether a waiting text or score may start in the same step as the fills `beside`.

    A prompt waits if it would reuse a page that these compute next. Only the tokens of that page are compared.
    """
    return _shares_steps(first) and not any(
        len(fill.next_page) == PAGE_TOKENS
        and first.sample.request.prompt_token_ids[fill.num_run : fill.num_run + PAGE_TOKENS] == tuple(fill.next_page)
        for fill in beside
    )


def _shares_steps(owner: Text | Score | Shared) -> TypeGuard[Text]:
    """Whether its logits are read only within the step: later another pass may overwrite them."""
    if not isinstance(owner, Text) or owner.sample.request.must_read_choices:
        return False
    return owner.shared is None or len(owner.sample.token_ids) > 0


# `ConstrainedGuesses`: where a schema leaves only one way to continue, its characters are the drafts.

_FORCED = -1  # the kind of these guesses; the model may write the same characters in other tokens


class ConstrainedGuesses:
    """The guesses for a text with a schema: what the schema forces, otherwise those of another source."""

    def __init__(self, guesses: Guesses, constrained_text: "ConstrainedText"):
        self._guesses = guesses
        self._constrained_text = constrained_text
        self._forced: tuple[int, ...] = ()

    def extend(self, token_ids: Sequence[int]) -> None:
        """See `Guesses.extend`."""
        self._guesses.extend(token_ids)

    def kind(self) -> int | None:
        """See `Guesses.kind`."""
        self._forced = self._constrained_text.forced_tokens()
        return _FORCED if self._forced else self._guesses.kind()

    def guess(self, count: int) -> tuple[int, ...]:
        """See `Guesses.guess`."""
        return self._forced[:count] if self._forced else self._guesses.guess(count)

    def close(self) -> None:
        """See `Guesses.close`."""
        self._guesses.close()


# A text's part of a step: its span with drafts, and then the tokens chosen.


def next_spans(runner: Runner, texts: Sequence[Text], drafting: Drafting | None) -> list[Span]:
    """The spans that choose the next token of each text, in one step."""
    masks = StepMasks()
    drafting = drafting if len(texts) <= MAX_DRAFT_ROWS else None
    return [_next_span(runner, text, drafting, len(texts), masks) for text in texts]


def _next_span(runner: Runner, text: Text, drafting: Drafting | None, num_rows: int, masks: StepMasks) -> Span:
    assert text.row is not None
    sample = text.sample
    logits: Logits | None = None
    drafts: tuple[int, ...] = ()
    is_read = 0 < text.num_queued <= len(sample.token_ids)
    if text.num_queued == 0 and text.shared is not None:
        logits = text.shared.logits
    elif is_read and drafting is not None:
        drafts = sample.fitting(_drafts(runner, text, text.row, drafting, num_rows))
    if sample.constrained_text is None:
        return Span(text.row, (), "last", logits, drafts)
    return Span(text.row, (), "last", logits, drafts, masks.of(sample, text.read_ahead, drafts))


def wait_for_choices(runner: Runner, texts: Sequence[Text], drafting: Drafting | None) -> bool:
    """Whether to read queued steps before the next is queued, as drafts may follow their choices.

    True once a text repeats itself. All texts wait for it: otherwise it would run only every other step.
    """
    if drafting is None:
        return False
    if len(texts) > MAX_DRAFT_ROWS:
        return any(one.has_unread_drafts for one in texts)
    waiting = [one.has_unread_drafts or _repeats_itself(runner, one, drafting, len(texts)) for one in texts]
    return any(waiting)


def _repeats_itself(runner: Runner, text: Text, drafting: Drafting, num_rows: int) -> bool:
    """Whether the tokens read so far would get drafts; the next one is chosen already and not read."""
    sample = text.sample
    if len(sample.token_ids) >= text.num_queued:
        return False
    drafts = _text_drafts(text, drafting)  # before the first token: indexes the prompt while it runs
    most = min(runner.limits.max_drafts, sample.max_tokens - text.num_queued - 1)
    return (
        drafts is not None
        and len(sample.token_ids) > 0
        and drafting.are_worth_waiting(drafts, sample.token_ids, most, num_rows)
    )


def _drafts(runner: Runner, text: Text, row: int, drafting: Drafting, num_rows: int) -> tuple[int, ...]:
    """Guesses of the next tokens, if they can be used. They take no page from another text."""
    sample = text.sample
    most = min(runner.limits.max_drafts, sample.max_tokens - len(sample.token_ids) - 1)
    if most < 1:
        return ()
    text_drafts = _text_drafts(text, drafting)
    if text_drafts is None:
        return ()
    drafts = drafting.drafts(text_drafts, sample.token_ids, most, num_rows)
    drafts = tuple(takewhile(lambda token_id: token_id < runner.config.vocab_size, drafts))
    return drafts if runner.reserve(row, runner.num_tokens(row) + 1 + len(drafts)) else ()


def _text_drafts(text: Text, drafting: Drafting) -> TextDrafts | None:
    if text.drafts is None:
        constrained_text, sampler = text.sample.constrained_text, text.sample.sampler
        prompt = text.sample.request.prompt_token_ids
        if constrained_text is None:
            text.drafts = drafting.begin(prompt, sampler)
        else:
            text.drafts = drafting.begin(prompt, sampler, lambda guesses: ConstrainedGuesses(guesses, constrained_text))
    return text.drafts


def take_choices(runner: Runner, text: Text, chosen: Chosen, queued: Queued, place: int) -> list[Event]:
    """Pass a step's choices to their text; its `finish_reason` says whether it has ended.

    What drafts chose after the text's end is removed from the row, which then holds the same as without drafts.
    """
    sample = text.sample
    text.has_unread_drafts = False
    text.unread.popleft()
    if isinstance(chosen, LLMCliError):
        return [Failed(sample.index, chosen, sample.number)]
    if not sample.token_ids and not sample.prefill_seconds:
        sample.prefill_seconds = time.perf_counter() - sample.start_time
    logits = None
    if sample.request.num_alternatives is not None:
        logits = queued.step.logits(place, queued.last_tokens[place])
    text.num_queued += len(chosen) - 1
    events: list[Event] = []
    for number, (token_id, _, mirostat_mu) in enumerate(chosen):
        inspect = None if logits is None else sample.inspection(logits[number])
        inspection = inspect(token_id) if inspect else None
        new_text = sample.push(token_id, mirostat_mu)
        events.append(Token(sample.index, token_id, new_text, inspection, sample.number))
        if sample.finish_reason is not None:
            if number + 1 < len(chosen) and text.row is not None:
                runner.keep(text.row, len(sample.request.prompt_token_ids) + len(sample.token_ids) - 1)
            break
    return events


def learn_drafts(drafting: Drafting, queued: Queued, chosen: list[Chosen]) -> None:
    """Report the time of the step just read, and how many drafts it kept.

    A step queued ahead began when the one before it was read, or slightly earlier.
    """
    now = time.perf_counter()
    if queued.start_time is not None:
        num_kept = sum(len(one) - 1 for one in chosen if isinstance(one, tuple))
        drafting.learn(len(chosen), queued.num_drafts, num_kept, now - max(queued.start_time, drafting.read_time))
    drafting.read_time = now
