"""Token ids of a conversation, and the tokens that end an assistant's turn.

A special token is one only where the template writes it: its string inside a message is ordinary text, so what
somebody types, or a file that is pasted, cannot end a turn or begin one.
"""

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llmcli.errors import TokenizerError, UsageError
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.chat_template import ChatTemplate

# Stand-ins are the surrogates from here on: no valid text holds one, and JSON does not join two of this half.
FIRST_STAND_IN = 0xDC00
# Text goes after one of these where it must not begin a text. The first is a private-use character that no vocabulary
# holds, so it never merges with the text after it; except that in a vocabulary without byte fallback an unknown
# character next to it becomes part of the same unknown token. The others are for vocabularies that drop what they do
# not know.
ANCHORS = ("\U0010fffd", *string.printable)

PROBE = "turnprobe"
REPLY = ({"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE})
TOOL_CALL = {"type": "function", "id": "000000001", "function": {"name": "probe", "arguments": {"text": PROBE}}}
CALL = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]})


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    **variables: Any,
) -> list[int]:
    """The ids of a conversation as the template writes it, with a BOS only if the template writes one.

    They equal those of transformers' `apply_chat_template`, with two exceptions. The strings of special tokens inside
    messages and variables are encoded as ordinary text. With a tokenizer.model, text with runs of spaces gets the ids
    of the sentencepiece library; the merges that transformers makes of that file join such runs otherwise.

    While the template is rendered, a stand-in replaces the first character of each such string: the template sees
    texts of unchanged length in which no special token can be found, however it cuts them. Where the tokenizer finds
    special tokens in other spellings too, such as "</S>", what it finds in one is ordinary text, whoever wrote it.

    Raises: UsageError for text that is not valid Unicode, TokenizerError as `ChatTemplate.render`.
    """
    disguise = disguise_for(tokenizer)
    text = template.render(
        disguise.hide(messages), add_generation_prompt, **disguise.hide(template.variables | variables)
    )
    return encode_disguised(tokenizer, disguise, text)


@dataclass(frozen=True)
class Disguise:
    """Stand-ins for the first characters of the special tokens of one tokenizer, and the way back."""

    special_tokens: frozenset[str]
    stand_in_of: Mapping[str, str]
    initial_of: Mapping[int, str]

    def hide(self, value: Any) -> Any:
        """The JSON value with a stand-in for the first character of each special token in its strings.

        Raises: UsageError for text that is not valid Unicode.
        """
        return _hide(value, self.special_tokens, self.stand_in_of)

    def restore(self, text: str) -> str:
        """The text without stand-ins."""
        return text.translate(self.initial_of)


def disguise_for(tokenizer: Tokenizer) -> Disguise:
    """The disguise of a tokenizer's special tokens."""
    special_tokens = _special_tokens(tokenizer)
    initials = sorted({token[0] for token in special_tokens})
    stand_in_of = {initial: chr(FIRST_STAND_IN + index) for index, initial in enumerate(initials)}
    initial_of = {ord(stand_in): initial for initial, stand_in in stand_in_of.items()}
    return Disguise(special_tokens, stand_in_of, initial_of)


def encode_disguised(tokenizer: Tokenizer, disguise: Disguise, text: str, *, is_start: bool = True) -> list[int]:
    """The ids of a text rendered from disguised messages; what is in disguise is ordinary text.

    `is_start` says that the text begins a prompt; otherwise it goes on after other tokens, and gets no leading space
    from tokenizers that put one before a text.
    """
    if not is_start and tokenizer.strips_leading_space:
        return _encode_continuation(partial(encode_disguised, tokenizer, disguise), text)
    if disguise.restore(text) == text and not tokenizer.finds_other_spellings:
        return tokenizer.encode(text, add_special_tokens=False)

    parts = _finder(disguise.special_tokens, text).split(text)  # text, token, text, token, ... text
    token_ids: list[int] = []
    clean = ""
    for index, part in enumerate(parts):
        restored = disguise.restore(part)
        is_token = index % 2 == 1
        if is_token or (restored == part and not _holds_other_spelling(tokenizer, part)):
            clean += part
        else:
            token_ids += tokenizer.encode(clean, add_special_tokens=False)
            token_ids += _encode_ordinary(tokenizer, restored, before=parts[index - 1] if index else None)
            clean = ""  # begins with a special token, so whether it begins the text makes no difference
    return token_ids + tokenizer.encode(clean, add_special_tokens=False)


