"""llguidance by its C interface (llguidance.h): a model's tokens, and matchers of a grammar over them.

Its Python classes hold the interpreter's lock for half a second while they build the tree of 128,000 tokens, so no
weights are read. The C functions know no lock: here slow calls release it and quick calls keep it.
"""

import ctypes
import json
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UsageError
from llmcli.sampling.candidates import mask_words
from llmcli.tokenizer.pieces import TokenPieces

_END = b"\xff<end>"  # the first byte marks a token that is not text
_TEXT = r'[^"\\\x00-\x1F\x7F]'
# Classes of tokens inside a JSON string, by length: all that a string has room for are allowed without a look at each.
# Source: llguidance's own are 10 and 30; between them and below, a mask takes up to ten times as long.
_SLICES = (*(f"{_TEXT}{{1,{length}}}" for length in (5, 7, 10, 16, 30)), f"{_TEXT}+")
_ERROR_BYTES = 1000
NUM_BYTES = 256


class _TokensInit(ctypes.Structure):
    """`LlgTokenizerInitV2`."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.c_void_p),
        ("token_bytes", ctypes.c_char_p),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", ctypes.c_void_p),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.POINTER(ctypes.c_char_p)),
        ("tok_eos_extra", ctypes.c_void_p),
        ("tok_eos_extra_count", ctypes.c_uint32),
    )


class _MatcherInit(ctypes.Structure):
    """`LlgConstraintInit`: the fields set here, and room for the defaults of later versions."""

    _fields_ = (
        ("tokenizer", ctypes.c_void_p),
        ("log_buffer_level", ctypes.c_uint32),
        ("log_stderr_level", ctypes.c_uint32),
        ("ff_tokens_ok", ctypes.c_bool),
        ("backtrack_ok", ctypes.c_bool),
        ("max_items_in_row", ctypes.c_size_t),
        ("initial_lexer_fuel", ctypes.c_uint64),
        ("step_lexer_fuel", ctypes.c_uint64),
        ("step_max_items", ctypes.c_size_t),
        ("others", ctypes.c_char * 1024),
    )


@dataclass(frozen=True)
class MaskLimits:
    """What llguidance may spend on one mask, about 14,000 of fuel and 20,000 items a millisecond, and on one byte.

    These are for texts that have begun, which should continue, if slowly. grammar.py tries a grammar within less.
    A byte's time grows faster than its items: 5,000 of an ambiguous grammar took minutes.
    """

    step_lexer_fuel: int = 8_000_000
    step_max_items: int = 500_000
    max_items_in_row: int = 2_500


_LIMITS = MaskLimits()


class Tokens:
    """Tokens for matchers: pieces of text, followed by one that ends a text.

    Attributes: pieces; end_id: the token that ends a text; num_words: words of a mask
    """

    def __init__(self, pieces: TokenPieces):
        """Takes half a second for 128,000 tokens, while other threads run. A token without bytes never comes."""
        self.pieces = pieces
        self.end_id = len(pieces)
        self.num_words = mask_words(len(pieces) + 1)
        lengths = np.append(pieces.lengths, np.uint32(len(_END)))
        init = _TokensInit(
            struct_size=ctypes.sizeof(_TokensInit),
            vocab_size=len(lengths),
            tok_eos=self.end_id,
            token_lens=lengths.ctypes.data,
            token_bytes=pieces.content + _END,
            use_approximate_greedy_tokenize_fn=True,
            slices=(ctypes.c_char_p * (len(_SLICES) + 1))(*map(str.encode, _SLICES), None),
        )
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        library = _library()
        handle = library.slow.llg_new_tokenizer_v2(ctypes.byref(init), error, _ERROR_BYTES)
        if not handle:
            raise RuntimeError(f"llguidance refuses the vocabulary: {error.value.decode(errors='replace')}")
        self.handle = _owned(self, handle, library.quick.llg_free_tokenizer)

    def greedy_tokenize(self, text: bytes) -> tuple[int, ...]:
        """Tokens of the text, each as long as possible."""
        token_ids = (ctypes.c_uint32 * len(text))()
        count = _library().quick.llg_tokenize_bytes(self.handle, text, len(text), token_ids, len(token_ids))
        return tuple(token_ids[:count])


@cache
def byte_tokens() -> Tokens:
    """A token for each byte."""
    return Tokens(TokenPieces.from_list([bytes([byte]) for byte in range(NUM_BYTES)]))


class Matcher:
    """One text's state in a grammar. For one thread at a time.

    A token that does not fit puts it into an error state for good. Attributes: has_error
    """

    def __init__(self, tokens: Tokens, lark: str, limits: MaskLimits = _LIMITS):
        """A fault of the grammar becomes its error."""
        init = _MatcherInit()
        library = _library()
        library.quick.llg_constraint_init_set_defaults(ctypes.byref(init), tokens.handle)
        init.log_stderr_level = 0
        for name, most in asdict(limits).items():
            setattr(init, name, most)
        grammar = json.dumps({"grammars": [{"lark_grammar": lark}]}).encode()  # a C string could not hold a NUL
        self._set(tokens, library.slow.llg_new_matcher(ctypes.byref(init), b"llguidance", grammar))
        self.has_error = bool(self.error)

    def _set(self, tokens: Tokens, handle: int) -> None:
        self._tokens = tokens  # must outlive this
        self._functions = _library()
        self._handle = _owned(self, handle, self._functions.quick.llg_free_matcher)

    def copy(self) -> "Matcher":
        """A second matcher in the same state."""
        copied = Matcher.__new__(Matcher)
        copied._set(self._tokens, self._functions.quick.llg_clone_matcher(self._handle))
        copied.has_error = self.has_error
        return copied

    @property
    def error(self) -> str:
        """The reason of the error state, "" if there is none."""
        message: bytes | None = self._functions.quick.llg_matcher_get_error(self._handle)
        return (message or b"").decode(errors="replace")

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        return bool(self._functions.quick.llg_matcher_is_accepting(self._handle))

    def consume(self, token_id: int) -> bool:
        """Take a token; False if it does not fit."""
        return self._went_well(self._functions.quick.llg_matcher_consume_token(self._handle, token_id))

    def rollback(self, num_tokens: int) -> bool:
        """Go back `num_tokens` tokens; False if it cannot."""
        return self._went_well(self._functions.quick.llg_matcher_rollback(self._handle, num_tokens))

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens may follow, one after the other."""
        ids = (ctypes.c_uint32 * len(token_ids))(*token_ids)
        return max(0, int(self._functions.quick.llg_matcher_validate_tokens(self._handle, ids, len(ids))))

    def forced_bytes(self, max_bytes: int) -> bytes:
        """The next bytes if they are forced, for a matcher over `byte_tokens`. Its state stays."""
        mask, forced = np.zeros(self._tokens.num_words, np.uint32), bytearray()
        while len(forced) < max_bytes and self.fill_mask(mask):
            byte = int.from_bytes(mask.astype("<u4").tobytes(), "little")
            if byte.bit_count() != 1 or byte.bit_length() > NUM_BYTES or not self.consume(byte.bit_length() - 1):
                break
            forced.append(byte.bit_length() - 1)
        self.rollback(len(forced))
        return bytes(forced)

    def fill_mask(self, mask: NDArray[np.uint32]) -> bool:
        """Write which tokens may follow, one bit each; False if it cannot.

        Shapes: mask [num_words of the tokens], contiguous
        """
        self._fill(mask.ctypes.data, mask.nbytes)
        return not self.has_error

    @staticmethod
    def fill_masks(matchers: "Sequence[Matcher]", masks: NDArray[np.uint32]) -> None:
        """`fill_mask` for many, one after the other; those that fail then have an error.

        Shapes: masks [matchers, num_words of their tokens], contiguous
        """
        begin, width = masks.ctypes.data, masks.strides[0]
        for place, matcher in enumerate(matchers):
            matcher._fill(begin + place * width, width)

    def _fill(self, address: int, num_bytes: int) -> None:
        self._went_well(self._functions.slow.llg_matcher_compute_mask_into(self._handle, address, num_bytes))

    def _went_well(self, code: int) -> bool:
        self.has_error |= code != 0
        return code == 0


