"""The interface of tokenizers, the one rule for the beginning-of-sequence (BOS) token, and decoding as a stream.

Refuses text that has no UTF-8 form. Two libraries do the actual tokenizing.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from llmcli.errors import TokenizerError, UsageError
from llmcli.tokenizer.settings import MAX_TOKEN_ID, TokenizerSettings


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
    strips it here; False when the text continues a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_within_character = False
        self._strips_next_space = at_start and tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """The text that this token completes, "" if its bytes end within a character."""
        text = None if self._is_within_character else self._tokenizer.token_text(token_id)
        if text is None:
            text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
            self._is_within_character = bool(self._utf8.getstate()[0])
        return self._strip(text) if self._strips_next_space else text

    def flush(self) -> str:
        """The rest, at the end of the tokens: a replacement character if a character was left incomplete."""
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
