"""tokenizer.json, read by the `tokenizers` library.

Owns the byte form of each token, which follows from the decoder that the file declares; refuses unknown decoders.
"""

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from llmcli.errors import TokenizerError
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.settings import TokenizerSettings

LLAMA_SEQUENCE = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP_ONE_LEFT = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json. Tokens that tokenizer_config.json declares and the vocabulary has not got are ignored."""

    def __init__(self, path: Path, settings: TokenizerSettings) -> None:
        super().__init__(path, settings)
        self._tokenizer = _load(path, settings.special_tokens)
        self._lock = threading.Lock()
        self._piece_bytes, self.strips_leading_space = _decoding_rule(path, _state(self._tokenizer.decoder))
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        added_tokens = self._tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added_tokens.items() if token.special)
        bos_token = settings.bos_token or _template_bos(_state(self._tokenizer.post_processor))
        self.bos_token_id = self._find_declared("bos_token", bos_token, is_added=self._must_add_bos)
        eos_token_id = self._find_declared("eos_token", settings.eos_token, is_added=False)
        self.eos_token_ids = frozenset() if eos_token_id is None else frozenset({eos_token_id})

    def _encode(self, text: str, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
        # The library keeps this choice as a setting of the tokenizer. A second tokenizer would cost Llama 3 0.6 s and
        # 100 MB, so every call sets it anew, one call at a time.
        with self._lock:
            self._tokenizer.encode_special_tokens = not parse_special_tokens
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def token_id(self, content: str) -> int | None:
        """The id of a token given its vocabulary string, or None."""
        return self._tokenizer.token_to_id(content)

    def piece(self, token_id: int) -> str:
        """The vocabulary string of a token, such as "Ġthe"; "" for an id outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            return ""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to decoded text; b"" for a special token and for an id outside the vocabulary."""
        if token_id in self.special_token_ids:
            return b""
        return self._piece_bytes(self.piece(token_id))


def _load(path: Path, special_tokens: frozenset[str]) -> tokenizers.Tokenizer:
    """Loads the file without its truncation and padding, with the given tokens marked special if it has them.

    Some folders declare a token special in tokenizer_config.json and not in tokenizer.json; transformers merges the
    two. The mark is set in the JSON because adding the token to the loaded tokenizer may give it a second id.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        marked = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        unmarked = {content for content in special_tokens - marked if tokenizer.token_to_id(content) is not None}
        if unmarked:
            document = json.loads(path.read_bytes())
            added_tokens = [token for token in document["added_tokens"] if token["content"] not in unmarked]
            for content in unmarked:
                mark = {"id": tokenizer.token_to_id(content), "content": content, "special": True, "normalized": False}
                added_tokens.append({**mark, "single_word": False, "lstrip": False, "rstrip": False})
            document["added_tokens"] = sorted(added_tokens, key=lambda token: token["id"])
            tokenizer = tokenizers.Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the library raises nothing more specific
        reason = " ".join(str(error).split())
        raise TokenizerError(f"{path} is not a readable tokenizer.json ({reason}); download the file again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _state(component: Any) -> dict[str, Any]:
    """The JSON form of a decoder or post-processor, {} for none."""
    return {} if component is None else json.loads(component.__getstate__())


def _template_bos(post_processor: dict[str, Any]) -> str | None:
    """The special token that a post-processor puts before the text."""
    for processor in post_processor.get("processors", [post_processor]):
        if processor.get("type") == "TemplateProcessing" and "SpecialToken" in processor["single"][0]:
            return str(processor["single"][0]["SpecialToken"]["id"])
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
    if steps[:3] == LLAMA_SEQUENCE and steps[3:] in ([], [STRIP_ONE_LEFT]):
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


def _byte_level_bytes(piece: str) -> bytes:
    # As the library does, a token with any character outside the alphabet, such as an added token with a space in
    # it, stands for itself.
    if all(character in _BYTE_LEVEL_ALPHABET for character in piece):
        return bytes(_BYTE_LEVEL_ALPHABET[character] for character in piece)
    return piece.encode()


def _byte_fallback_bytes(piece: str) -> bytes:
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
        return bytes.fromhex(piece[3:5])
    return piece.replace("▁", " ").encode()
