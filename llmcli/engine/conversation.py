"""A conversation as a value: what was said, and the ids of what the model said. It knows no model and no file."""

from dataclasses import dataclass, replace
from typing import Any

from llmcli.engine.events import FinishReason
from llmcli.errors import UsageError

# The reasons for which an answer may go on: the model had not ended it.
UNFINISHED: tuple[FinishReason, ...] = ("length", "context", "interrupted")


@dataclass(frozen=True)
class Answer:
    """What the model said in one turn.

    `text` is all it generated but the end of the turn; `content` is the answer, an end of that text, and `reasoning`
    what came before it, None if the model did not reason. `token_ids` stand for `text`. `sample` is the sample index
    it was drawn with.
    """

    text: str
    content: str
    reasoning: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    sample: int

    @property
    def is_unfinished(self) -> bool:
        """Whether it may go on."""
        return self.finish_reason in UNFINISHED


@dataclass(frozen=True)
class Turn:
    """A message of the user and the answer to it, None while there is none."""

    user: str
    answer: Answer | None = None


@dataclass(frozen=True)
class Conversation:
    """A system prompt and turns. The model no longer sees the first `num_dropped` turns; people still do."""

    system: str | None = None
    turns: tuple[Turn, ...] = ()
    num_dropped: int = 0

    @property
    def seen_turns(self) -> tuple[Turn, ...]:
        """The turns that the model sees."""
        return self.turns[self.num_dropped :]

    @property
    def last(self) -> Turn:
        """The last turn.

        Raises: UsageError if there is none.
        """
        if not self.turns:
            raise UsageError("no turn yet; send a message first")
        return self.turns[-1]

    def ask(self, message: str) -> "Conversation":
        """A new turn without an answer."""
        return replace(self, turns=(*self.turns, Turn(message)))

    def with_answer(self, answer: Answer | None) -> "Conversation":
        """Another answer to the last message, or none.

        Raises: UsageError if there is no turn.
        """
        return replace(self, turns=(*self.turns[:-1], replace(self.last, answer=answer)))

    def without_last(self) -> "Conversation":
        """Without the last turn.

        Raises: UsageError if there is none.
        """
        if not self.turns:
            raise UsageError("no turn to remove")
        turns = self.turns[:-1]
        return replace(self, turns=turns, num_dropped=min(self.num_dropped, len(turns)))

    def messages(self) -> list[dict[str, Any]]:
        """What the model sees, as chat templates take it; a last turn without an answer ends in the user's message."""
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for turn in self.seen_turns:
            messages.append({"role": "user", "content": turn.user})
            if turn.answer is not None:
                message = {"role": "assistant", "content": turn.answer.content}
                if turn.answer.reasoning is not None:
                    message["reasoning_content"] = turn.answer.reasoning
                messages.append(message)
        return messages
