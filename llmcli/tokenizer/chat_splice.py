"""The prompt of a conversation in which the ids that the model generated stand for themselves.

Encoding an answer's text anew gives other ids wherever the model did not cut it as the tokenizer does. So the ids are
kept, and put in wherever the template writes the text that they stand for. Where it writes something else, because it
trims or drops reasoning, that text is encoded.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.chat_encoding import Disguise, disguise_for, encode_disguised
from llmcli.tokenizer.chat_template import ChatTemplate

# Takes the place of a message, to see where the template writes it: a surrogate, so that no valid text holds it, and
# the last one, so that it is no stand-in for a special token's first character.
MARKER = "\udfff"


@dataclass(frozen=True)
class Generated:
    """What the model generated for a message: all its text, which ends with the message's content, and its ids."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the model sees it.

    `num_history_tokens` counts the tokens up to the end of the last answer in it.
    """

    text: str
    token_ids: tuple[int, ...]
    num_history_tokens: int


def encode_history(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    generated: Mapping[int, Generated],
) -> ChatPrompt:
    """The prompt for the next answer; `generated` has the ids of messages by their index.

    The ids equal `encode_chat`'s if those of each message are the ones that encoding its text in its place gives.

    The template is rendered a second time with a marker for each answer. The text around the markers, found again in
    the first rendering, tells where the answers begin and end in it. Ids are put in only for characters that are the
    same there, so a template that writes messages in a way not foreseen costs computation, never correctness.

    Raises: as `encode_chat`.
    """
    disguise = disguise_for(tokenizer)
    hidden = disguise.hide(messages)
    variables = disguise.hide(template.variables)
    text = template.render(hidden, **variables)
    answers = [index for index, message in enumerate(hidden) if message["role"] == "assistant" and message["content"]]
    marked = [message | {"content": MARKER} if index in answers else message for index, message in enumerate(hidden)]
    pieces = template.render(marked, **variables).split(MARKER) if answers else [text]
    spans = _spans(text, pieces, [hidden[index]["content"] for index in answers])

    token_ids: list[int] = []
    position = 0  # how much of the text the ids cover

    def encode(begin: int, end: int) -> list[int]:
        return encode_disguised(tokenizer, disguise, text[begin:end], is_start=begin == 0)

    for index, (begin, end) in zip(answers, spans, strict=False):
        content, said = messages[index]["content"], generated.get(index)
        start, kept, length = _kept_ids(tokenizer, disguise, said, content, text[position:end], begin - position)
        if kept:
            token_ids += encode(position, position + start) + kept
            position += start + length
    # Only now: where no ids are put in, each answer's end would mean another encoding of all before it.
    num_history_tokens = len(token_ids) + len(encode(position, spans[-1][1])) if spans else 0
    token_ids += encode(position, len(text))
    return ChatPrompt(disguise.restore(text), tuple(token_ids), num_history_tokens)


def num_agreeing_tokens(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> int:
    """How many of the first ids stand for the beginning of the text, byte for byte; a special token stands for none."""
    expected = text.encode()
    num_bytes = 0
    for index, token_id in enumerate(token_ids):
        piece = tokenizer.token_bytes(token_id)
        if not piece or not expected.startswith(piece, num_bytes):
            return index
        num_bytes += len(piece)
    return len(token_ids)


def _spans(text: str, pieces: Sequence[str], contents: Sequence[str]) -> list[tuple[int, int]]:
    """Where each content, or what the template made of it, stands in the text between the pieces around it.

    Fewer than there are contents if the template does not write each of them once.
    """
    if len(pieces) != len(contents) + 1 or not text.startswith(pieces[0]):
        return []
    spans: list[tuple[int, int]] = []
    begin = len(pieces[0])
    for content, following in zip(contents, pieces[1:], strict=True):
        end = begin + len(content)
        if not (text.startswith(content, begin) and text.startswith(following, end)):
            end = text.find(following, begin)
            if end < 0:
                break
        spans.append((begin, end))
        begin = end + len(following)
    return spans


def _kept_ids(
    tokenizer: Tokenizer, disguise: Disguise, generated: Generated | None, content: str, text: str, begin: int
) -> tuple[int, list[int], int]:
    """The generated ids that `text` agrees with, where in it they begin, and for how many characters they stand.

    `content` was expected at `begin`.
    """
    nothing: tuple[int, list[int], int] = (0, [], 0)
    if generated is None or not generated.token_ids:
        return nothing
    full, token_ids = generated.text, list(generated.token_ids)
    pieces = [tokenizer.token_bytes(token_id) for token_id in token_ids]
    if tokenizer.strips_leading_space and pieces[0].startswith(b" ") and not full.startswith(" "):
        full = " " + full  # a text's first space is not shown, but the ids hold it, and templates write it
    hidden: str = disguise.hide(full)
    num_before = len(full) - len(content)  # reasoning, or that first space
    num_spaces = len(content) - len(content.lstrip())  # which some templates trim and write themselves
    for start in (begin - num_before, begin - num_before - num_spaces):
        num_same = len(os.path.commonprefix([hidden, text[start:]])) if start >= 0 else 0
        if num_same > num_before + num_spaces:
            break
    else:
        return nothing
    if num_same == len(full) and all(pieces) and b"".join(pieces).decode(errors="replace") == full:
        return start, token_ids, num_same
    for count in range(num_agreeing_tokens(tokenizer, token_ids, full[:num_same]), 0, -1):
        try:
            return start, token_ids[:count], len(b"".join(pieces[:count]).decode())
        except UnicodeDecodeError:  # a character that ends in the next token must not be cut in two
            continue
    return nothing
