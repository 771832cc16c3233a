"""tokenizer.json: decides whether the `tokenizers` library may run it here, or in a child process, and reads it.

Owns the byte form of each token, which follows from the decoder that the file declares; refuses unknown decoders.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers

from llmcli.errors import TokenizerError, foreign_errors_explained
from llmcli.reading import check_value, parse_json
from llmcli.tokenizer.base import AddedToken, Tokenizer, TokenizerSettings
from llmcli.tokenizer.bounded_process import BoundedProcess

# A tokenizer.json as text for the `tokenizers` library, and whether the library may be trusted with it.
#
# Owns the parts of the file before its model. The model stays text: reading a vocabulary takes the library half a
# second, and Python as long again.
#
# **Trust.** The library runs any regular expression in the file, and one such as `(a|aa)+$` never ends; a few
# replacements of a character by ten make gigabytes of a word. So the steps before the model are compared with a list of
# those known to be quick: the expressions of well-known models by their exact text, and steps without one that cannot
# lengthen a text much. A file with any other step is not refused. A child process runs it with bounds on time and
# memory, which costs another load of the file (see `EncodingProcess`); decoding is this program's own and runs no
# expression.

MAX_STEPS = 32
LONGEST_PREFIX = 8
PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")
LLAMA_DECODERS = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP_ONE_LEFT = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
LLAMA_BPE = {
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": True,
    "byte_fallback": True,
    "ignore_merges": False,
}
UNUSED_PARTS = ("truncation", "padding")  # used in training; here they would cut or lengthen a prompt

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
)
# Each was run on long texts of one character and of two; none takes more than a few microseconds a character.
KNOWN_PATTERNS = frozenset(
    {
        _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _END,  # Llama 3, SmolLM3
        _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _END,  # Qwen 2, Qwen 3
        _TEKKEN_WORDS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # Mistral Nemo and later
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        r"\p{N}{1,3}",
        r"\p{N}",
        r"\d",
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
    }
)
# Without an expression from the file, and the result is at most a few times as long.
_SAFE_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "ByteLevel"}
_SAFE_SPLITTERS = {"Punctuation", "UnicodeScripts", "Whitespace", "WhitespaceSplit", "CharDelimiterSplit"}
_SAFE_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Metaspace", "BertPreTokenizer", *_SAFE_SPLITTERS}


@dataclass(frozen=True)
class TokenizerDocument:
    """The parts of a tokenizer.json. `head` holds JSON values, at least those of `PARTS`."""

    head: dict[str, Any]
    model: str

    def text(self) -> str:
        """A tokenizer.json of these parts. `head` comes last, as the library takes the last of repeated keys: so
        nothing that follows the model in the file matters."""
        return f'{{"model": {self.model}, {json.dumps(self.head)[1:]}'

    def for_looking_up(self) -> "TokenizerDocument":
        """Without the steps not known to be quick; it has the same tokens, but gives a text other ids.

        The library passes added tokens through the normalizer, so a quick one stays.
        """
        normalizer = self.head["normalizer"] if self._has_quick_normalizer() else None
        return replace(self, head=self.head | {"normalizer": normalizer, "pre_tokenizer": None})

    def as_llama_tokenizer(self, *, is_legacy: bool, adds_prefix_space: bool, is_complete: bool) -> "TokenizerDocument":
        """The file as transformers' LlamaTokenizer changes it: it replaces normalizer, steps and decoder.

        With `is_complete` it takes the added tokens of tokenizer_config.json alone. A byte-level file stays as it is.

        Source: transformers 5.23, `LlamaTokenizer.__init__`, and `AutoTokenizer.from_pretrained` for byte-level files.
        """
        if '"ByteLevel"' in json.dumps(self.head) or re.search(r'"type"\s*:\s*"BPE"', self.model) is None:
            return self
        scheme = ("always" if is_legacy else "first") if adds_prefix_space else "never"
        metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
        decoders = [*LLAMA_DECODERS, STRIP_ONE_LEFT] if adds_prefix_space else LLAMA_DECODERS
        head = {
            "normalizer": None,
            "pre_tokenizer": metaspace,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "added_tokens": [] if is_complete else self.head["added_tokens"],
        }
        # The library takes the last of repeated keys.
        return replace(self, head=self.head | head, model=f"{self.model.rstrip()[:-1]}, {json.dumps(LLAMA_BPE)[1:]}")

    def is_known_to_be_quick(self) -> bool:
        """Whether every step is a known one; see **Trust** above."""
        pre_tokenizers = list(_steps(self.head["pre_tokenizer"], "pretokenizers"))
        processors = list(_steps(self.head["post_processor"], "processors"))
        return (
            self._has_quick_normalizer()
            and len(pre_tokenizers) + len(processors) <= MAX_STEPS
            and all(map(_is_quick_pre_tokenizer, pre_tokenizers))
            and all(map(_is_quick_processor, processors))
        )

    def _has_quick_normalizer(self) -> bool:
        normalizers = list(_steps(self.head["normalizer"], "normalizers"))
        return len(normalizers) <= MAX_STEPS and all(map(_is_quick_normalizer, normalizers))


def read_document(text: str) -> TokenizerDocument:
    """The parts of a tokenizer.json.

    Raises: TokenizerError, without the name of the file, if it is not JSON, or its nesting or digits exceed a bound.
    """
    try:
        document = _split_before_model(text) or _split_anywhere(text)
        check_value(document.head)
    except RecursionError as error:
        raise TokenizerError("nested too deeply") from error
    except ValueError as error:
        raise TokenizerError(str(error)) from error
    head = {name: None for name in PARTS} | document.head | {name: None for name in UNUSED_PARTS}
    return replace(document, head=head | {"added_tokens": head["added_tokens"] or []})


def _split_before_model(text: str) -> TokenizerDocument | None:
    """The parts, if they are in the library's order, with the model last; else None."""
    decoder = json.JSONDecoder()
    gap = re.compile(r"[ \t\r\n]*([{:,])[ \t\r\n]*")
    head: dict[str, Any] = {}
    position = 0
    while (match := gap.match(text, position)) is not None and text[match.end() : match.end() + 1] == '"':
        key, position = decoder.raw_decode(text, match.end())
        match = gap.match(text, position)
        if match is None or match[1] != ":":
            return None
        if key == "model":
            end = text.rstrip(" \t\r\n")
            return TokenizerDocument(head, end[match.end() : -1]) if set(PARTS) <= head.keys() else None
        head[key], position = decoder.raw_decode(text, match.end())
    return None


