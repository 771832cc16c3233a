"""What a turn of a conversation reports while it runs, beside `PrefillProgress` and `Piece`."""

from dataclasses import dataclass

from llmcli.engine.conversation import Answer
from llmcli.engine.events import PrefillProgress, Timings
from llmcli.engine.reasoning import Piece


@dataclass(frozen=True)
class TurnStarted:
    """The prompt stands.

    `num_kept` of its ids were in the row already; `num_history_computed` tokens up to the end of the last answer are
    computed again. `num_dropped` turns have been dropped for this prompt, the first of them `dropped_from`, counted
    from 1.
    """

    prompt_token_ids: tuple[int, ...]
    num_kept: int
    num_history_computed: int
    num_dropped: int
    dropped_from: int


@dataclass(frozen=True)
class TurnFinished:
    """The answer has ended and is part of the conversation. `token_ids` are those sampled in this turn, all of them.

    `is_complete` says whether it is all that its schema asks for, None without a schema.
    """

    answer: Answer
    token_ids: tuple[int, ...]
    timings: Timings
    is_complete: bool | None = None


@dataclass(frozen=True)
class OfAnswer:
    """An event of one of several answers to a message, the first of which is number 1."""

    number: int
    event: Piece | TurnFinished


ChatEvent = TurnStarted | PrefillProgress | Piece | TurnFinished
SeveralEvent = TurnStarted | PrefillProgress | OfAnswer
