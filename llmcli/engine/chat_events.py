"""Events of a turn of a conversation while it runs, with reasoning and answer kept apart."""

from dataclasses import dataclass
from typing import Literal

from llmcli.engine.conversation import Answer
from llmcli.engine.request import PrefillProgress, Timings
from llmcli.tool_calls import CallArguments, CallBegun, CallReader, Said

# Separates a model's reasoning, between `<think>` and `</think>`, from its answer.

OPENING, CLOSING = "<think>", "</think>"

Part = Literal["reasoning", "answer", "call"]
Start = Literal["undecided", "reasoning", "answer"]  # what a text begins with; it decides itself only if undecided


@dataclass(frozen=True)
class AnswerPiece:
    """A piece of what the model says, and the part it belongs to."""

    part: Part
    text: str


def start_after(prompt: str) -> Start:
    """How the answer to a prompt begins: with reasoning if the template has opened it at the prompt's end."""
    return "reasoning" if prompt.rstrip().endswith(OPENING) else "undecided"


def split_reasoning(text: str, start: Start) -> tuple[str | None, str]:
    """The reasoning, or None, and the answer, which is the end of the text: all of it if there is no reasoning.

    White space around the reasoning belongs to neither.
    """
    rest = text.lstrip()
    if start != "answer" and rest.startswith(OPENING):
        rest = rest.removeprefix(OPENING)
    elif start != "reasoning":
        return None, text
    reasoning, closing, answer = rest.partition(CLOSING)
    return reasoning.strip(), answer.lstrip() if closing else ""


class ReasoningSplitter:
    """`split_reasoning` for text as it comes; holds back what could still become a tag."""

    def __init__(self, start: Start):
        self._state: Start | Literal["after"] = start
        self._held = ""
        self._is_at_start = True  # of the reasoning
        self._may_open = start == "reasoning"  # the model may write the opening tag even if the prompt has one

    @property
    def is_inside(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        return self._state == "reasoning"

    @property
    def is_answer(self) -> bool:
        """Whether all further text is the answer, and none is held back."""
        return self._state == "answer"

    def push(self, text: str) -> list[AnswerPiece]:
        """Take new text; return the pieces that are certain."""
        self._held += text
        pieces: list[AnswerPiece] = []
        if self._state == "undecided":
            start = self._held.lstrip()
            if start.startswith(OPENING):
                self._held = start.removeprefix(OPENING)
                self._state = "reasoning"
            elif not OPENING.startswith(start):
                self._state = "answer"
        if self._state == "reasoning":
            pieces += self._take_reasoning()
        if self._state == "after":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "answer"
        if self._state == "answer" and self._held:
            pieces.append(AnswerPiece("answer", self._take(len(self._held))))
        return pieces

    def flush(self) -> list[AnswerPiece]:
        """The pieces held back, at the end of the text."""
        if not self._held or self._state == "after":
            return []
        part: Part = "reasoning" if self._state == "reasoning" else "answer"
        return [AnswerPiece(part, self._take(len(self._held)))]

    def _take_reasoning(self) -> list[AnswerPiece]:
        if self._is_at_start:
            self._held = self._held.lstrip()
            if self._may_open and OPENING.startswith(self._held) and self._held != OPENING:
                return []
            if self._may_open:
                self._held, self._may_open = self._held.removeprefix(OPENING).lstrip(), False
            self._is_at_start = not self._held
        end = self._held.find(CLOSING)
        if end >= 0:
            reasoning = self._take(end).rstrip()
            self._held = self._held.removeprefix(CLOSING)
            self._state = "after"
        else:
            # Hold what may begin the closing tag, with the white space before it, which is not shown if the tag comes.
            lengths = range(min(len(CLOSING) - 1, len(self._held)), 0, -1)
            num_open = next((length for length in lengths if CLOSING.startswith(self._held[-length:])), 0)
            reasoning = self._take(len(self._held[: len(self._held) - num_open].rstrip()))
        return [AnswerPiece("reasoning", reasoning)] if reasoning else []

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


class AnswerSplitter:
    """A `ReasoningSplitter` that also keeps tool calls apart from the answer, as lines such as `f({"a": 1})`."""

    def __init__(self, start: Start, reader: CallReader | None):
        self._reasoning = ReasoningSplitter(start)
        self._reader = reader
        self._before = ""  # what comes before a call: the end of a line
        self._is_open = False  # a call has no end yet

    def push(self, text: str) -> list[AnswerPiece]:
        """Take new text; return the pieces that are certain."""
        return [piece for one in self._reasoning.push(text) for piece in self._pieces(one)]

    def flush(self) -> list[AnswerPiece]:
        """The pieces held back, at the end of the text."""
        pieces = [piece for one in self._reasoning.flush() for piece in self._pieces(one)]
        if self._reader is None:
            return pieces
        pieces += [piece for said in self._reader.flush() for piece in self._said(said)]
        return [*pieces, AnswerPiece("call", ")")] if self._is_open else pieces

    def _pieces(self, piece: AnswerPiece) -> list[AnswerPiece]:
        if self._reader is None or piece.part == "reasoning":
            return [piece]
        return [piece for said in self._reader.push(piece.text) for piece in self._said(said)]

    def _said(self, said: Said) -> list[AnswerPiece]:
        if isinstance(said, CallArguments):
            return [AnswerPiece("call", said.text)]
        end, self._is_open = ")" * self._is_open, isinstance(said, CallBegun)
        ended = [AnswerPiece("call", f"{end}{self._before}")] if end or self._is_open and self._before else []
        self._before = "\n"
        if isinstance(said, CallBegun):
            return [*ended, AnswerPiece("call", f"{said.name}(")]
        return [*ended, AnswerPiece("answer", said.text)]


@dataclass(frozen=True)
class TurnStarted:
    """The prompt is ready.

    `num_kept` of its ids were in the row already; `num_history_computed` tokens up to the end of the last answer are
    computed again. `num_dropped` turns were dropped for this prompt; the first is number `dropped_from`, from 1.
    """

    prompt_token_ids: tuple[int, ...]
    num_kept: int
    num_history_computed: int
    num_dropped: int
    dropped_from: int


@dataclass(frozen=True)
class TurnFinished:
    """The answer has ended and is in the conversation. `token_ids` are all that were sampled in this turn.

    `is_complete` says whether its schema allows it to end here; None without a schema.
    """

    answer: Answer
    token_ids: tuple[int, ...]
    timings: Timings
    is_complete: bool | None = None


@dataclass(frozen=True)
class OfAnswer:
    """An event of one of several answers to a message, numbered from 1."""

    number: int
    event: AnswerPiece | TurnFinished


ChatEvent = TurnStarted | PrefillProgress | AnswerPiece | TurnFinished
SeveralEvent = TurnStarted | PrefillProgress | OfAnswer
