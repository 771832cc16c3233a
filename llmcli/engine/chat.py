"""`Chat`: runs the turns of a conversation on a runner, and computes in each only what is new."""

import codecs
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from llmcli.differences import first_difference
from llmcli.engine import chat_events as events
from llmcli.engine.conversation import UNFINISHED, Answer, Conversation
from llmcli.engine.drafts import Drafting
from llmcli.engine.request import Event, Finished, FinishReason, KeptRow, PrefillProgress, Request, Timings, Token
from llmcli.engine.scheduler import Generation, scores
from llmcli.errors import TokenizerError, UsageError
from llmcli.runners.base import Runner
from llmcli.runners.interrupts import interrupts_held_back
from llmcli.sampling.chain import log_probabilities
from llmcli.sampling.inspect import TokenLogprob, likeliest_tokens
from llmcli.sampling.params import Sampler
from llmcli.tokenizer.base import Tokenizer, decode
from llmcli.tokenizer.chat_encoding import ChatPrompt, ChatTemplate, Generated, encode_history, num_agreeing_tokens
from llmcli.tokenizer.tool_offer import Offer
from llmcli.tool_calls import openai_call, split_calls

if TYPE_CHECKING:
    from llmcli.schema.schema import Schema


# The prompt of a conversation, and what is dropped when it no longer fits into the context.

Overflow = Literal["stop", "drop-oldest"]

# When less than an eighth of the context is left for the answer, turns are dropped until a quarter is left. All that
# follows a dropped turn is computed again, which should not happen at every turn.
MIN_FREE, FREE_AFTER_DROP = 1 / 8, 1 / 4


@dataclass(frozen=True)
class FittedPrompt:
    """The prompt for the last turn's answer, with the tokens already generated, and the turns that it was made of."""

    prompt: ChatPrompt
    token_ids: tuple[int, ...]  # the prompt's, and those of an answer to continue
    conversation: Conversation

    @property
    def start(self) -> events.Start:
        """How the answer begins."""
        return events.start_after(self.prompt.text)


def build_prompt(tokenizer: Tokenizer, template: ChatTemplate, conversation: Conversation) -> ChatPrompt:
    """The prompt for the next answer, without an answer that the last turn already has.

    Raises: TokenizerError if the template refuses the conversation, UsageError for text that is not valid Unicode.
    """
    if conversation.turns:
        conversation = conversation.with_answer(None)
    messages = conversation.messages()
    answers = [turn.answer for turn in conversation.seen_turns if turn.answer is not None]
    places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    generated = {index: Generated(answer.text, answer.token_ids) for index, answer in zip(places, answers, strict=True)}
    return encode_history(tokenizer, template, messages, generated)


def fit_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    conversation: Conversation,
    *,
    context: int,
    max_new_tokens: int | None,
    overflow: Overflow,
) -> FittedPrompt:
    """The prompt, cut to leave room for an answer; `drop-oldest` drops as few turns as possible.

    Continuing an answer needs more room than what was said. So once no further token fits, turns are dropped with
    `stop` too.

    Raises: UsageError if it does not fit; TokenizerError if the template refuses the conversation.
    """

    def fit_without(num_dropped: int) -> FittedPrompt:
        shorter = replace(conversation, num_dropped=num_dropped)
        return _join(build_prompt(tokenizer, template, shorter), shorter)

    fitted = fit_without(conversation.num_dropped)
    wanted = context if max_new_tokens is None else max_new_tokens
    needed = min(wanted, _part(context, MIN_FREE)) if overflow == "drop-oldest" else 1
    may_drop = overflow == "drop-oldest" or conversation.last.answer is not None
    if may_drop and len(fitted.token_ids) + needed > context:
        free = min(wanted, _part(context, FREE_AFTER_DROP))
        if counts := conversation.droppable:
            # Bisect: each try renders and encodes a whole prompt, and fewer turns make a shorter one.
            index = bisect_left(counts[:-1], True, key=lambda num: len(fit_without(num).token_ids) + free <= context)
            fitted = fit_without(counts[index])
    if (num_tokens := len(fitted.token_ids)) < context:
        return fitted
    if len(fitted.conversation.seen_turns) > 1:
        raise UsageError(
            f"the conversation has {num_tokens} tokens; the context holds {context}; remove turns with /undo, start "
            "over with /reset, or use --overflow drop-oldest or, if the model allows it, a larger --context"
        )
    raise UsageError(
        f"the message has {num_tokens} tokens with system prompt and chat template; the context holds {context}, with "
        "the answer; use a shorter message or system prompt or, if the model allows it, a larger --context"
    )