def _owned(owner: object, handle: int, free: Any) -> ctypes.c_void_p:
    """The handle, freed with its owner; at the end of the process the system frees it."""
    pointer = ctypes.c_void_p(handle)
    weakref.finalize(owner, free, pointer).atexit = False
    return pointer


class _Library:
    """The library's functions: `slow` lets other threads run during a call, `quick` does not."""

    def __init__(self) -> None:
        """Raises: UsageError for a library that was built without them"""
        path = llguidance._lib.__file__
        self.slow: Any = ctypes.CDLL(path)
        self.quick: Any = ctypes.PyDLL(path)
        handle, ids, size, code = ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32), ctypes.c_size_t, ctypes.c_int32
        text = ctypes.c_char_p
        for functions, name, result, arguments in (
            (self.slow, "llg_new_tokenizer_v2", handle, (ctypes.POINTER(_TokensInit), text, size)),
            (self.slow, "llg_new_matcher", handle, (ctypes.POINTER(_MatcherInit), text, text)),
            (self.slow, "llg_matcher_compute_mask_into", code, (handle, handle, size)),
            (self.quick, "llg_constraint_init_set_defaults", None, (ctypes.POINTER(_MatcherInit), handle)),
            (self.quick, "llg_tokenize_bytes", size, (handle, text, size, ids, size)),
            (self.quick, "llg_free_tokenizer", None, (handle,)),
            (self.quick, "llg_free_matcher", None, (handle,)),
            (self.quick, "llg_clone_matcher", handle, (handle,)),
            (self.quick, "llg_matcher_get_error", text, (handle,)),
            (self.quick, "llg_matcher_is_accepting", ctypes.c_bool, (handle,)),
            (self.quick, "llg_matcher_consume_token", code, (handle, ctypes.c_uint32)),
            (self.quick, "llg_matcher_rollback", code, (handle, size)),
            (self.quick, "llg_matcher_validate_tokens", code, (handle, ids, size)),
        ):
            function = getattr(functions, name, None)
            if function is None:
                raise UsageError(
                    f"the installed llguidance has no C function {name}; install a wheel of llguidance 1.9"
                )
            function.restype, function.argtypes = result, arguments


@cache
def _library() -> _Library:
    return _Library()
