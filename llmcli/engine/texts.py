"""What a scheduler keeps of each text: whose it is, where its row is, what is on its way; and what has been done."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.engine.request import Request, ScoreRequest
from llmcli.engine.sample import Sample
from llmcli.runners.base import Logits, Runner, Step


@dataclass
class Usage:
    """What has been done so far. `row_steps` are the rows in use, added up over all steps."""

    num_rows: int
    steps: int = 0
    row_steps: int = 0
    most_rows: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_shared: int = 0
    preemptions: int = 0


@dataclass(eq=False)
class Shared:
    """The prompt that several samples begin with: a row that holds it, and its last logits, once they are known."""

    request: Request
    number: int
    num_waiting: int  # samples that have not begun
    row: int | None = None
    logits: Logits | None = None
    start_time: float = 0.0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0


@dataclass(eq=False)
class Text:
    """A sample and its row. `turn` counts its rows, so that a step of an earlier one is known."""

    order: int
    sample: Sample
    shared: Shared | None
    row: int | None = None
    turn: int = 0
    num_queued: int = 0  # tokens that queued steps choose, those that are known among them

    def __lt__(self, other: "Text | Score") -> bool:
        """Whether it was asked for earlier."""
        return self.order < other.order


@dataclass(eq=False)
class Score:
    """A text whose logits are wanted."""

    order: int
    request: ScoreRequest
    number: int
    row: int | None = None

    def __lt__(self, other: "Text | Score") -> bool:
        """Whether it was asked for earlier."""
        return self.order < other.order


@dataclass(frozen=True)
class Queued:
    """A step on its way, and the texts for which it chooses, by the place of their spans."""

    step: Step
    texts: Sequence[tuple[int, Text, int]]  # place, text, the text's turn
    last_tokens: Sequence[int]  # of each span, the place of its last token


def number_of(one: Text | Score | Shared) -> int:
    """Its request's."""
    return one.sample.number if isinstance(one, Text) else one.number


def open_row(runner: Runner, sample: Sample) -> int:
    """A row for a sample's prompt, the kept one if there is one. Raises: as `Runner.open`"""
    prompt, kept = sample.request.prompt_token_ids, sample.request.kept_row
    if kept is None:
        return runner.open(prompt, sample.sampler)
    if kept.row is None:
        kept.row = runner.open(prompt, sample.sampler)
    else:
        runner.change_prompt(kept.row, prompt, sample.sampler)
    return kept.row
