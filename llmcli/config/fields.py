"""Typed reads from a config.json object: a wrong value is named with its key, its file and what was expected."""

import math
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from llmcli.errors import CheckpointError

MAX_INT = 2**31 - 1  # ids, positions and windows are 32-bit numbers on a card
FLOAT_RANGE = (1e-15, 1e15)  # float32 holds these numbers and the product of any two; real ones are far inside

_REQUIRED: Any = object()


class Fields:
    """Reads values by key and type from one JSON object, and collects what the user should know in `notes`.

    A key that is missing takes the default; without a default it is an error. Null is another matter: transformers
    refuses it for a number, a string and a boolean, and so does this class; for a list, an object and token ids null
    is as good as missing. Where a key has a null of its own meaning, its reader asks `is_null` first.
    Raises: CheckpointError for a missing required key, a wrong type or a value out of range.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self.where = where
        self.notes: list[str] = []

    def is_null(self, key: str) -> bool:
        """Whether the key is missing or null."""
        return self.values.get(key) is None

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """The error that says what a key holds, and what it should."""
        return CheckpointError(f"{self.where}: {key} is {shown(self.values[key])}, expected {expected}")

    def positive_int(self, key: str, default: Any = _REQUIRED, *, at_most: int = MAX_INT) -> int:
        """An integer from 1 to `at_most`."""
        value = self._read(key, default, "a positive integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, "a positive integer")
        if value > at_most:
            raise self.wrong(key, f"at most {at_most}")
        return value

    def integer(self, key: str, default: int) -> int:
        """An integer of any sign, of at most 32 bits."""
        value = self._read(key, default, "an integer")
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_INT:
            raise self.wrong(key, f"an integer of at most {MAX_INT}")
        return value

    def positive_float(self, key: str, default: Any = _REQUIRED) -> float:
        """A number above 0 with which float32 can compute."""
        value = self._read(key, default, "a positive number")
        low, high = FLOAT_RANGE
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.wrong(key, "a positive number")
        if not low <= value <= high:
            raise self.wrong(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A number of any sign, zero included, with which float32 can compute; None where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return None
        low, high = FLOAT_RANGE
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        if value != 0 and not low <= abs(value) <= high:
            raise self.wrong(key, f"0 or a number from {low:g} to {high:g}, with or without a minus")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._read(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def string(self, key: str, default: Any = _REQUIRED) -> str:
        """A string."""
        value = self._read(key, default, "a string")
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def object(self, key: str) -> Mapping[str, Any]:
        """A JSON object; empty where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them, as bos_token_id and eos_token_id are written; empty where there is none."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(id_, bool) or not isinstance(id_, int) or not 0 <= id_ <= MAX_INT for id_ in ids):
            raise self.wrong(key, "a token id or a list of them")
        return tuple(ids)

    def int_list(self, key: str, default: list[int]) -> list[int]:
        """A list of integers; the default where it is missing or null."""
        return self._list(key, default, int, "a list of integers")

    def string_list(self, key: str, default: list[str]) -> list[str]:
        """A list of strings; the default where it is missing or null."""
        return self._list(key, default, str, "a list of strings")

    def _list(self, key: str, default: list[Any], kind: type, expected: str) -> list[Any]:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, list) or any(type(item) is not kind for item in value):  # a bool is no int here
            raise self.wrong(key, expected)
        return value

    def _read(self, key: str, default: Any, expected: str) -> Any:
        if key in self.values:
            return self.values[key]
        if default is _REQUIRED:
            raise CheckpointError(f"{self.where}: {key} is missing, expected {expected}")
        return default