def _holds_other_spelling(tokenizer: Tokenizer, text: str) -> bool:
    """Whether the tokenizer finds special tokens in a text that holds none in its own spelling."""
    return tokenizer.finds_other_spellings and not tokenizer.special_token_ids.isdisjoint(
        tokenizer.encode(text, add_special_tokens=False)
    )


def turn_end_token_ids(tokenizer: Tokenizer, template: ChatTemplate) -> frozenset[int]:
    """The special tokens that the template writes after an assistant's message, such as `<|im_end|>` or `</s>`.

    Found by rendering a reply, and a call of a built-in tool, which Llama 3.1 ends with `<|eom_id|>`. A template that
    refuses such a conversation has none for it.
    """
    special_tokens = _special_tokens(tokenizer)
    after_reply = _render_after_probe(template, REPLY)
    after_call = _render_after_probe(template, CALL, builtin_tools=["probe"])
    # After a call's text come the ends of the call itself, and then the end of the turn.
    ends = [
        *_finder(special_tokens, after_reply).findall(after_reply)[:1],
        *_finder(special_tokens, after_call).findall(after_call)[-1:],
    ]
    return frozenset(token_id for token in ends if (token_id := tokenizer.token_id(token)) is not None)


def _render_after_probe(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    try:
        text = template.render(messages, add_generation_prompt=False, **variables)
    except TokenizerError:
        return ""
    _, probe, rest = text.rpartition(PROBE)
    return rest if probe else ""


def _special_tokens(tokenizer: Tokenizer) -> frozenset[str]:
    return frozenset(tokenizer.piece(token_id) for token_id in tokenizer.special_token_ids) - {""}


def _finder(tokens: Iterable[str], text: str) -> re.Pattern[str]:
    """A pattern that finds the longest of those tokens that occur in a text; its one group is the token."""
    # Llama 3 has 256 special tokens, and a search for each is far quicker than a pattern of all.
    present = sorted((token for token in tokens if token in text), key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, present)) or "(?!)") + ")")


def _hide(value: Any, special_tokens: frozenset[str], stand_in_of: Mapping[str, str]) -> Any:
    """The JSON value with a stand-in for the first character of each special token in its strings."""
    if isinstance(value, Mapping):
        return {key: _hide(item, special_tokens, stand_in_of) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(item, special_tokens, stand_in_of) for item in value]
    if not isinstance(value, str):
        return value
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"a message is not valid Unicode: lone surrogate U+{ord(value[error.start]):04X} at character "
            f"{error.start}; pass the text as UTF-8"
        ) from error
    # Looks ahead, so that a token within another or overlapping it is found as well.
    starts = re.compile(f"(?={_finder(special_tokens, value).pattern}).", re.DOTALL)
    return starts.sub(lambda match: stand_in_of[match[0]], value)


def _encode_ordinary(tokenizer: Tokenizer, text: str, before: str | None) -> list[int]:
    """Encodes text in which no special token is to be found, after a special token or at the start of the prompt."""
    encode = partial(tokenizer.encode, add_special_tokens=False, parse_special_tokens=False)
    if before is None or tokenizer.encode(f"{before}a", add_special_tokens=False)[1:] == encode("a"):
        return encode(text)
    # A space goes before a text, though not after a special token: let it go before something else.
    return _encode_continuation(encode, text)


def _encode_continuation(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """The ids that `encode` gives a text that goes on after another one; as a beginning if it merges with every one."""
    for anchor in ANCHORS:
        anchor_ids = encode(anchor)
        token_ids = encode(anchor + text)
        if token_ids[: len(anchor_ids)] == anchor_ids:
            return token_ids[len(anchor_ids) :]
    return encode(text)
