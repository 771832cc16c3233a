"""The prompt of a conversation, and what gives way when it no longer fits into the context."""

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Literal

from llmcli.engine.conversation import Conversation
from llmcli.errors import UsageError
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.chat_splice import ChatPrompt, Generated, encode_history
from llmcli.tokenizer.chat_template import ChatTemplate

Overflow = Literal["stop", "drop-oldest"]

# Turns are dropped when less than an eighth of the context is left for the answer, and then until a quarter is: what
# follows a dropped turn is computed anew, and that should not happen at every turn.
MIN_FREE, FREE_AFTER_DROP = 1 / 8, 1 / 4


@dataclass(frozen=True)
class FittedPrompt:
    """The prompt for the last turn's answer, as far as it is said already, and the turns it was made of."""

    prompt: ChatPrompt
    token_ids: tuple[int, ...]  # the prompt's, and those of an answer that goes on
    conversation: Conversation


def build_prompt(tokenizer: Tokenizer, template: ChatTemplate, conversation: Conversation) -> ChatPrompt:
    """The prompt for the next answer, without the last turn's own if it has one.

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
    """The prompt, which leaves room for an answer; with `drop-oldest`, of as few turns less as it takes.

    Whoever continues an answer asks for more than was said, so turns are dropped for it with `stop` too, once not a
    single token more has room.

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
        counts = range(conversation.num_dropped + 1, len(conversation.turns))  # the last turn stays
        if counts:
            # By halves, as each look renders and encodes a whole prompt, and fewer turns make a shorter one.
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
