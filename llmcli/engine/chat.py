"""`Chat`: runs the turns of a conversation on a runner, and computes in each only what is new."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmcli.engine.chat_events import ChatEvent, TurnFinished, TurnStarted
from llmcli.engine.chat_fit import FittedPrompt, Overflow, build_prompt, fit_prompt
from llmcli.engine.conversation import UNFINISHED, Answer, Conversation
from llmcli.engine.events import Event, Finished, FinishReason, PrefillProgress, Timings, Token
from llmcli.engine.generation import Generation
from llmcli.engine.reasoning import OPENING, ReasoningSplitter, split_reasoning
from llmcli.engine.request import KeptRow, Request
from llmcli.errors import TokenizerError, UsageError
from llmcli.runners.base import Runner
from llmcli.sampling.sampler import Sampler
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.chat_splice import ChatPrompt, num_agreeing_tokens
from llmcli.tokenizer.chat_template import ChatTemplate
from llmcli.tokenizer.stream import decode

NUM_SAMPLES = 2**32  # what the counter of the draws has room for


@dataclass(frozen=True)
class ChatSettings:
    """What holds for the answers from now on.

    `sampler` has the parameters, the seed, and the tokens that end a turn; prompt length and sample index are set for
    each answer. Without `max_new_tokens` an answer may fill the context.
    """

    sampler: Sampler
    max_new_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    overflow: Overflow = "drop-oldest"


class _RunningAnswer:
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


class Chat:
    """A conversation on a runner, in a row that it keeps. Each of its verbs starts an answer and yields what happens.

    The conversation holds the answer as far as it has come at every moment. A Ctrl-C may strike anywhere; the caller
    then stops iterating and asks `interrupt()` for the end of the answer under way. A verb that raises leaves the
    conversation as it was.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        settings: ChatSettings,
        conversation: Conversation | None = None,
    ):
        self.runner = runner
        self.template = template
        self.settings = settings
        self._tokenizer = tokenizer
        self._conversation = conversation or Conversation()
        self._running: _RunningAnswer | None = None
        self._row = KeptRow()

    @property
    def conversation(self) -> Conversation:
        """All that was said, the answer under way included."""
        if self._running is None:
            return self._conversation
        running = self._running
        answer = running.answer(running.new_text, tuple(running.token_ids), "interrupted")
        return self._conversation.with_answer(answer)

    @conversation.setter
    def conversation(self, conversation: Conversation) -> None:
        self._conversation = conversation

    def prompt(self) -> ChatPrompt:
        """What the model would see if it were to answer now."""
        return build_prompt(self._tokenizer, self.template, self._conversation)

    def num_tokens(self) -> int:
        """How much of the context the conversation takes, the last answer included.

        Raises: TokenizerError if the template refuses the conversation.
        """
        if not self._conversation.turns:
            return 0
        answer = self._conversation.last.answer
        return len(self.prompt().token_ids) + (len(answer.token_ids) if answer else 0)

    def send(self, message: str) -> Iterator[ChatEvent]:
        """Answer a new message.

        Raises: UsageError if it does not fit; TokenizerError if the template refuses the conversation.
        """
        return self._answer(self._conversation.ask(message), sample=0)

    def edit(self, message: str) -> Iterator[ChatEvent]:
        """Put another message in the place of the last and answer it.

        Raises: UsageError if there is none, and as `send`.
        """
        return self._answer(self._conversation.without_last().ask(message), sample=0)

    def regenerate(self) -> Iterator[ChatEvent]:
        """Answer the last message again, with the next sample index.

        Raises: UsageError if there is none, and as `send`.
        """
        last = self._conversation.last.answer
        sample = (last.sample + 1) % NUM_SAMPLES if last else 0
        return self._answer(self._conversation.with_answer(None), sample)

    def continue_answer(self) -> Iterator[ChatEvent]:
        """Go on with an answer that was cut off: what comes is what would have come.

        Raises: UsageError if there is no such answer, and as `send`.
        """
        last = self._conversation.last.answer
        if last is not None and not last.is_unfinished:
            raise UsageError("the last answer is complete; send a message, or use /regen for another answer")
        conversation = self._conversation
        if last is not None and decode(self._tokenizer, last.token_ids, at_start=True) != last.text:
            # A file that was edited by hand: the text is what was meant.
            token_ids = self._tokenizer.encode(last.text, add_special_tokens=False, parse_special_tokens=False)
            conversation = conversation.with_answer(replace(last, token_ids=tuple(token_ids)))
        return self._answer(conversation, sample=last.sample if last else 0)

    def interrupt(self) -> list[ChatEvent]:
        """Close the answer under way, which stays in the conversation as far as it has come."""
        running = self._running
        if running is None:
            return []
        events = [seen for event in running.generation.interrupt() for seen in self._take(running, event)]
        if self._running is None:
            return events
        timings = Timings(running.prefill_tokens, 0.0, 0.0, 0, 0.0)
        text, token_ids = running.new_text, tuple(running.token_ids)
        return [*events, *self._finish(running, Finished(0, "", text, token_ids, "interrupted", timings))]

    def _answer(self, conversation: Conversation, sample: int) -> Iterator[ChatEvent]:
        settings, context = self.settings, self.runner.limits.max_seq_len
        fitted = fit_prompt(
            self._tokenizer,
            self.template,
            conversation,
            context=context,
            max_new_tokens=settings.max_new_tokens,
            overflow=settings.overflow,
        )
        if not fitted.token_ids:
            raise TokenizerError(
                f"{self.template.origin} gives an empty prompt for this message; choose another with --chat-template"
            )
        if (largest := max(fitted.token_ids)) >= (vocab_size := self.runner.config.vocab_size):
            raise UsageError(
                f"the tokenizer gave id {largest}, but the model has {vocab_size} embeddings; "
                "the tokenizer belongs to another model"
            )
        begun = conversation.last.answer or Answer("", "", None, (), "interrupted", sample)
        generation = Generation(self.runner, self._tokenizer, self._request(fitted, begun))
        starts_inside = fitted.prompt.text.rstrip().endswith(OPENING)
        started = self._started(fitted, conversation)
        self._conversation = fitted.conversation
        self._running = running = _RunningAnswer(self._tokenizer, generation, begun, starts_inside)
        yield started
        for event in generation.events():
            yield from self._take(running, event)

    def _request(self, fitted: FittedPrompt, begun: Answer) -> Request:
        settings = self.settings
        room = self.runner.limits.max_seq_len - len(fitted.token_ids)
        wanted = settings.max_new_tokens
        return Request(
            prompt_token_ids=fitted.token_ids,
            sampler=replace(settings.sampler, num_prompt_tokens=len(fitted.prompt.token_ids)),
            samples=(begun.sample,),
            # One more than there is room for: then the runner ends the answer, for the reason `context`.
            max_new_tokens=room + 1 if wanted is None else min(wanted, room + 1),
            stop_strings=(*settings.stop_strings, *self.template.stop_strings),
            at_start=not begun.token_ids,
            kept_row=self._row,
        )

    def _started(self, fitted: FittedPrompt, before: Conversation) -> TurnStarted:
        row = [] if self._row.row is None else list(self.runner.token_ids(self._row.row))
        num_kept = min(len(os.path.commonprefix([row, list(fitted.token_ids)])), len(fitted.token_ids) - 1)
        return TurnStarted(
            prompt_token_ids=fitted.token_ids,
            num_kept=num_kept,
            # Where all of the row stays, nothing is computed again; what was said last may not have been run at all.
            num_history_computed=max(0, fitted.prompt.num_history_tokens - num_kept) if num_kept < len(row) else 0,
            num_dropped=fitted.conversation.num_dropped - before.num_dropped,
            dropped_from=before.num_dropped + 1,
        )

    def _take(self, running: _RunningAnswer, event: Event) -> Iterator[ChatEvent]:
        if isinstance(event, PrefillProgress):
            running.prefill_tokens = event.num_computed
            yield event
        elif isinstance(event, Token):
            running.token_ids.append(event.token_id)
            running.new_text += event.text
            yield from running.splitter.push(event.text)
        elif isinstance(event, Finished):
            yield from self._finish(running, event)

    def _finish(self, running: _RunningAnswer, finished: Finished) -> Iterator[ChatEvent]:
        answer = running.answer(finished.text, finished.token_ids, finished.finish_reason)
        self._conversation, self._running = self._conversation.with_answer(answer), None
        is_cut = finished.finish_reason in UNFINISHED
        tail = finished.tail.removesuffix("\ufffd") if is_cut else finished.tail
        yield from running.splitter.push(tail)
        yield from running.splitter.flush()
        yield TurnFinished(answer, finished.token_ids, finished.timings)


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