def shown(value: Any) -> str:
    """A value of a file as a message shows it: null as the file has it, and no more than fits on a line."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# What a model's generation_config.json asks for besides numbers, and which of its settings are ignored.
#
# The numbers are sampling parameters, which `llmcli.sampling.params` resolves. A file's author wrote it for
# transformers, so keys, forms and meaning are transformers'.

# Keys that are ignored here but change transformers' text, each with the values at which they do nothing there.
# Keys that only tune one of these (length_penalty) or its speed are left out; renormalize_logits changes no
# probability; a text's length is `max_new_tokens` here, never max_length.
NOT_APPLIED: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": ([],),
    "force_words_ids": ([],),
    "max_time": (),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "epsilon_cutoff": (0, 1),
    "eta_cutoff": (0, 1),
    "top_h": (1,),
    "guidance_scale": (1,),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "token_healing": (False,),
}

Sequences = tuple[tuple[tuple[int, ...], float], ...]

_LONGEST_SHOWN = 60  # characters of a wrong value
_REMEDY = "correct the file, or take the key out"
# A key of the dict form of sequence_bias, as Python writes a tuple: (5, 7), (5,) or just 5.
_DICT_KEY = re.compile(r"\(?\s*\d{1,18}(?:\s*,\s*\d{1,18})*\s*,?\s*\)?", re.ASCII)


@dataclass(frozen=True)
class GenerationDefaults:
    """The model's own wishes; empty where the file says nothing.

    - `sequence_bias`: transformers' sequence_bias, and with -inf its bad_words_ids.
    - `shown`: what the file says, in words, by key.
    - `not_applied`: keys of `NOT_APPLIED` that the file sets.
    """

    suppress_token_ids: frozenset[int] = frozenset()
    begin_suppress_token_ids: frozenset[int] = frozenset()
    forced_eos_token_ids: frozenset[int] = frozenset()
    sequence_bias: Sequences = ()
    stop_strings: tuple[str, ...] = ()
    shown: Mapping[str, str] = field(default_factory=dict)
    not_applied: tuple[str, ...] = ()


def read_generation_defaults(fields: Fields, eos_token_ids: Set[int], vocab_size: int) -> GenerationDefaults:
    """Read the settings for a model with these tokens; `eos_token_ids` alone are never bad words, as in transformers.

    Raises: CheckpointError for a value that transformers would not take either.
    """
    reader = _Reader(fields, vocab_size)
    last = vocab_size - 1
    bad_words = reader.read("bad_words_ids", reader.bad_words, f"lists of token ids from 0 to {last}")
    return GenerationDefaults(
        suppress_token_ids=frozenset(reader.read("suppress_tokens", reader.any_ids, "a list of token ids")),
        begin_suppress_token_ids=frozenset(reader.read("begin_suppress_tokens", reader.any_ids, "a list of token ids")),
        forced_eos_token_ids=frozenset(
            reader.read("forced_eos_token_id", reader.one_or_more_ids, f"token ids from 0 to {last}")
        ),
        sequence_bias=(
            *reader.read(
                "sequence_bias",
                reader.biases,
                f"pairs of a list of token ids from 0 to {last} and a finite number or -inf",
            ),
            *((word, -math.inf) for word in bad_words if not (len(word) == 1 and word[0] in eos_token_ids)),
        ),
        stop_strings=reader.read("stop_strings", reader.texts, "a string or a list of strings, none empty"),
        shown=reader.shown,
        not_applied=tuple(
            key
            for key, neutral in NOT_APPLIED.items()
            if fields.values.get(key) is not None and fields.values[key] not in neutral
        ),
    )


class _Reader:
    """Reads values of one file. The methods after `read` return what a value means, None if it is malformed."""

    def __init__(self, fields: Fields, vocab_size: int):
        self._fields = fields
        self._vocab_size = vocab_size
        self.shown: dict[str, str] = {}

    def read(self, key: str, parse: Callable[[Any], tuple[Any, ...] | None], expected: str) -> tuple[Any, ...]:
        value = self._fields.values.get(key)
        if value is None:
            return ()
        items = parse(value)
        if items is None:
            text = repr(value)
            text = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
            raise CheckpointError(f"{self._fields.where}: {key} is {text}, expected {expected}; {_REMEDY}")
        if items:
            self.shown[key] = _described(items)
        return items

    def any_ids(self, value: Any) -> tuple[int, ...] | None:
        """Ids outside the vocabulary name no token, which transformers allows here."""
        if not isinstance(value, list) or not all(_is_int(token_id) for token_id in value):
            return None
        return tuple(token_id for token_id in value if 0 <= token_id < self._vocab_size)

    def one_or_more_ids(self, value: Any) -> tuple[int, ...] | None:
        return self._ids(value if isinstance(value, list) else [value])

    def bad_words(self, value: Any) -> tuple[tuple[int, ...], ...] | None:
        words = [self._ids(word) for word in value] if isinstance(value, list) else [None]
        return tuple(word for word in words if word) if all(words) else None

    def biases(self, value: Any) -> Sequences | None:
        """The last bias of a sequence named twice counts, as in transformers."""
        pairs = value
        if isinstance(value, dict):
            pairs = [[_ids_of_key(key), bias] for key, bias in value.items()]
        if not isinstance(pairs, list):
            return None
        biases: dict[tuple[int, ...], float] = {}
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                return None
            token_ids, bias = self._ids(pair[0]), _bias(pair[1])
            if not token_ids or bias is None:
                return None
            biases[token_ids] = bias
        return tuple(biases.items())

    def texts(self, value: Any) -> tuple[str, ...] | None:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            return None
        return tuple(texts)

    def _ids(self, value: Any) -> tuple[int, ...] | None:
        if not isinstance(value, list):
            return None
        if not all(_is_int(token_id) and 0 <= token_id < self._vocab_size for token_id in value):
            return None
        return tuple(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bias(value: Any) -> float | None:
    if not (_is_int(value) or isinstance(value, float)):
        return None
    try:
        bias = float(value)
    except OverflowError:  # an integer beyond the largest float
        return None
    return None if math.isnan(bias) or bias == math.inf else bias


def _ids_of_key(key: str) -> list[int] | None:
    return [int(part) for part in re.findall(r"\d+", key, re.ASCII)] if _DICT_KEY.fullmatch(key) else None


def _described(items: tuple[Any, ...]) -> str:
    text = ", ".join(repr(item) if isinstance(item, str) else str(item) for item in items)
    return text if len(text) <= _LONGEST_SHOWN else f"{len(items)} entries"
