"""tokenizer.json, read by the `tokenizers` library.

Owns the byte form of each token, which follows from the decoder that the file declares; refuses unknown decoders.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tokenizers

from llmcli.errors import TokenizerError
from llmcli.foreign_errors import foreign_errors_explained
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.document import LLAMA_DECODERS, STRIP_ONE_LEFT, read_document
from llmcli.tokenizer.encoding_process import EncodingProcess
from llmcli.tokenizer.settings import AddedToken, TokenizerSettings


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json.

    Tokens that the files beside it add go in as transformers adds them: those with an id in the order of their ids,
    whether or not the vocabulary has them. A token that is only named special counts if the vocabulary has it;
    transformers would give it an id beyond the vocabulary, which no model was trained with. A named token is special,
    even if tokenizer.json calls it ordinary. Where transformers takes its class LlamaTokenizer, the file is read as
    that class does.
    """

    def __init__(self, path: Path, content: bytes, settings: TokenizerSettings) -> None:
        self._tokenizer, self._encoder, settings = _load(path, content, settings)
        super().__init__(path, settings)
        self._lock = threading.Lock()
        self._piece_bytes, self.strips_leading_space = _decoding_rule(path, _state(self._tokenizer.decoder))
        self.vocab_size = self._checked_vocab_size(max(self._tokenizer.get_vocab().values(), default=-1) + 1)
        added_tokens = self._tokenizer.get_added_tokens_decoder()
        self._special_tokens = {token_id: token.content for token_id, token in added_tokens.items() if token.special}
        self.special_token_ids = frozenset(self._special_tokens)
        is_normalized = any(token.special and token.normalized for token in added_tokens.values())
        self.finds_other_spellings = is_normalized and self._tokenizer.normalizer is not None
        self.bos_token_id = _first_added_id(path, _state(self._tokenizer.post_processor))
        if self.bos_token_id is None:
            self.bos_token_id = self._find_declared("bos_token", settings.bos_token, is_added=self._must_add_bos)
        eos_token_id = self._find_declared("eos_token", settings.eos_token, is_added=False)
        self.eos_token_ids = frozenset() if eos_token_id is None else frozenset({eos_token_id})

    def _encode(self, text: str, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
        if self._encoder is not None:
            return self._encoder.encode(text, add_special_tokens, parse_special_tokens)
        # The library keeps this choice as a setting of the tokenizer. A second tokenizer would cost Llama 3 0.6 s and
        # 100 MB, so every call sets it anew, one call at a time.
        with self._lock, _library_errors(f"{self._path} cannot encode the text"):
            self._tokenizer.encode_special_tokens = not parse_special_tokens
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def token_id(self, content: str) -> int | None:
        """The id of a token given its vocabulary string, or None."""
        return self._tokenizer.token_to_id(content)

    def piece(self, token_id: int) -> str:
        """The vocabulary string of a token, such as "Ġthe"; "" for an id outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            return ""
        if token_id in self._special_tokens:  # of one that it finds in normalized text the library gives that form
            return self._special_tokens[token_id]
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to decoded text; b"" for a special token and for an id outside the vocabulary."""
        if token_id in self.special_token_ids:
            return b""
        return self._piece_bytes(self.piece(token_id))


def _load(
    path: Path, content: bytes, settings: TokenizerSettings
) -> tuple[tokenizers.Tokenizer, EncodingProcess | None, TokenizerSettings]:
    """The file without its truncation and padding and with the tokens that the settings add, and all settings.

    If its steps are not known to be quick, the tokenizer is for looking up tokens alone, and the process encodes.
    """
    with _library_errors(f"{path} is not a readable tokenizer.json", "; download the file again"):
        document = read_document(content.decode())
        if settings.llama_tokens is not None:
            as_llama = document.as_llama_tokenizer(
                is_legacy=settings.legacy,
                adds_prefix_space=settings.add_prefix_space,
                is_complete=settings.is_complete,
            )
            if as_llama is not document:
                document = as_llama
                settings = replace(settings, named_tokens={**settings.llama_tokens, **settings.named_tokens})
        is_quick = document.is_known_to_be_quick()
        text = (document if is_quick else document.for_looking_up()).text()
        with _stderr_kept_clean():
            tokenizer = tokenizers.Tokenizer.from_str(text)
        added_tokens = _added_tokens(tokenizer, settings)
        tokenizer.add_tokens([tokenizers.AddedToken(**token) for token in added_tokens])
    return tokenizer, None if is_quick else EncodingProcess(path, document.text(), added_tokens), settings


def _added_tokens(tokenizer: tokenizers.Tokenizer, settings: TokenizerSettings) -> list[dict[str, Any]]:
    """What the library is to add to a loaded tokenizer, as arguments of its `AddedToken`.

    A token that it has already takes over the behaviour given here; once special, it remains so.
    Source: transformers 5.23, `TokenizersBackend.__init__` and `PreTrainedTokenizerBase._from_pretrained`.
    """
    known_ids = tokenizer.get_added_tokens_decoder()
    known = {token.content: token for token in known_ids.values()}
    added = {
        token.content: token
        for token_id, token in settings.added_tokens.items()
        if settings.is_complete or token_id not in known_ids  # tokenizer.json goes before added_tokens.json
    }
    for content, token in settings.special_tokens.items():
        if content in added:
            added[content] = replace(added[content], special=True)
        elif content in known:
            old = known[content]
            if content not in settings.named_contents:
                continue  # what tokenizer.json calls ordinary remains so if it is only among the extra ones
            added[content] = AddedToken(content, True, old.lstrip, old.rstrip, old.single_word, old.normalized)
        elif tokenizer.token_to_id(content) is not None:
            added[content] = token
    for content, token in added.items():
        if content in known and known[content].special:
            added[content] = replace(token, special=True)
    return [asdict(token) for token in added.values()]


@contextmanager
def _stderr_kept_clean() -> Iterator[None]:
    """Drop what the library itself writes to stderr: a panic's report, of up to fifty lines, before the exception."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextmanager
def _library_errors(what: str, next_step: str = "") -> Iterator[None]:
    """Raise a TokenizerError in place of what the library raises, which is a bare Exception or a panic."""
    with foreign_errors_explained(what, TokenizerError):
        try:
            yield
        except Exception as error:
            if type(error) not in (Exception, TokenizerError):
                raise
            reason = " ".join(str(error).split())
            raise TokenizerError(f"{what} ({reason}){next_step}") from error


def _state(component: Any) -> dict[str, Any]:
    """The JSON form of a decoder or post-processor, {} for none."""
    return {} if component is None else json.loads(component.__getstate__())


def _first_added_id(path: Path, post_processor: dict[str, Any]) -> int | None:
    """The id that a post-processor puts before every text.

    Raises: TokenizerError if it adds a token without an id; the library would fail only when it encodes.
    """
    for processor in reversed(post_processor.get("processors", [])):  # each adds around what the one before it made
        if (token_id := _first_added_id(path, processor)) is not None:
            return token_id
    if "cls" in post_processor:  # BertProcessing and RobertaProcessing
        return int(post_processor["cls"][1])
    parts = post_processor.get("single", [])
    for part in parts:
        if "SpecialToken" in part and (name := part["SpecialToken"]["id"]) not in post_processor["special_tokens"]:
            raise TokenizerError(f"the post_processor of {path} adds {name!r} without an id; download the file again")
    for part in parts:
        if "Sequence" in part:
            break
        for token_id in post_processor["special_tokens"][part["SpecialToken"]["id"]]["ids"]:
            return int(token_id)
    return None


def _decoding_rule(path: Path, decoder: dict[str, Any]) -> tuple[Callable[[str], bytes], bool]:
    """How a vocabulary string becomes bytes, and whether the text loses its first space.

    The library's Metaspace drops every space of the first token; we drop one, so that a text that begins with a run
    of spaces keeps the others.

    Raises: TokenizerError, naming the decoder, if its rule is not one of the three known ones.
    Source: huggingface/tokenizers, tokenizers/src/decoders and pre_tokenizers/byte_level.rs, metaspace.rs.
    """
    steps = decoder.get("decoders", [decoder])
    types = [str(step.get("type")) for step in steps]
    if types == ["ByteLevel"]:
        return _byte_level_bytes, False
    if types == ["Metaspace"]:
        replacement = steps[0]["replacement"]
        return lambda piece: piece.replace(replacement, " ").encode(), steps[0]["prepend_scheme"] != "never"
    if steps[:3] == LLAMA_DECODERS and steps[3:] in ([], [STRIP_ONE_LEFT]):
        return _byte_fallback_bytes, len(steps) == 4
    found = "no decoder" if not decoder else "the decoder " + ", ".join(types)
    raise TokenizerError(
        f"{path} declares {found}, expected ByteLevel, Metaspace, or Replace ▁, ByteFallback, Fuse and perhaps Strip "
        f"one left space; remove the file if the folder also has a tokenizer.model, else this model cannot be run"
    )


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte. Source: `bytes_to_unicode` in openai/gpt-2, encoder.py."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL_ALPHABET = _byte_level_alphabet()
_BYTE_LEVEL_CHARACTERS = frozenset(_BYTE_LEVEL_ALPHABET)
_BYTE_LEVEL_BYTES = str.maketrans(_BYTE_LEVEL_ALPHABET)


def _byte_level_bytes(piece: str) -> bytes:
    # As the library does, a token with any character outside the alphabet, such as an added token with a space in
    # it, stands for itself.
    if _BYTE_LEVEL_CHARACTERS.issuperset(piece):
        return piece.translate(_BYTE_LEVEL_BYTES).encode("latin-1")
    return piece.encode()


def _byte_fallback_bytes(piece: str) -> bytes:
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
        return bytes.fromhex(piece[3:5])
    return piece.replace("▁", " ").encode()
