"""The tokenizer of a GGUF file as the files of a Hugging Face folder.

SentencePiece vocabularies become a tokenizer.model, byte-level ones a tokenizer.json: the same pieces, scores, merges,
special tokens, rules for BOS and EOS, and chat template. Source: ggml's docs/gguf.md; sentencepiece_model.proto;
llama.cpp's convert_hf_to_gguf.py for what each `pre` stands for.
"""

import json
import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from llmcli.checkpoint.safetensors_file import printable
from llmcli.errors import CheckpointError, UnsupportedModelError


class Kind(IntEnum):
    """What a token is; sentencepiece has the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split_by(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


# How each `tokenizer.ggml.pre` cuts a text into words.
_CUTS: Mapping[str, Callable[[], Any]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), lambda: _split_by(_GPT4 % "{1,3}")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), lambda: _split_by(_GPT4 % "")),
    "tekken": lambda: _split_by(_TEKKEN),
    "gpt-2": _gpt2,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]),
}
_NORMALIZED = ("qwen2",)
# A word that is a token needs no merges.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")


def tokenizer_files(metadata: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """The files, by name. `where` names the GGUF file in messages.

    Raises: UnsupportedModelError for another kind of tokenizer; CheckpointError for one that contradicts itself
    """
    vocabulary = _Vocabulary(metadata, where)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        files = {"tokenizer.model": _sentencepiece_model(vocabulary)}
        class_name = "LlamaTokenizer"
    elif kind == "gpt2":
        files = {"tokenizer.json": _byte_level(vocabulary)}
        class_name = "PreTrainedTokenizerFast"
    else:
        raise UnsupportedModelError(f"{where}: tokenizer {printable(kind)} is not supported, expected llama or gpt2")
    return {**files, "tokenizer_config.json": _json(vocabulary.settings(class_name))}


class _Vocabulary:
    """Tokens with their kinds and scores, and the special ones."""

    def __init__(self, metadata: Mapping[str, Any], where: str):
        self._metadata, self.where = metadata, where
        self.tokens = self._list("tokens", str, None)
        if not self.tokens:
            raise CheckpointError(f"{where}: tokenizer.ggml.tokens is missing")
        size = len(self.tokens)
        kinds = self._list("token_type", int, size)
        if unknown := sorted(set(kinds) - set(Kind)):
            raise CheckpointError(f"{where}: a token has the type {unknown[0]}, expected 1 to 6")
        self.kinds = [Kind(kind) for kind in kinds] or [Kind.NORMAL] * size
        self.scores = self._list("scores", float, size) or [0.0] * size
        self.merges = self._list("merges", str, None)
        self.pre = metadata.get("tokenizer.ggml.pre", "default")
        self.bos, self.eos, self.unknown = (self._id(f"{name}_token_id") for name in ("bos", "eos", "unknown"))

    def flag(self, name: str) -> bool | None:
        """A rule, None if the file does not say it."""
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, bool | None):
            raise CheckpointError(f"{self.where}: tokenizer.ggml.{name} is {printable(value)}, expected true or false")
        return value

    def added(self) -> dict[int, str]:
        """Tokens that are found in a text before it is cut."""
        return {
            number: token
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in (Kind.CONTROL, Kind.USER_DEFINED)
        }

    def settings(self, class_name: str) -> dict[str, Any]:
        """The object of tokenizer_config.json."""
        named = {"bos_token": self.bos, "eos_token": self.eos, "unk_token": self.unknown}
        settings: dict[str, Any] = {
            "tokenizer_class": class_name,
            "clean_up_tokenization_spaces": False,
            **{name: None if number is None else self.tokens[number] for name, number in named.items()},
            "added_tokens_decoder": {
                str(number): {
                    "content": token,
                    "special": self.kinds[number] == Kind.CONTROL,
                    **dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False),
                }
                for number, token in self.added().items()
            },
        }
        for name in ("add_bos_token", "add_eos_token"):
            if (flag := self.flag(name)) is not None:
                settings[name] = flag
        template = self._metadata.get("tokenizer.chat_template")
        if isinstance(template, str):
            settings["chat_template"] = template
        return settings

    def _list(self, name: str, kind: type, size: int | None) -> list[Any]:
        values = self._metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise CheckpointError(f"{self.where}: tokenizer.ggml.{name} is not a list of {kind.__name__}")
        if values and size not in (None, len(values)):
            raise CheckpointError(f"{self.where}: tokenizer.ggml.{name} has {len(values)} entries, expected {size}")
        return values

    def _id(self, name: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise CheckpointError(f"{self.where}: tokenizer.ggml.{name} is {printable(value)}, expected a token's id")
        return value


def _byte_level(vocabulary: _Vocabulary) -> bytes:
    """tokenizer.json with byte-pair merges."""
    if vocabulary.pre not in _CUTS:
        raise UnsupportedModelError(
            f"{vocabulary.where}: tokenizer.ggml.pre is {printable(vocabulary.pre)}, expected one of "
            f"{', '.join(_CUTS)}; use the Hugging Face folder of the model"
        )
    added = vocabulary.added()
    words = {
        token: number
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if number not in added and kind != Kind.UNUSED
    }
    merges = []
    for merge in vocabulary.merges:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= words.keys():
            raise CheckpointError(f"{vocabulary.where}: the merge {printable(merge)} is not of tokens")
        merges.append((left, right))
    model = models.BPE(vocab=words, merges=merges, ignore_merges=vocabulary.pre in _WHOLE_WORDS)
    tokenizer = tokenizers.Tokenizer(model)
    if vocabulary.pre in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _CUTS[vocabulary.pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(vocabulary)
    content = json.loads(tokenizer.to_str())
    # The library numbers added tokens itself; here each has a number already.
    content["added_tokens"] = [
        {
            "id": number,
            "content": token,
            "special": vocabulary.kinds[number] == Kind.CONTROL,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number, token in added.items()
    ]
    return _json(content)


def _post_processor(vocabulary: _Vocabulary) -> Any:
    byte_level = processors.ByteLevel(trim_offsets=False)
    names = {"bos": vocabulary.bos, "eos": vocabulary.eos}
    used = {
        name: number for name, number in names.items() if number is not None and vocabulary.flag(f"add_{name}_token")
    }
    if not used:
        return byte_level
    tokens = {name: vocabulary.tokens[number] for name, number in used.items()}
    parts = [tokens.get("bos"), "$A", tokens.get("eos")]
    template = processors.TemplateProcessing(
        single=[part for part in parts if part],
        special_tokens=[(vocabulary.tokens[number], number) for number in set(used.values())],
    )
    return processors.Sequence([byte_level, template])


_MODEL_TYPE_BPE = 2


def _sentencepiece_model(vocabulary: _Vocabulary) -> bytes:
    """tokenizer.model: a serialized ModelProto of pieces, trainer_spec and normalizer_spec."""
    pieces = b"".join(
        _message(1, _string(1, token), _float(2, score), _number(3, kind))
        for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.kinds, strict=True)
    )
    unknown = next((i for i, kind in enumerate(vocabulary.kinds) if kind == Kind.UNKNOWN), None)
    if unknown is None:
        raise CheckpointError(f"{vocabulary.where}: no token stands for what is unknown")
    ids = {40: unknown, 41: vocabulary.bos, 42: vocabulary.eos, 43: None}  # unk_id, bos_id, eos_id, pad_id
    trainer = _message(
        2,
        _number(3, _MODEL_TYPE_BPE),
        _number(35, Kind.BYTE in vocabulary.kinds),  # byte_fallback
        *(_number(field, -1 if number is None else number) for field, number in ids.items()),
        *(
            _string(field, vocabulary.tokens[number])
            for field, number in ((45, unknown), (46, vocabulary.bos), (47, vocabulary.eos))
            if number is not None
        ),
    )
    takes_space = vocabulary.flag("add_space_prefix") is not False
    removes_spaces = bool(vocabulary.flag("remove_extra_whitespaces"))
    # name, add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces
    normalizer = _message(3, _string(1, "identity"), _number(3, takes_space), _number(4, removes_spaces), _number(5, 1))
    return pieces + trainer + normalizer


def _varint(value: int) -> bytes:
    value %= 1 << 64  # a negative number has ten bytes
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _string(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _message(field: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
