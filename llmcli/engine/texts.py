"""The scheduler's records: each text with its row, queued steps, and the usage so far."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from llmcli.engine.drafts import TextDrafts
from llmcli.engine.events import Failed, PromptScored, Scored
from llmcli.engine.fair_order import Order
from llmcli.engine.request import Request, ScoreRequest
from llmcli.engine.sample import Sample
from llmcli.errors import LLMCliError
from llmcli.runners.base import AllLogits, Logits, Runner, Step
from llmcli.runners.interrupts import interrupts_held_back
from llmcli.sampling.inspect import inspect_given


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
    """The prompt that several samples share: its row, and its last logits, both None until it has them."""

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
        """Add one."""
        self._prompts.append(shared)

    def release_latest(self) -> bool:
        """Close the row of the latest one; it runs again when needed. False if there is none."""
        if not self._prompts:
            return False
        latest = self._prompts[-1]
        self.close(lambda shared: shared is latest)
        return True

    def close(self, is_over: Callable[[Shared], bool]) -> None:
        """Close the rows of those that are over."""
        for shared in [shared for shared in self._prompts if is_over(shared)]:
            assert shared.row is not None
            with interrupts_held_back():
                self._runner.close(shared.row)
                shared.row = None
                self._prompts.remove(shared)


@dataclass(eq=False)
class Text:
    """A sample and its row. `turn` counts changes of the row, to tell steps that ran in an earlier one.

    `drafts` are there from the first time on that it can have some. `has_unread_drafts` while nobody knows how many
    tokens a queued step has chosen.
    """

    order: Order
    sample: Sample
    shared: Shared | None
    row: int | None = None
    turn: int = 0
    num_queued: int = 0  # tokens chosen by queued steps, with those that have been read; a step with drafts counts one
    drafts: TextDrafts | None = None
    has_unread_drafts: bool = False
    unread: deque[tuple[Step, int]] = field(default_factory=deque)  # queued steps with its choices, each span's place

    def take_queued(self, step: Step, place: int, *, has_drafts: bool = False) -> None:
        """Note a queued step that chooses for it."""
        self.num_queued += 1
        self.has_unread_drafts = has_drafts
        self.unread.append((step, place))

    def read_ahead(self) -> tuple[int, ...] | None:
        """Wait for the queued steps that choose for it, and return the tokens; None if a choice has failed.

        The steps stay queued, and are told later.
        """
        chosen = [step.choices()[place] for step, place in self.unread]
        tokens = [tuple(choice.token_id for choice in one) for one in chosen if isinstance(one, tuple)]
        return sum(tokens, ()) if len(tokens) == len(chosen) else None

    def __lt__(self, other: "Text | Score") -> bool:
        """Whether it goes first."""
        return self.order < other.order

    def leave_row(self) -> None:
        """Forget the row, and the steps queued in it."""
        self.row = None
        self.turn += 1
        self.has_unread_drafts = False
        self.unread.clear()
        if self.drafts is not None:
            self.drafts.close()
            self.drafts = None


@dataclass(eq=False)
class Score:
    """A text whose logits are requested, or views of its tokens."""

    order: Order
    request: ScoreRequest
    number: int
    row: int | None = None

    def told(self, first: int, logits: AllLogits) -> Scored | PromptScored | Failed:
        """What is told of the logits that predict the tokens from token `first` on."""
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
        """Whether it goes first."""
        return self.order < other.order


@dataclass(frozen=True)
class Queued:
    """A queued step, and the texts that it chooses for."""

    step: Step
    texts: Sequence[tuple[Text, int]]  # of each span that chooses: the text, and its turn
    last_tokens: Sequence[int]  # the place of each span's last token
    fills: Sequence[tuple[Step, int]]  # spans of prompts that rows have waited for: each one's step and tokens
    num_drafts: int = 0
    start_time: float | None = None  # before the drafts were made; None for a step whose time says nothing of drafts


def number_of(one: Text | Score | Shared) -> int:
    """The number of its request."""
    return one.sample.number if isinstance(one, Text) else one.number


def client_of(one: Text | Score | Shared) -> Hashable:
    """Who asks for it."""
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