def _split_anywhere(text: str) -> TokenizerDocument:
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a JSON {type(value).__name__}, expected an object")
    head = {key: part for key, part in value.items() if key != "model"}
    return TokenizerDocument(head, json.dumps(value.get("model")))


def _steps(component: Any, name: str) -> Iterator[Any]:
    """The steps of a component; those of a Sequence one by one."""
    if isinstance(component, dict) and component.get("type") == "Sequence" and isinstance(component.get(name), list):
        for step in component[name]:
            yield from _steps(step, name)
    elif component is not None:
        yield component


def _is_quick_normalizer(step: Any) -> bool:
    if not isinstance(step, dict):
        return False
    if step.get("type") == "Prepend":
        prefix = step.get("prepend")
        return isinstance(prefix, str) and len(prefix) <= LONGEST_PREFIX
    if step.get("type") == "Replace":
        pattern, content = step.get("pattern"), step.get("content")
        if not isinstance(pattern, dict) or pattern.keys() != {"String"}:
            return False
        string = pattern["String"]
        return isinstance(string, str) and isinstance(content, str) and len(content) <= len(string)
    return str(step.get("type")) in _SAFE_NORMALIZERS


def _is_quick_pre_tokenizer(step: Any) -> bool:
    if not isinstance(step, dict):
        return False
    if step.get("type") != "Split":
        return str(step.get("type")) in _SAFE_PRE_TOKENIZERS
    pattern = step.get("pattern")
    if not isinstance(pattern, dict) or len(pattern) != 1:
        return False
    return isinstance(pattern.get("String"), str) or str(pattern.get("Regex")) in KNOWN_PATTERNS


