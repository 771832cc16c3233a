"""Answers while they are generated, one or several to a message: what they began with, and what has come since."""

from llmcli.engine.chat_events import OPENING, OfAnswer, Piece, ReasoningSplitter, TurnFinished, split_reasoning
from llmcli.engine.chat_fit import FittedPrompt
from llmcli.engine.conversation import UNFINISHED, Answer, Conversation
from llmcli.engine.events import Event, Finished, FinishReason, PrefillProgress, Token
from llmcli.engine.generation import Generation
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.chat_splice import num_agreeing_tokens
from llmcli.tokenizer.stream import decode


class RunningAnswer:
    """An answer while it is generated: what it began with, and what has come since."""

    def __init__(self, tokenizer: Tokenizer, generation: Generation, begun: Answer, starts_inside: bool):
        self.generation = generation
        self.begun = begun
        self.starts_inside = starts_inside
        self.splitter = ReasoningSplitter(starts_inside)
        self.splitter.push(begun.text)
        self.token_ids: list[int] = []
        self.new_text = ""
        self.prefill_tokens = 0
        self._tokenizer = tokenizer

    def push(self, token: Token) -> list[Piece]:
        """Take the next token; return what is certain."""
        self.token_ids.append(token.token_id)
        self.new_text += token.text
        return self.splitter.push(token.text)

    def finish(self, finished: Finished) -> tuple[list[Piece], TurnFinished]:
        """Take the end; return what was held back, and the answer."""
        answer = self.answer(finished.text, finished.token_ids, finished.finish_reason)
        is_cut = finished.finish_reason in UNFINISHED
        tail = finished.tail.removesuffix("\ufffd") if is_cut else finished.tail
        pieces = [*self.splitter.push(tail), *self.splitter.flush()]
        return pieces, TurnFinished(answer, finished.token_ids, finished.timings, finished.is_complete)

    def answer(self, new_text: str, token_ids: tuple[int, ...], reason: FinishReason) -> Answer:
        """The answer in all, if that is what has been generated.

        One that was cut off within a character ends before it: going on, the model writes it again.
        """
        all_ids = self.begun.token_ids + token_ids
        text = self.begun.text + new_text
        if reason in UNFINISHED:
            all_ids = _without_partial_character(self._tokenizer, all_ids)
            text = decode(self._tokenizer, all_ids, at_start=True)
        else:  # the end of the turn and a stop string are no part of the answer
            space = " " if self._tokenizer.strips_leading_space else ""
            count = max(num_agreeing_tokens(self._tokenizer, all_ids, start + text) for start in ("", space))
            all_ids = all_ids[:count]
        reasoning, content = split_reasoning(text, self.starts_inside)
        return Answer(text, content, reasoning, all_ids, reason, self.begun.sample)


class SeveralAnswers:
    """Answers to one message while they are generated, by sample index, and those that have ended."""

    def __init__(self, generation: Generation, conversation: Conversation, running: dict[int, RunningAnswer]):
        self.generation = generation
        self.conversation = conversation
        self.answers: dict[int, Answer] = {}
        self._running = running

    def take(self, event: Event) -> list[PrefillProgress | OfAnswer]:
        """What an event of the engine means here."""
        if isinstance(event, PrefillProgress):
            return [event]
        if not isinstance(event, Token | Finished):
            return []
        running, number = self._running[event.sample], list(self._running).index(event.sample) + 1
        if isinstance(event, Token):
            return [OfAnswer(number, piece) for piece in running.push(event)]
        pieces, ended = running.finish(event)
        self.answers[event.sample] = ended.answer
        return [*(OfAnswer(number, piece) for piece in pieces), OfAnswer(number, ended)]

    @property
    def in_order(self) -> tuple[Answer, ...]:
        """The answers that have ended, in the order of their samples."""
        return tuple(self.answers[sample] for sample in self._running if sample in self.answers)


def starts_inside(fitted: FittedPrompt) -> bool:
    """Whether the template has opened the reasoning already."""
    return fitted.prompt.text.rstrip().endswith(OPENING)


def _without_partial_character(tokenizer: Tokenizer, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Without the last tokens, if they begin a character that does not end."""
    for num_left in range(len(token_ids), max(len(token_ids) - 4, -1), -1):
        tail = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids[:num_left][-8:])
        if not _ends_within_character(tail):
            return token_ids[:num_left]
    return token_ids


def _ends_within_character(text: bytes) -> bool:
    """Whether the last bytes begin a UTF-8 character and lack its end."""
    for length in range(1, min(4, len(text)) + 1):
        byte = text[-length]
        if byte & 0xC0 != 0x80:  # no continuation byte
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return needed > length
    return False
