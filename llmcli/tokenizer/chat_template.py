"""The chat template of a model: finds it, and renders conversations with it.

Refuses a folder without a template, and lists the ways to name one. Token ids are chat_encoding.py's.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmcli.errors import TokenizerError, UsageError
from llmcli.reading import CHAT_TEMPLATE
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.bounded_process import BoundedProcess
from llmcli.tokenizer.settings import read_optional_object

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
    special token does: the template `plain` has one.
    """

    def __init__(
        self,
        source: str,
        origin: str,
        special_tokens: Mapping[str, str],
        stop_strings: tuple[str, ...] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.source = source
        self.origin = origin
        self.special_tokens = dict(special_tokens)
        self.stop_strings = stop_strings
        self.variables = dict(variables or {})
        self._whole_roles: set[tuple[str, ...]] = set()  # of conversations written in full
        remedy = "choose another one with --chat-template FILE"
        self._process = BoundedProcess("llmcli.tokenizer.chat_sandbox", "jinja2", origin, remedy)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
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
        request = {"source": self.source, "variables": self.special_tokens | prompt | self.variables | variables}
        return str(self._process.ask(request, TIME_LIMIT_SECONDS))

    def refuse_dropped(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a conversation if the template leaves a message out, as many do with unknown roles.

        Renders the template with a different character in place of each content: a missing one means that its message
        was not written. The result depends on the roles, so the same roles are checked once.

        Raises: TokenizerError with the message's role, and as `render`.
        """
        roles = tuple(str(message["role"]) for message in messages)
        if roles in self._whole_roles:
            return
        marks = [chr(_FIRST_MARK + index % _NUM_MARKS) for index in range(len(messages))]
        pairs = zip(messages, marks, strict=True)
        text = self.render([{**message, "content": mark * _MARK_LENGTH} for message, mark in pairs])
        for index, mark in enumerate(marks):
            if mark not in text:
                raise TokenizerError(
                    f"{self.origin} leaves out message {index + 1} of {len(messages)}, whose role is "
                    f"{roles[index][:40]!r}; use another role, or choose another template with --chat-template FILE"
                )
        if len(self._whole_roles) == _MOST_KEPT_ROLES:
            self._whole_roles.clear()
        self._whole_roles.add(roles)

    def variable_names(self) -> list[str]:
        """The names that the template looks up, besides the conversation and the special tokens.

        Raises: TokenizerError if it is broken.
        """
        names: list[str] = self._process.ask({"source": self.source}, TIME_LIMIT_SECONDS)
        return [name for name in names if name not in (*CONVERSATION_VARIABLES, *self.special_tokens)]

    def close(self) -> None:
        """End the child process; the next rendering starts another. Without this it ends with the program."""
        self._process.close()


def load_chat_template(
    folder: Path, tokenizer: Tokenizer, choice: str | None = None, variables: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """The template of a model folder with that tokenizer, or the one chosen: a Jinja file, or the word `plain`.

    In a folder, chat_template.jinja wins over `chat_template` in tokenizer_config.json, which is a template or a list
    of named ones, from which `default` is taken. additional_chat_templates/ is ignored.

    Raises: UsageError if there is none, the chosen file cannot be read, or the template does not look up one of the
    `variables`; TokenizerError if the folder's is malformed.
    """
    template = _load(folder, tokenizer, choice, variables)
    if variables:
        names = template.variable_names()
        for name in variables:
            if name not in names:
                known = f"it has {', '.join(names)}" if names else "it has none"
                raise UsageError(f"--template-var {name}: {template.origin} has no such variable; {known}")
    return template


def _load(folder: Path, tokenizer: Tokenizer, choice: str | None, variables: Mapping[str, Any] | None) -> ChatTemplate:
    special_tokens = _special_tokens(tokenizer)
    if choice == PLAIN:  # begins like any text, without a BOS if the model never saw one
        first_ids = tokenizer.encode("")[:1]
        special_tokens["bos_token"] = tokenizer.piece(first_ids[0]) if first_ids == [tokenizer.bos_token_id] else ""
        return ChatTemplate(
            PLAIN_SOURCE, "the built-in chat template `plain`", special_tokens, (PLAIN_STOP_STRING,), variables
        )
    if choice is not None:
        source, origin = _read_chosen(Path(choice)), f"the chat template {choice}"
    else:
        source, origin = _find_in(folder)
    if not source.strip():
        raise TokenizerError(f"{origin} is empty; choose another one with --chat-template FILE")
    return ChatTemplate(source, origin, special_tokens, variables=variables)


def _read_chosen(path: Path) -> str:
    try:
        return CHAT_TEMPLATE.read_text(path)
    except TokenizerError as error:
        raise UsageError(f"{error}; expected a file that holds a Jinja template, or `{PLAIN}`") from error


def _find_in(folder: Path) -> tuple[str, str]:
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        return CHAT_TEMPLATE.read_text(path), f"the chat template {path}"

    path = folder / "tokenizer_config.json"
    source = read_optional_object(path).get("chat_template")
    if source is None:
        raise UsageError(
            f"{folder} has no chat template: there is no chat_template.jinja, and no chat_template in "
            f"tokenizer_config.json; give one with --chat-template FILE, or use --chat-template {PLAIN} for a "
            f"conversation in lines of `User:` and `Assistant:`"
        )
    origin = f"chat_template in {path}"
    if isinstance(source, list) and all(isinstance(entry, dict) for entry in source):
        named = {str(entry.get("name")): entry.get("template") for entry in source}
        if "default" not in named:
            names = ", ".join(named) or "none"
            raise TokenizerError(
                f"{origin} has no template named default, only {names}; choose one with --chat-template FILE"
            )
        source = named["default"]
    if not isinstance(source, str):
        raise TokenizerError(f"{origin} is {json.dumps(source)[:100]}, expected a template or a list of named ones")
    return source, f"the {origin}"


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


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out keys without a value; give the reasoning under each name that templates use."""
    given = {key: value for key, value in message.items() if value is not None}
    for field in REASONING_FIELDS:
        if field in given:
            return {"thinking": given[field], **given, "reasoning_content": given[field]}
    return given
