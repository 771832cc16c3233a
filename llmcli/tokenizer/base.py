"""The interface of tokenizers, the one rule for the beginning-of-sequence (BOS) token, and decoding as a stream.

Refuses text that has no UTF-8 form. Two libraries do the actual tokenizing.
"""

import codecs
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llmcli.errors import TokenizerError, UsageError
from llmcli.reading import TOKENIZER_SETTINGS

# Reads the small JSON files next to a tokenizer: tokenizer_config.json, special_tokens_map.json, added_tokens.json, and
# config.json where it names the tokenizer's class.
#
# Refuses malformed values; every other key of these files is ignored.

# Source: transformers 5.23, `PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES`.
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Source: transformers 5.23, `LlamaTokenizer.__init__`.
LLAMA_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# Types that this program runs, for which transformers' AutoTokenizer uses another class nevertheless.
OTHER_CLASS_TYPES = ("internlm3", "ministral", "mistral", "qwen2")
MAX_TOKEN_ID = 2**22  # four times the largest vocabulary known; loops over all ids must end


@dataclass(frozen=True)
class AddedToken:
    """A token outside the trained vocabulary; `lstrip` and `rstrip` let it swallow the white space around it.

    With `normalized` it is looked for in the normalized text, as in the `tokenizers` library.
    """

    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class TokenizerSettings:
    """The declarations of one model folder; the defaults are those of a folder without any of these files.

    `named_tokens` holds those with a name, as in `"pad_token": "<pad>"`; `extra_tokens` the special ones without.
    `added_tokens` is by id; `is_complete` means that it is `added_tokens_decoder`, and wins over tokenizer.json.
    `legacy` is Hugging Face's word for a LLaMA tokenizer that puts a space after each special token and not only at
    the start of the text; without `add_prefix_space` it puts none anywhere. `llama_tokens` are None unless
    transformers reads the folder with its class LlamaTokenizer: the tokens that this class names itself, since no file
    does.
    """

    named_tokens: Mapping[str, AddedToken] = field(default_factory=dict)
    extra_tokens: tuple[AddedToken, ...] = ()
    added_tokens: Mapping[int, AddedToken] = field(default_factory=dict)
    is_complete: bool = False
    add_bos_token: bool | None = None  # None: not declared
    add_eos_token: bool = False
    legacy: bool = False
    add_prefix_space: bool = True
    llama_tokens: Mapping[str, AddedToken] | None = None

    @property
    def bos_token(self) -> str | None:
        """The content of the named BOS token, None if there is none."""
        return self._named("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The content of the named EOS token, None if there is none."""
        return self._named("eos_token")

    @cached_property
    def special_tokens(self) -> Mapping[str, AddedToken]:
        """Every token that must never be shown, by its content.

        These are the named ones, the added ones called special, and the extra ones, except an extra one that is an
        ordinary added token.
        """
        added = {token.content: token for token in self.added_tokens.values()}
        tokens: dict[str, AddedToken] = {}
        for token in [*self.named_tokens.values(), *self.extra_tokens]:
            # A name without a behaviour does not change the behaviour given by another.
            if token.content and (token.content not in tokens or token != AddedToken(token.content, special=True)):
                tokens[token.content] = token
        ordinary = {content for content, token in added.items() if not token.special} - self.named_contents
        special = {content: replace(token, special=True) for content, token in added.items()}
        return {
            content: special.get(content, token) for content, token in tokens.items() if content not in ordinary
        } | {content: token for content, token in added.items() if token.special}

    @cached_property
    def named_contents(self) -> frozenset[str]:
        """The strings of the named tokens."""
        return frozenset(token.content for token in self.named_tokens.values())

    def _named(self, name: str) -> str | None:
        return self.named_tokens[name].content or None if name in self.named_tokens else None


def read_settings(folder: Path) -> TokenizerSettings:
    """Reads the declarations of a model folder; a missing file declares nothing.

    As in transformers, a tokenizer_config.json with `added_tokens_decoder` is complete, and the two older files are
    read only if it has none. Named tokens are the seven of `TOKEN_NAMES`, every other key that ends in `_token`, and
    those of an `extra_special_tokens` that is an object. `additional_special_tokens` is that key's older name.

    Raises: TokenizerError, naming the file, for broken JSON or a value of the wrong type.
    Source: transformers 5.23, `_from_pretrained` and `__init__` of `PreTrainedTokenizerBase`.
    """
    config_path, token_map_path = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    config = read_optional_object(config_path)
    is_complete = config.get("added_tokens_decoder") is not None
    token_map = {} if is_complete else read_optional_object(token_map_path)

    named = _named_tokens(token_map_path, token_map) | _named_tokens(config_path, config)
    for name in TOKEN_NAMES:  # for these the older file wins, also with a null
        if name in token_map:
            named[name] = _token(token_map_path, name, token_map[name])
    extra: dict[str, AddedToken] = {}
    for path, declared in ((config_path, config), (token_map_path, token_map)):
        more_named, more = _extra_special_tokens(path, declared, is_first=not extra)
        named |= more_named
        extra |= {token.content: token for token in more}

    if is_complete:
        added_tokens = _added_tokens_decoder(config_path, config["added_tokens_decoder"])
    else:
        # As in transformers here: the seven names, and no object in tokenizer_config.json.
        names = [n for n in TOKEN_NAMES if n in token_map or isinstance(config.get(n), str)]
        declared_special = {token.content for n in names if (token := named[n]) is not None} | extra.keys()
        added_tokens = _added_tokens_file(folder / "added_tokens.json", declared_special)
    add_prefix_space = _flag(config_path, config, "add_prefix_space")
    return TokenizerSettings(
        named_tokens={name: token for name, token in named.items() if token is not None},
        extra_tokens=tuple(extra.values()),
        added_tokens=dict(sorted(added_tokens.items())),
        is_complete=is_complete,
        add_bos_token=_flag(config_path, config, "add_bos_token"),
        add_eos_token=bool(_flag(config_path, config, "add_eos_token")),
        legacy=bool(_flag(config_path, config, "legacy")),
        add_prefix_space=add_prefix_space is not False,
        llama_tokens=_llama_tokens(config, read_optional_object(folder / "config.json"), named),
    )


def read_optional_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of settings, {} if there is no such file.

    Raises: TokenizerError, as `SmallFile.read_json_object`.
    """
    # A broken link counts as present, so that its name is reported.
    return TOKENIZER_SETTINGS.read_json_object(path) if os.path.lexists(path) else {}


def _flag(path: Path, config: dict[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise TokenizerError(f"{name} in {path} is {_shown(value)}, expected true, false or null")
    return value


def _llama_tokens(
    config: dict[str, Any], model_config: dict[str, Any], named: Mapping[str, AddedToken | None]
) -> dict[str, AddedToken] | None:
    """See `TokenizerSettings`. Source: transformers 5.23, `AutoTokenizer.from_pretrained`."""
    tokenizer_class = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    is_llama = tokenizer_class in ("LlamaTokenizer", "LlamaTokenizerFast")
    if not is_llama or model_config.get("model_type") in OTHER_CLASS_TYPES:
        return None
    return {name: AddedToken(content, special=True) for name, content in LLAMA_NAMES.items() if name not in named}


def _token(path: Path, name: str, value: Any) -> AddedToken | None:
    """A special token in the form of these files: null, a string, or an object with "content"."""
    if value is None:
        return None
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return replace(_added_token(value, {"special": True}), special=True)
    expected = 'a string, an object with "content", or null'
    raise TokenizerError(f"{name} in {path} is {_shown(value)}, expected {expected}")


def _added_token(entry: dict[str, Any], defaults: dict[str, bool]) -> AddedToken:
    behaviour = {name: bool(entry.get(name)) for name in ("special", "lstrip", "rstrip", "single_word")} | defaults
    return AddedToken(entry["content"], **behaviour, normalized=bool(entry.get("normalized", not behaviour["special"])))


def _named_tokens(path: Path, declared: dict[str, Any]) -> dict[str, AddedToken | None]:
    """Tokens by name; a key that ends in `_token` and is not one of the seven counts only if it holds a token."""
    tokens = {name: _token(path, name, declared[name]) for name in TOKEN_NAMES if name in declared}
    for name, value in declared.items():
        is_token = isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))
        if name.endswith("_token") and name not in tokens and is_token:
            tokens[name] = _token(path, name, value)
    return tokens


def _extra_special_tokens(
    path: Path, declared: dict[str, Any], is_first: bool
) -> tuple[dict[str, AddedToken | None], list[AddedToken]]:
    """The tokens with a name and those without, in `extra_special_tokens`.

    Its older name counts only if nothing else does, as in transformers.
    """
    name = "extra_special_tokens"
    if is_first and not declared.get(name):
        name = "additional_special_tokens"
    values = declared.get(name) or []
    if isinstance(values, dict):
        return {key: _token(path, name, value) for key, value in values.items()}, []
    if not isinstance(values, list):
        raise TokenizerError(f"{name} in {path} is {_shown(values)}, expected a list of tokens or an object")
    return {}, [token for value in values if (token := _token(path, name, value)) is not None]


def _added_tokens_decoder(path: Path, entries: Any) -> dict[int, AddedToken]:
    if not isinstance(entries, dict):
        raise TokenizerError(f"added_tokens_decoder in {path} is {_shown(entries)}, expected an object")
    tokens = {}
    for key, entry in entries.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        is_number = key.isascii() and key.isdigit() and len(key) < 20
        if not is_number or not isinstance(content, str) or not content:
            expected = 'a token id with an object that has "content"'
            raise TokenizerError(f"added_tokens_decoder in {path} holds {_shown({key: entry})}, expected {expected}")
        tokens[_token_id(path, int(key), content)] = _added_token(entry, {})
    return tokens


def _added_tokens_file(path: Path, special: set[str]) -> dict[int, AddedToken]:
    tokens = {}
    for content, token_id in read_optional_object(path).items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not content:
            raise TokenizerError(f"{path} holds {_shown({content: token_id})}, expected token strings with ids")
        is_special = content in special
        tokens[_token_id(path, token_id, content)] = AddedToken(content, is_special, normalized=not is_special)
    return tokens


def _token_id(path: Path, token_id: int, content: str) -> int:
    if not 0 <= token_id <= MAX_TOKEN_ID:
        raise TokenizerError(f"{path} gives {_shown(content)} the id {token_id}, expected 0 to {MAX_TOKEN_ID}")
    return token_id


def _shown(value: Any) -> str:
    """The beginning of a wrong value, as JSON: it goes to a terminal, and may be long."""
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class Tokenizer(ABC):
    """Turns text into token ids and token ids into bytes. No call changes the result of another.

    `vocab_size` is one more than the highest token id. `special_token_ids` are never shown in output.
    `strips_leading_space`: decoded text loses the first space of its first token, because the encoder put one there.
    `finds_other_spellings`: a text may hold special tokens in other spellings, as they are looked for in the normalized
    text.

    **BOS.** `encode` gives the ids of transformers 5.23 (with a tokenizer.model those of sentencepiece, which differ in
    runs of spaces), except that a BOS is never doubled and a declared one never lost:

    1. tokenizer.json: its post-processor decides alone; `add_bos_token` and `add_eos_token` are ignored.
    2. tokenizer.model: BOS is added unless tokenizer_config.json says `add_bos_token: false`, and EOS if it says
       `add_eos_token: true`. By default transformers 5 adds no BOS; transformers 4, llama.cpp and Meta's own code add
       it, and LLaMA was trained with it.
    3. A text that itself begins with the BOS string does not get another one (transformers would add it).
    4. `add_bos_token: true` adds a BOS also if the post-processor of tokenizer.json puts nothing before a text.
       transformers 5 loses it there; transformers 4 added it for LlamaTokenizerFast, which DeepSeek's distilled models
       rely on. Whatever the post-processor puts there is the BOS, whatever `bos_token` names.

    Source: transformers 5.23, `_from_pretrained` in tokenization_utils_base.py, which drops both flags when there is
    a tokenizer.json, and `TokenizersBackend.update_post_processor`.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    special_token_ids: frozenset[int]
    strips_leading_space: bool
    finds_other_spellings = False

    def __init__(self, path: Path, settings: TokenizerSettings) -> None:
        self._path = path
        self._settings = settings
        self._must_add_bos = settings.add_bos_token is True

    @property
    def named_tokens(self) -> dict[str, str]:
        """The named tokens, such as `pad_token`, by the small files or the class that they name."""
        return {name: token.content for name, token in self._settings.named_tokens.items()}

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True) -> list[int]:
        """The token ids of a text.

        `add_special_tokens` adds BOS (and EOS) as the class docstring says. With `parse_special_tokens=False` the
        string of a special token inside the text, such as "<|eot_id|>", is ordinary text. Added tokens that are not
        special, such as "<tool_call>", are words of the vocabulary and are found either way, as with the
        `encode_special_tokens` of the tokenizers library.

        Raises: UsageError for text with a lone surrogate, which is how Python carries bytes that are not UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at character "
                f"{error.start}; pass the text as UTF-8"
            ) from error
        token_ids = self._encode(text, add_special_tokens, parse_special_tokens)
        if not add_special_tokens or self.bos_token_id is None:
            return token_ids
        if token_ids[:2] == [self.bos_token_id, self.bos_token_id]:
            return token_ids[1:]
        if self._must_add_bos and token_ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *token_ids]
        return token_ids

    @abstractmethod
    def _encode(self, text: str, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
        """The library's ids; `encode` adds a BOS that only `add_bos_token` asks for."""

    @abstractmethod
    def token_id(self, content: str) -> int | None:
        """The id of a token given its vocabulary string, or None."""

    @abstractmethod
    def piece(self, token_id: int) -> str:
        """The vocabulary string of a token, such as "▁the" or "Ġthe"; "" for an id outside the vocabulary."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to decoded text; b"" for a special token and for an id outside the vocabulary.

        Models pad their embedding, so such ids do occur.
        """

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token. A longer text has more than one token."""
        ids = range(self.vocab_size)
        return max((max(len(self.token_bytes(i)), len(self.special_text(i).encode())) for i in ids), default=1)

    def special_text(self, token_id: int) -> str:
        """The string of a special token, which decoded text leaves out; "" for any other token."""
        return self.piece(token_id) if token_id in self.special_token_ids else ""

    def token_text(self, token_id: int) -> str | None:
        """What a token adds to decoded text if its bytes are whole characters, else None. Computed once."""
        texts = self._texts
        if token_id not in texts:
            try:
                texts[token_id] = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                texts[token_id] = None
        return texts[token_id]

    @cached_property
    def _texts(self) -> dict[int, str | None]:
        return {}

    def _checked_vocab_size(self, size: int) -> int:
        """Raises: TokenizerError for a vocabulary so large that a loop over its ids would not end."""
        if size > MAX_TOKEN_ID + 1:
            raise TokenizerError(f"{self._path} has the token id {size - 1}, expected ids up to {MAX_TOKEN_ID}")
        return size

    def _find_declared(self, name: str, content: str | None, *, is_added: bool) -> int | None:
        """The id of the declared bos_token or eos_token; None if not declared or not in the vocabulary.

        Raises: TokenizerError if it is not in the vocabulary but must be added to every text.
        """
        token_id = None if content is None else self.token_id(content)
        if content is not None and token_id is None and is_added:
            raise TokenizerError(
                f"{self._path.parent / 'tokenizer_config.json'} has add_{name}: true, but {self._path.name} has no "
                f"token {content!r}; the files do not belong together, download both again"
            )
        return token_id


# Token ids to text, one id at a time.
#
# Handles incomplete UTF-8 between two tokens, and the leading space; never emits half a character.


class StreamDecoder:
    """Turns token ids into text as they come. All `push` results and one `flush` together equal `decode`.

    `at_start` means that nothing visible comes before these tokens, so a tokenizer that strips the leading space
    strips it here; False when the text continues a prompt. `shown` are special tokens that the text names.
    """

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool, shown: Collection[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_within_character = False
        self._strips_next_space = at_start and tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """The text that this token completes, "" if its bytes end within a character."""
        if token_id in self._shown:
            return self.flush() + self._strip(self._tokenizer.special_text(token_id))
        text = None if self._is_within_character else self._tokenizer.token_text(token_id)
        if text is None:
            text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
            self._is_within_character = bool(self._utf8.getstate()[0])
        return self._strip(text) if self._strips_next_space else text

    def flush(self) -> str:
        """The rest, at the end of the tokens: a replacement character if a character was left incomplete."""
        self._is_within_character = False
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strips_next_space and text:
            self._strips_next_space = False
            return text.removeprefix(" ")
        return text


def decode(tokenizer: Tokenizer, token_ids: Iterable[int], *, at_start: bool) -> str:
    """The text of all these tokens at once; bytes that are not UTF-8 become replacement characters."""
    text = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids).decode(errors="replace")
    return text.removeprefix(" ") if at_start and tokenizer.strips_leading_space else text


# `NoText`: a tokenizer without words, for benchmarks of shapes.


class NoText(Tokenizer):
    """Stands for a missing tokenizer: shapes have no words, and the figures need none."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.bos_token_id = None
        self.eos_token_ids = self.special_token_ids = frozenset()
        self.strips_leading_space = False

    def _encode(self, text: str, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
        return []

    def token_id(self, content: str) -> int | None:
        """No word has an id."""
        return None

    def piece(self, token_id: int) -> str:
        """No token has a piece."""
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        """No token has bytes."""
        return b""
