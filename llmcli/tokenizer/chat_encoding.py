"""Token ids of a conversation: from text, or with the ids that the model generated; and the tokens that end a turn.

A special token counts only where the template writes it: its string inside a message is ordinary text, so nothing
that somebody types or pastes can end a turn or begin one.
"""

import json
import os
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llmcli.differences import first_difference
from llmcli.errors import TokenizerError, UsageError
from llmcli.reading import CHAT_TEMPLATE
from llmcli.tokenizer.base import Tokenizer, read_optional_object
from llmcli.tokenizer.bounded_process import BoundedProcess

# The chat template of a model: finds it, and renders conversations with it.
#
# Refuses a folder without a template, and lists the ways to name one.

PLAIN = "plain"
# For models trained on text alone. No space after the last colon: it belongs to the next word's token.
PLAIN_SOURCE = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- message.content | trim + '\\n\\n' }}
    {%- else %}
        {{- message.role | capitalize + ': ' + message.content | trim + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}
"""
PLAIN_STOP_STRING = "\nUser:"

# Private-use characters, each for one message's content; repeated, in case a template cuts it.
_FIRST_MARK, _NUM_MARKS = 0xF0000, 0xFFFE
_MARK_LENGTH = 16
_MOST_KEPT_ROLES = 256

TIME_LIMIT_SECONDS = 2
# What a template may write (OUTPUT_LIMIT_MB of chat_sandbox.py). Longer messages are not the template's fault.
MOST_MESSAGE_BYTES = 4 * 2**20
CONVERSATION_VARIABLES = ("messages", "add_generation_prompt")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A Jinja template, rendered in a child process with bounds, since it is a program of the model's author.

    `origin` says where it comes from, for messages. `special_tokens` are variables of every rendering, such as
    `bos_token`. `variables` are further ones, JSON values such as `enable_thinking`. `stop_strings` end an answer if no
    special token does: the template `plain` has one. `tool_source` is another template, for conversations with tools.
    """

    def __init__(
        self,
        source: str,
        origin: str,
        special_tokens: Mapping[str, str],
        stop_strings: tuple[str, ...] = (),
        variables: Mapping[str, Any] | None = None,
        tool_source: str | None = None,
    ) -> None:
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        self.origin = origin
        self.special_tokens = dict(special_tokens)
        self.stop_strings = stop_strings
        self.variables = dict(variables or {})
        self._whole_roles: set[tuple[str, ...]] = set()  # of conversations written in full
        self._names: list[str] | None = None
        remedy = "choose another one with --chat-template FILE"
        self._process = BoundedProcess("llmcli.tokenizer.chat_sandbox", "jinja2", origin, remedy)

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt of a conversation, as transformers' `apply_chat_template` gives it with `tokenize=False`.

        A message has a `role` and a `content`; further keys and `variables`, which go before the template's own, are
        JSON values that the template may use. With `add_generation_prompt` the text ends where the assistant's answer
        begins.

        Raises: UsageError for messages of more than 4 MB; TokenizerError if the template refuses the conversation, is
        broken, needs more than 2 s or 256 MB, or writes more than 4 MB.
        Source: transformers 5.23, `apply_chat_template` and `render_jinja_template`.
        """
        num_bytes = sum(len(str(one.get("content")).encode(errors="surrogatepass")) for one in messages)
        if num_bytes > MOST_MESSAGE_BYTES:
            most = MOST_MESSAGE_BYTES >> 20
            raise UsageError(f"the messages have {num_bytes / 2**20:.1f} MB, at most {most} MB fit; shorten them")
        prompt: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        prompt["messages"] = [_message(message) for message in messages]
        named = self.special_tokens | prompt | self.variables | variables
        request = {"source": self.tool_source if named["tools"] else self.source, "variables": named}
        return str(self._process.ask(request, TIME_LIMIT_SECONDS))

    def refuse_dropped(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Refuse a conversation if the template leaves a message out, as many do with unknown roles.

        Renders the template with a different character in place of each content, or of the arguments of its tool calls:
        a missing one means that its message was not written. The result depends on the roles, so the same roles are
        checked once.

        Raises: TokenizerError with the message's role, and as `render`.
        """
        kinds = tuple(f"{message['role']}{' with calls' * ('tool_calls' in message)}" for message in messages)
        roles = (*kinds, "with tools" if tools else "without tools")
        if roles in self._whole_roles:
            return
        marks = [chr(_FIRST_MARK + index % _NUM_MARKS) for index in range(len(messages))]
        marked = [_marked(message, mark * _MARK_LENGTH) for message, mark in zip(messages, marks, strict=True)]
        variables: dict[str, Any] = {"tools": tools} if tools else {}
        text = self.render(marked, **variables)
        for index, mark in enumerate(marks):
            if mark not in text:
                raise TokenizerError(
                    f"{self.origin} leaves out message {index + 1} of {len(messages)}, whose role is "
                    f"{roles[index][:40]!r}; use another role, or choose another template with --chat-template FILE"
                )
        if len(self._whole_roles) == _MOST_KEPT_ROLES:
            self._whole_roles.clear()
        self._whole_roles.add(roles)

    @property
    def takes_tools(self) -> bool:
        """Whether it has a place for tools."""
        return re.search(r"\btools\b", self.tool_source) is not None

    def variable_names(self) -> list[str]:
        """The names that the template looks up, besides the conversation and the special tokens.

        Raises: TokenizerError if it is broken.
        """
        if self._names is None:
            names: list[str] = self._process.ask({"source": self.source}, TIME_LIMIT_SECONDS)
            self._names = [name for name in names if name not in (*CONVERSATION_VARIABLES, *self.special_tokens)]
        return self._names

    def refuse_unknown(self, variables: Iterable[str], where: str) -> None:
        """Raises: UsageError for a variable that the template does not look up; TokenizerError if it is broken."""
        for name in variables:
            if name not in (names := self.variable_names()):
                known = f"it has {', '.join(names)}" if names else "it has none"
                raise UsageError(f"{where} {name[:80]}: {self.origin} has no such variable; {known}")

    def close(self) -> None:
        """End the child process; the next rendering starts another. Without this it ends with the program."""
        self._process.close()


def load_chat_template(
    folder: Path, tokenizer: Tokenizer, choice: str | None = None, variables: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """The template of a model folder with that tokenizer, or the one chosen: a Jinja file, or the word `plain`.

    In a folder, chat_template.jinja wins over `chat_template` in tokenizer_config.json, which is a template or a list
    of named ones, from which `default` is taken, and `tool_use` for conversations with tools. Of the folder
    additional_chat_templates only tool_use.jinja is read.

    Raises: UsageError if there is none, the chosen file cannot be read, or the template does not look up one of the
    `variables`; TokenizerError if the folder's is malformed.
    """
    template = _load(folder, tokenizer, choice, variables)
    template.refuse_unknown(variables or (), "--template-var")
    return template


def _load(folder: Path, tokenizer: Tokenizer, choice: str | None, variables: Mapping[str, Any] | None) -> ChatTemplate:
    special_tokens = _special_tokens(tokenizer)
    if choice == PLAIN:  # begins like any text, without a BOS if the model never saw one
        first_ids = tokenizer.encode("")[:1]
        special_tokens["bos_token"] = tokenizer.piece(first_ids[0]) if first_ids == [tokenizer.bos_token_id] else ""
        return ChatTemplate(
            PLAIN_SOURCE, "the built-in chat template `plain`", special_tokens, (PLAIN_STOP_STRING,), variables
        )
    tool_source = None
    if choice is not None:
        source, origin = _read_chosen(Path(choice)), f"the chat template {choice}"
    else:
        source, origin, tool_source = _find_in(folder)
    if not source.strip():
        raise TokenizerError(f"{origin} is empty; choose another one with --chat-template FILE")
    return ChatTemplate(source, origin, special_tokens, variables=variables, tool_source=tool_source)


def _read_chosen(path: Path) -> str:
    try:
        return CHAT_TEMPLATE.read_text(path)
    except TokenizerError as error:
        raise UsageError(f"{error}; expected a file that holds a Jinja template, or `{PLAIN}`") from error


def _find_in(folder: Path) -> tuple[str, str, str | None]:
    """The template, where it is from, and the one for tools, None if it is the same."""
    path, for_tools = folder / "chat_template.jinja", folder / "additional_chat_templates" / "tool_use.jinja"
    if os.path.lexists(path):
        tool_source = CHAT_TEMPLATE.read_text(for_tools) if os.path.lexists(for_tools) else None
        return CHAT_TEMPLATE.read_text(path), f"the chat template {path}", tool_source

    path = folder / "tokenizer_config.json"
    source = read_optional_object(path).get("chat_template")
    if source is None:
        raise UsageError(
            f"{folder} has no chat template: there is no chat_template.jinja, and no chat_template in "
            f"tokenizer_config.json; give one with --chat-template FILE, or use --chat-template {PLAIN} for a "
            f"conversation in lines of `User:` and `Assistant:`"
        )
    origin, tool_source = f"chat_template in {path}", None
    if isinstance(source, list) and all(isinstance(entry, dict) for entry in source):
        named = {str(entry.get("name")): entry.get("template") for entry in source}
        if "default" not in named:
            names = ", ".join(named) or "none"
            raise TokenizerError(
                f"{origin} has no template named default, only {names}; choose one with --chat-template FILE"
            )
        source, tool_source = named["default"], named.get("tool_use")
    if not isinstance(source, str) or not isinstance(tool_source, str | None):
        raise TokenizerError(f"{origin} is {json.dumps(source)[:100]}, expected a template or a list of named ones")
    return source, f"the {origin}", tool_source


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """The folder's named tokens, as strings; also BOS and EOS that only the tokenizer's own file has.

    As in transformers, special tokens without a name are not variables.
    """
    tokens = {}
    if tokenizer.bos_token_id is not None:
        tokens["bos_token"] = tokenizer.piece(tokenizer.bos_token_id)
    if len(tokenizer.eos_token_ids) == 1:  # if there are more, the folder names the one that ends a text
        tokens["eos_token"] = tokenizer.piece(min(tokenizer.eos_token_ids))
    return tokens | tokenizer.named_tokens


def _marked(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """The message with a mark in place of its content, or of the arguments of its tool calls."""
    if "tool_calls" not in message:
        return {**message, "content": mark}
    calls = [{**call, "function": {**call["function"], "arguments": {PROBE: mark}}} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out keys without a value; give the reasoning under each name that templates use."""
    given = {key: value for key, value in message.items() if value is not None}
    for field in REASONING_FIELDS:
        if field in given:
            return {"thinking": given[field], **given, "reasoning_content": given[field]}
    return given


# Stand-ins are the surrogates from here on: no valid text holds one, and JSON does not join two of this half.
FIRST_STAND_IN = 0xDC00
# Text that must not begin a text is put after one of these. The first is a private-use character that no vocabulary
# holds, so it never merges with the text after it. (But in a vocabulary without byte fallback an unknown character next
# to it joins the same unknown token.) The others are for vocabularies that drop unknown characters.
ANCHORS = ("\U0010fffd", *string.printable)

PROBE = "turnprobe"
REPLY = ({"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE})
TOOL_CALL = {"type": "function", "id": "000000001", "function": {"name": "probe", "arguments": {"text": PROBE}}}
CALL = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]})


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    /,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> list[int]:
    """The ids of a conversation as the template writes it, with a BOS only if the template writes one.

    They equal those of transformers' `apply_chat_template`, with two exceptions. The strings of special tokens inside
    messages and variables are encoded as ordinary text. With a tokenizer.model, runs of spaces get the ids of the
    sentencepiece library; transformers derives merges from that file that join such runs differently.

    While the template is rendered, a stand-in replaces the first character of each such string: the template sees
    texts of unchanged length in which no special token can be found, however it cuts them. If the tokenizer finds
    special tokens in other spellings too, such as "</S>", those are ordinary text everywhere.

    Raises: UsageError for text that is not valid Unicode, TokenizerError as `ChatTemplate.render`.
    """
    disguise = disguise_for(tokenizer)
    text = template.render(
        disguise.hide(messages), add_generation_prompt, **disguise.hide(template.variables | variables)
    )
    return encode_disguised(tokenizer, disguise, text)


@dataclass(frozen=True)
class Disguise:
    """Replaces the first characters of one tokenizer's special tokens by stand-ins, and back."""

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
    special_tokens = _literal_special_tokens(tokenizer)
    initials = sorted({token[0] for token in special_tokens})
    stand_in_of = {initial: chr(FIRST_STAND_IN + index) for index, initial in enumerate(initials)}
    initial_of = {ord(stand_in): initial for initial, stand_in in stand_in_of.items()}
    return Disguise(special_tokens, stand_in_of, initial_of)


def encode_disguised(tokenizer: Tokenizer, disguise: Disguise, text: str, *, is_start: bool = True) -> list[int]:
    """The ids of a text rendered from disguised messages; disguised strings become ordinary text.

    `is_start` means that the text begins a prompt; otherwise it continues other tokens, and gets no leading space from
    tokenizers that put one before a text.
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
            clean = ""  # begins with a special token, so it does not matter whether it begins the text
    return token_ids + tokenizer.encode(clean, add_special_tokens=False)


def _holds_other_spelling(tokenizer: Tokenizer, text: str) -> bool:
    """Whether the tokenizer finds special tokens in a text that holds none in its own spelling."""
    return tokenizer.finds_other_spellings and not tokenizer.special_token_ids.isdisjoint(
        tokenizer.encode(text, add_special_tokens=False)
    )


def turn_end_token_ids(tokenizer: Tokenizer, template: ChatTemplate) -> frozenset[int]:
    """The special tokens that the template writes after an assistant's message, such as `<|im_end|>` or `</s>`.

    Found by rendering a reply, and a call of a built-in tool, which Llama 3.1 ends with `<|eom_id|>`. If the template
    refuses one of these conversations, it has no such token there.
    """
    special_tokens = _literal_special_tokens(tokenizer)
    after_reply = _render_after_probe(template, REPLY)
    after_call = _render_after_probe(template, CALL, builtin_tools=["probe"])
    # After a call's text come the ends of the call, and then the end of the turn.
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


def _literal_special_tokens(tokenizer: Tokenizer) -> frozenset[str]:
    return frozenset(tokenizer.piece(token_id) for token_id in tokenizer.special_token_ids) - {""}


def _finder(tokens: Iterable[str], text: str) -> re.Pattern[str]:
    """A pattern that finds the longest of those tokens that occur in a text; its one group is the token."""
    # Llama 3 has 256 special tokens; searching for each is much faster than a pattern of all.
    present = sorted((token for token in tokens if token in text), key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, present)) or "(?!)") + ")")


def _hide(value: Any, special_tokens: frozenset[str], stand_in_of: Mapping[str, str]) -> Any:
    """The JSON value with a stand-in for the first character of each special token in its strings."""
    if isinstance(value, Mapping):
        for key in value:
            if found := _finder(special_tokens, key).search(key):
                raise UsageError(f"the key {key[:80]!r} holds the special token {found[0]}; name it in another way")
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
    # Looks ahead, so that it also finds a token inside or overlapping another.
    starts = re.compile(f"(?={_finder(special_tokens, value).pattern}).", re.DOTALL)
    return starts.sub(lambda match: stand_in_of[match[0]], value)


def _encode_ordinary(tokenizer: Tokenizer, text: str, before: str | None) -> list[int]:
    """Encode text without special tokens, after a special token or at the start of the prompt."""
    encode = partial(tokenizer.encode, add_special_tokens=False, parse_special_tokens=False)
    if before is None or tokenizer.encode(f"{before}a", add_special_tokens=False)[1:] == encode("a"):
        return encode(text)
    # The tokenizer puts a space before a text, but not after a special token: let an anchor take the space.
    return _encode_continuation(encode, text)


def _encode_continuation(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """The ids of a text that continues another; those of a new text if it merges with every anchor."""
    for anchor in ANCHORS:
        anchor_ids = encode(anchor)
        token_ids = encode(anchor + text)
        if token_ids[: len(anchor_ids)] == anchor_ids:
            return token_ids[len(anchor_ids) :]
    return encode(text)


# The prompt of a conversation that keeps the ids generated by the model.
#
# Encoding an answer's text again gives other ids if the model split it differently from the tokenizer. So the ids are
# kept, and used wherever the template writes their text. If it writes something else, because it trims or drops
# reasoning, that text is encoded.

# Replaces a message, to see where the template writes it: a surrogate, which no valid text holds; the last one, which
# is no stand-in for a special token's first character.
MARKER = "\udfff"


@dataclass(frozen=True)
class Generated:
    """What the model generated for a message: its whole text, which ends with the message's content, and its ids."""

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

    The ids equal `encode_chat`'s if those of each message are the ones that encoding its text there gives.

    The template is rendered a second time with a marker for each answer. The text around the markers, found again in
    the first rendering, shows where the answers begin and end. Generated ids are used only for equal characters, so an
    unexpected template costs time, never correctness.

    Raises: as `encode_chat`.
    """
    disguise = disguise_for(tokenizer)
    hidden = disguise.hide(messages)
    variables = disguise.hide(template.variables)
    text = template.render(hidden, **variables)
    answers = [  # templates may leave out the content beside a call
        index
        for index, message in enumerate(hidden)
        if message["role"] == "assistant" and message["content"] and "tool_calls" not in message
    ]
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
    # Only now: if no ids are used, each answer's end would mean encoding everything before it again.
    num_history_tokens = len(token_ids) + len(encode(position, spans[-1][1])) if spans else 0
    token_ids += encode(position, len(text))
    return ChatPrompt(disguise.restore(text), tuple(token_ids), num_history_tokens)


def num_agreeing_tokens(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> int:
    """How many of the first ids stand for the beginning of the text, byte for byte; special tokens stand for none."""
    expected = text.encode()
    num_bytes = 0
    for index, token_id in enumerate(token_ids):
        piece = tokenizer.token_bytes(token_id)
        if not piece or not expected.startswith(piece, num_bytes):
            return index
        num_bytes += len(piece)
    return len(token_ids)


def _spans(text: str, pieces: Sequence[str], contents: Sequence[str]) -> list[tuple[int, int]]:
    """The span of each content, or of what the template made of it, in the text between the pieces around it.

    Fewer than the contents if the template does not write each of them once.
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
    """Where `text` begins to agree with the generated text; the ids that it agrees with, and their characters there.

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
        num_same = first_difference(hidden, text[start:]) if start >= 0 else 0
        if num_same > num_before + num_spaces:
            break
    else:
        return nothing
    if num_same == len(full) and all(pieces) and b"".join(pieces).decode(errors="replace") == full:
        return start, token_ids, num_same
    for count in range(num_agreeing_tokens(tokenizer, token_ids, full[:num_same]), 0, -1):
        try:
            return start, token_ids[:count], len(b"".join(pieces[:count]).decode())
        except UnicodeDecodeError:  # do not cut a character that ends in the next token
            continue
    return nothing