def _is_quick_processor(step: Any) -> bool:
    if not isinstance(step, dict):
        return False
    if step.get("type") == "TemplateProcessing":
        return isinstance(step.get("single"), list) and len(step["single"]) <= MAX_STEPS
    return step.get("type") == "ByteLevel"


# The parent's side of the child process that encodes with a tokenizer.json whose steps are not known to be quick.
#
# The limits are far above what any tokenizer takes that ends at all.

LIMIT_SECONDS = 4
# A busy machine loads ten million characters a second and encodes one million.
FILE_CHARACTERS_A_SECOND = 1_000_000
TEXT_CHARACTERS_A_SECOND = 100_000


class EncodingProcess:
    """Encodes with one tokenizer.json; the process starts with the first text."""

    def __init__(self, path: Path, document: str, added_tokens: Sequence[dict[str, Any]]) -> None:
        setup = {"document": document, "added_tokens": list(added_tokens)}
        remedy = "its expressions or steps do not suit this text"
        limit_seconds = LIMIT_SECONDS + len(document) // FILE_CHARACTERS_A_SECOND
        program = "llmcli.tokenizer.encoding_sandbox"
        self._process = BoundedProcess(program, "tokenizers", str(path), remedy, (setup, limit_seconds))

    def encode(self, text: str, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
        """The library's token ids.

        Raises: TokenizerError if the library fails, takes too long, or needs more than 2 GB.
        """
        request = {
            "text": text,
            "add_special_tokens": add_special_tokens,
            "parse_special_tokens": parse_special_tokens,
        }
        return list(self._process.ask(request, LIMIT_SECONDS + len(text) // TEXT_CHARACTERS_A_SECOND))


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json.

    Tokens that the files next to it add are added as in transformers: those with an id in the order of their ids,
    whether or not the vocabulary has them. A token that is only named special counts if the vocabulary has it;
    transformers would give it an id beyond the vocabulary, which no model was trained with. A named token is special,
    even if tokenizer.json calls it ordinary. If transformers uses its class LlamaTokenizer, the file is read as that
    class does.
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
        # 100 MB, so every call sets it again, one call at a time.
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
        if token_id in self._special_tokens:  # if found in normalized text, the library would return that form
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
    """The file without truncation and padding, with the tokens that the settings add; and all settings.

    If its steps are not known to be quick, the tokenizer only looks tokens up, and the process encodes.
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
    """The tokens to add to a loaded tokenizer, as arguments of the library's `AddedToken`.

    An existing token gets the behaviour given here; once special, it stays special.
    Source: transformers 5.23, `TokenizersBackend.__init__` and `PreTrainedTokenizerBase._from_pretrained`.
    """
    known_ids = tokenizer.get_added_tokens_decoder()
    known = {token.content: token for token in known_ids.values()}
    added = {
        token.content: token
        for token_id, token in settings.added_tokens.items()
        if settings.is_complete or token_id not in known_ids  # tokenizer.json wins over added_tokens.json
    }
    for content, token in settings.special_tokens.items():
        if content in added:
            added[content] = replace(added[content], special=True)
        elif content in known:
            old = known[content]
            if content not in settings.named_contents:
                continue  # a token that tokenizer.json calls ordinary stays so if it is only an extra one
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
    """Raise a TokenizerError for the library's errors, which are bare Exceptions or panics."""
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
    for processor in reversed(post_processor.get("processors", [])):  # each adds around the result of the one before
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

    The library's Metaspace drops all leading spaces of the first token; we drop one, so that a text that begins with
    several spaces keeps the others.

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
    # As in the library, a token with any character outside the alphabet, such as an added token with a space, stands
    # for itself.
    if _BYTE_LEVEL_CHARACTERS.issuperset(piece):
        return piece.translate(_BYTE_LEVEL_BYTES).encode("latin-1")
    return piece.encode()


def _byte_fallback_bytes(piece: str) -> bytes:
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
        return bytes.fromhex(piece[3:5])
    return piece.replace("▁", " ").encode()