def _part(context: int, share: float) -> int:
    return max(1, int(context * share))


def _join(prompt: ChatPrompt, conversation: Conversation) -> FittedPrompt:
    said = conversation.last.answer
    return FittedPrompt(prompt, prompt.token_ids + (said.token_ids if said else ()), conversation)


# Answers under way, one or several to a message: what was there at the start, and what has come since.


class RunningAnswer:
    """An answer under way: what was there at the start, and what has come since."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        generation: Generation,
        begun: Answer,
        fitted: FittedPrompt,
        settings: "ChatSettings",
    ):
        self.generation = generation
        self.begun = begun
        self.offer = settings.tools.offer if settings.tools else None
        self.start = fitted.start
        self.origin = fitted.prompt.token_ids, settings.sampler.seed, begun.sample
        self.splitter = events.AnswerSplitter(fitted.start, self.offer.reader() if self.offer else None)
        self.splitter.push(begun.text)
        self.token_ids: list[int] = []
        self.new_text = ""
        self.prefill_tokens = 0
        self._tokenizer = tokenizer

    def push(self, token: Token) -> list[events.AnswerPiece]:
        """Take the next token; return what is certain."""
        self.token_ids.append(token.token_id)
        self.new_text += token.text
        return self.splitter.push(token.text)

    def finish(self, finished: Finished) -> tuple[list[events.AnswerPiece], events.TurnFinished]:
        """Take the end; return what was held back, and the answer."""
        answer = self.answer(finished.text, finished.token_ids, finished.finish_reason)
        is_cut = finished.finish_reason in UNFINISHED
        tail = finished.tail.removesuffix("\ufffd") if is_cut else finished.tail
        pieces = [*self.splitter.push(tail), *self.splitter.flush()]
        return pieces, events.TurnFinished(answer, finished.token_ids, finished.timings, finished.is_complete)

    def answer(self, new_text: str, token_ids: tuple[int, ...], reason: FinishReason) -> Answer:
        """The whole answer, if this has been generated.

        An answer cut off within a character ends before it: the model writes it again when it continues.
        """
        all_ids = self.begun.token_ids + token_ids
        text = self.begun.text + new_text
        if reason in UNFINISHED:
            all_ids = _without_partial_character(self._tokenizer, all_ids)
            text = decode(self._tokenizer, all_ids, at_start=True)
        else:  # the end of the turn and a stop string are not part of the answer
            space = " " if self._tokenizer.strips_leading_space else ""
            count = max(num_agreeing_tokens(self._tokenizer, all_ids, start + text) for start in ("", space))
            all_ids = all_ids[:count]
        reasoning, content = events.split_reasoning(text, self.start)
        calls: list[dict[str, Any]] = []
        if self.offer is not None and reason not in UNFINISHED:
            content, found = split_calls(self.offer.reader(), content)
            calls = [openai_call(call, (*self.origin, number)) for number, call in enumerate(found)]
        return Answer(text, content, reasoning, all_ids, reason, self.begun.sample, tuple(calls))


class SeveralAnswers:
    """Answers to one message by sample index: those under way, and those that have ended."""

    def __init__(self, generation: Generation, conversation: Conversation, running: dict[int, RunningAnswer]):
        self.generation = generation
        self.conversation = conversation
        self.answers: dict[int, Answer] = {}
        self._running = running

    def take(self, event: Event) -> list[PrefillProgress | events.OfAnswer]:
        """Turn an event of the engine into events of the answers."""
        if isinstance(event, PrefillProgress):
            return [event]
        if not isinstance(event, Token | Finished):
            return []
        running, number = self._running[event.sample], list(self._running).index(event.sample) + 1
        if isinstance(event, Token):
            return [events.OfAnswer(number, piece) for piece in running.push(event)]
        pieces, ended = running.finish(event)
        self.answers[event.sample] = ended.answer
        return [*(events.OfAnswer(number, piece) for piece in pieces), events.OfAnswer(number, ended)]

    @property
    def in_order(self) -> tuple[Answer, ...]:
        """The answers that have ended, in the order of their samples."""
        return tuple(self.answers[sample] for sample in self._running if sample in self.answers)


def _without_partial_character(tokenizer: Tokenizer, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Drop the last tokens if they begin a character that does not end."""
    for num_left in range(len(token_ids), max(len(token_ids) - 4, -1), -1):
        tail = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids[:num_left][-8:])
        if not _ends_within_character(tail):
            return token_ids[:num_left]
    return token_ids


def _ends_within_character(text: bytes) -> bool:
    """Whether the last bytes begin a UTF-8 character and do not end it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(text)
    return bool(decoder.getstate()[0])


NUM_SAMPLES = 2**32  # the range of the counter of the draws


@dataclass(frozen=True)
class ChatTools:
    """The tools of a conversation, the special tokens of their calls, and what holds an answer with such a start."""

    offer: Offer
    token_ids: frozenset[int]
    schema_of: Callable[[events.Start], "Schema"]


@dataclass(frozen=True)
class ChatSettings:
    """Settings of the answers from now on.

    `sampler` has the parameters, the seed, and the tokens that end a turn; prompt length and sample index are set for
    each answer. Without `max_new_tokens` an answer may fill the context. With `schema` every answer must match it.
    Answers may call the `tools`.
    """

    sampler: Sampler
    max_new_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    overflow: Overflow = "drop-oldest"
    schema: "Schema | None" = None
    tools: ChatTools | None = None


class Chat:
    """A conversation on a runner, in a row that it keeps. Each verb starts an answer and yields events.

    The conversation always holds the answer so far. A Ctrl-C may come at any point: the caller then stops iterating,
    and calls `interrupt()` to end the answer under way. A verb that raises leaves the conversation as it was.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        settings: ChatSettings,
        conversation: Conversation | None = None,
        drafting: Drafting | None = None,
    ):
        self.runner = runner
        self.template = template
        self.settings = settings
        self._tokenizer = tokenizer
        self._drafting = drafting
        self._conversation = conversation or Conversation()
        self._running: RunningAnswer | None = None
        self._several: SeveralAnswers | None = None
        self._choices: tuple[Answer, ...] = ()
        self._row = KeptRow()

    @property
    def conversation(self) -> Conversation:
        """All that was said, with the answer under way."""
        if self._running is None:
            return self._conversation
        running = self._running
        answer = running.answer(running.new_text, tuple(running.token_ids), "interrupted")
        return self._conversation.with_answer(answer)

    @conversation.setter
    def conversation(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._choices = ()

    def prompt(self) -> ChatPrompt:
        """What the model would see if it answered now."""
        return build_prompt(self._tokenizer, self.template, self._conversation)

    def num_tokens(self) -> int:
        """Tokens of the context that the conversation takes, with the last answer.

        Raises: TokenizerError if the template refuses the conversation.
        """
        if not self._conversation.turns:
            return 0
        answer = self._conversation.last.answer
        return len(self.prompt().token_ids) + (len(answer.token_ids) if answer else 0)

    def send(self, message: str) -> Iterator[events.ChatEvent]:
        """Answer a new message.

        Raises: UsageError if it does not fit; TokenizerError if the template refuses the conversation.
        """
        return self._answer(self._conversation.ask(message), sample=0)

    def edit(self, message: str) -> Iterator[events.ChatEvent]:
        """Replace the last message and answer the new one. Raises: UsageError if there is no message, and as `send`."""
        results, before = self._conversation.last.results, self._conversation.without_last()
        if len(results) > 1:
            raise UsageError("the last message is several results; /undo removes them")
        return self._answer(before.report([message]) if results else before.ask(message), sample=0)

    def report(self, results: Sequence[str]) -> Iterator[events.ChatEvent]:
        """Answer the results of the last answer's calls. Raises: UsageError for another number of them; as `send`"""
        return self._answer(self._conversation.report(results), sample=0)

    def edit_answer(self, content: str) -> None:
        """Replace the last answer, as if the model had said this text and been stopped there.

        Raises: UsageError if there is no answer, or no text.
        """
        last = self._conversation.last.answer
        if last is None:
            raise UsageError("there is no answer yet")
        if last.calls:
            raise UsageError("the last answer calls tools; /regen gives another one")
        if not content:
            raise UsageError("the answer is empty; /regen gives another one")
        before = last.text.removesuffix(last.content)
        if last.reasoning is not None and events.CLOSING not in before:  # it was stopped while it reasoned
            before = f"{before.rstrip()}\n{events.CLOSING}\n\n"
        text = before + content
        token_ids = self._tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False)
        edited = replace(last, text=text, content=content, token_ids=tuple(token_ids), finish_reason="interrupted")
        self.conversation = self._conversation.with_answer(edited)

    def regenerate(self) -> Iterator[events.ChatEvent]:
        """Answer the last message again, with the next sample index.

        Raises: UsageError if there is no message, and as `send`.
        """
        return self._answer(self._conversation.with_answer(None), self._next_sample())

    def answer_several(self, count: int) -> Iterator[events.SeveralEvent]:
        """Answer the last message again, `count` times side by side, with the next sample indices.

        The first answer enters the conversation; until the next change, `choose` replaces it by another.
        Raises: UsageError if there is no message, and as `send`.
        """
        first = self._next_sample()
        conversation = self._conversation.with_answer(None)
        fitted = self._fit(conversation)
        self._close_row()
        begun = [Answer("", "", None, (), "interrupted", (first + index) % NUM_SAMPLES) for index in range(count)]
        samples = tuple(answer.sample for answer in begun)
        request = replace(self._request(fitted, begun[0]), samples=samples, kept_row=None)
        generation = Generation(self.runner, self._tokenizer, request, self._drafting)
        running = {
            answer.sample: RunningAnswer(self._tokenizer, generation, answer, fitted, self.settings) for answer in begun
        }
        self._several = several = SeveralAnswers(generation, fitted.conversation, running)
        yield self._started(fitted, conversation)
        for event in generation.events():
            yield from several.take(event)
        self._end_several(several)

    def _next_sample(self) -> int:
        """The sample index after those of all answers to choose from."""
        last = self._conversation.last.answer
        used = (last, *self._choices) if last else ()
        return (max((answer.sample for answer in used), default=-1) + 1) % NUM_SAMPLES

    @property
    def choices(self) -> tuple[Answer, ...]:
        """The answers that `choose` chooses from."""
        return self._choices

    def choose(self, number: int) -> None:
        """Replace the first of the last several answers by another of them, counted from 1.

        Raises: UsageError if there is no such answer.
        """
        if not 1 <= number <= len(self._choices):
            found = f"expected 1 to {len(self._choices)}" if self._choices else "there is none; /n 3 gives three"
            raise UsageError(f"there is no answer {number} to choose: {found}")
        self._conversation = self._conversation.with_answer(self._choices[number - 1])

    def logprobs(self, num_alternatives: int) -> Iterator[tuple[TokenLogprob, tuple[TokenLogprob, ...]]]:
        """The model's own probability of each token of the last answer, and of the likeliest tokens there.

        Raises: UsageError if there is no answer, or none that the context holds; TokenizerError as `send`.
        """
        last = self._conversation.last.answer
        if last is None or not last.token_ids:
            raise UsageError("there is no answer yet")
        prompt = self.prompt().token_ids
        token_ids = (*prompt, *last.token_ids)
        self._check_ids(prompt, token_ids)
        if len(token_ids) > (context := self.runner.limits.max_seq_len):
            raise UsageError(
                f"the conversation has {len(token_ids)} tokens with the answer; the context holds {context}; "
                "use a shorter system prompt or, if the model allows it, a larger --context"
            )
        self._close_row()
        answer = iter(last.token_ids)
        for logits in scores(self.runner, token_ids, len(prompt)):
            for row, token_id in zip(logits, answer, strict=False):
                chosen = TokenLogprob(token_id, float(log_probabilities(row)[token_id]))
                yield chosen, likeliest_tokens(row, num_alternatives)

    def continue_answer(self) -> Iterator[events.ChatEvent]:
        """Continue an answer that was cut off, with the tokens that would have come.

        Raises: UsageError if there is no such answer, and as `send`.
        """
        last = self._conversation.last.answer
        if last is not None and not last.is_unfinished:
            raise UsageError("the last answer is complete; send a message, or use /regen for another answer")
        conversation = self._conversation
        if last is not None and decode(self._tokenizer, last.token_ids, at_start=True) != last.text:
            # The file was edited by hand: use its text.
            token_ids = self._tokenizer.encode(last.text, add_special_tokens=False, parse_special_tokens=False)
            conversation = conversation.with_answer(replace(last, token_ids=tuple(token_ids)))
        return self._answer(conversation, sample=last.sample if last else 0)

    def interrupt(self) -> list[events.ChatEvent]:
        """End the answer under way; the conversation keeps it so far."""
        running = self._running
        if running is None:
            return []
        told = [seen for event in running.generation.interrupt() for seen in self._take(running, event)]
        if self._running is None:
            return told
        timings = Timings(running.prefill_tokens, 0.0, 0.0, 0, 0.0)
        text, token_ids = running.new_text, tuple(running.token_ids)
        return [*told, *self._finish(running, Finished(0, "", text, token_ids, "interrupted", timings))]

    def interrupt_several(self) -> list[PrefillProgress | events.OfAnswer]:
        """End the answers of `answer_several` under way; those that have begun stay as they are."""
        several = self._several
        if several is None:
            return []
        seen = [one for event in several.generation.interrupt() for one in several.take(event)]
        self._end_several(several)
        return seen

    def _answer(self, conversation: Conversation, sample: int) -> Iterator[events.ChatEvent]:
        fitted = self._fit(conversation)
        begun = conversation.last.answer or Answer("", "", None, (), "interrupted", sample)
        generation = Generation(self.runner, self._tokenizer, self._request(fitted, begun), self._drafting)
        started = self._started(fitted, conversation)
        self.conversation = fitted.conversation
        self._running = running = RunningAnswer(self._tokenizer, generation, begun, fitted, self.settings)
        yield started
        for event in generation.events():
            yield from self._take(running, event)

    def _fit(self, conversation: Conversation) -> FittedPrompt:
        settings, context = self.settings, self.runner.limits.max_seq_len
        fitted = fit_prompt(
            self._tokenizer,
            self.template,
            conversation,
            context=context,
            max_new_tokens=settings.max_new_tokens,
            overflow=settings.overflow,
        )
        self._check_ids(fitted.prompt.token_ids, fitted.token_ids)
        tools = self.settings.tools.offer.tools.tools if self.settings.tools else ()
        self.template.refuse_dropped(fitted.conversation.with_answer(None).messages(), tools)
        return fitted

    def _check_ids(self, prompt: tuple[int, ...], token_ids: tuple[int, ...]) -> None:
        """Refuse ids that the model cannot run, in a prompt alone or with its answer."""
        if not prompt:
            raise TokenizerError(
                f"{self.template.origin} gives an empty prompt for this message; choose another with --chat-template"
            )
        if (largest := max(token_ids)) >= (vocab_size := self.runner.config.vocab_size):
            raise UsageError(
                f"the tokenizer gave id {largest}, but the model has {vocab_size} embeddings; "
                "the tokenizer belongs to another model"
            )

    def _close_row(self) -> None:
        """Free the row's pages for others. Prompts that ran in it stay cached: later texts find their beginnings."""
        if self._row.row is not None:
            with interrupts_held_back():
                self.runner.close(self._row.row)
                self._row.row = None

    def _end_several(self, several: SeveralAnswers) -> None:
        if several.in_order:
            self._conversation = several.conversation.with_answer(several.in_order[0])
            self._choices = several.in_order
        self._several = None

    def _request(self, fitted: FittedPrompt, begun: Answer) -> Request:
        settings = self.settings
        room = self.runner.limits.max_seq_len - len(fitted.token_ids)
        wanted = settings.max_new_tokens
        return Request(
            prompt_token_ids=fitted.token_ids,
            sampler=replace(settings.sampler, num_prompt_tokens=len(fitted.prompt.token_ids)),
            samples=(begun.sample,),
            # One more than fits: then the runner ends the answer with the reason `context`.
            max_new_tokens=room + 1 if wanted is None else min(wanted, room + 1),
            stop_strings=(*settings.stop_strings, *self.template.stop_strings),
            at_start=not begun.token_ids,
            kept_row=self._row,
            schema=self._schema(fitted, begun),
            shown_token_ids=settings.tools.token_ids if settings.tools else frozenset(),
        )

    def _schema(self, fitted: FittedPrompt, begun: Answer) -> "Schema | None":
        schema, tools = self.settings.schema, self.settings.tools
        if tools is not None:
            schema = tools.schema_of(fitted.start)
        if schema is None:
            return None
        if tools is None and fitted.start == "reasoning":
            raise UsageError(
                f"{self.template.origin} opens the reasoning, and {schema.grammar.name} holds all of the answer; "
                "turn reasoning off, as with --template-var enable_thinking=false"
            )
        return schema.behind(begun.token_ids) if begun.token_ids else schema

    def _started(self, fitted: FittedPrompt, before: Conversation) -> events.TurnStarted:
        row = [] if self._row.row is None else list(self.runner.token_ids(self._row.row))
        num_kept = min(first_difference(row, fitted.token_ids), len(fitted.token_ids) - 1)
        return events.TurnStarted(
            prompt_token_ids=fitted.token_ids,
            num_kept=num_kept,
            # If the whole row stays, nothing is computed again; the tokens said last may not have run yet.
            num_history_computed=max(0, fitted.prompt.num_history_tokens - num_kept) if num_kept < len(row) else 0,
            num_dropped=fitted.conversation.num_dropped - before.num_dropped,
            dropped_from=before.num_dropped + 1,
        )

    def _take(self, running: RunningAnswer, event: Event) -> Iterator[events.ChatEvent]:
        if isinstance(event, PrefillProgress):
            running.prefill_tokens = event.num_computed
            yield event
        elif isinstance(event, Token):
            yield from running.push(event)
        elif isinstance(event, Finished):
            yield from self._finish(running, event)

    def _finish(self, running: RunningAnswer, finished: Finished) -> Iterator[events.ChatEvent]:
        pieces, ended = running.finish(finished)
        self._conversation, self._running = self._conversation.with_answer(ended.answer), None
        yield from pieces
        yield ended
