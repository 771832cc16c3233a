"""`Vocabulary`: a model's tokens as llguidance sees them, made from our own tokenizer.

Special tokens are never text; an end token is allowed where the text is complete, and only there.
"""

from collections.abc import Iterable

import llguidance
import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UsageError
from llmcli.tokenizer.base import Tokenizer

# What a token stands for at the start of a text whose first space is dropped, if no token is the rest of it: nothing
# that may come; or if nothing is left of it: a beginning that changes nothing.
NOT_ALLOWED = -1
NOTHING = -2


class Vocabulary:
    """The tokens of a model with `vocab_size` logits, of which `eos_token_ids` end a text.

    Attributes: library: the tokens for llguidance; vocab_size: number of logits; eos_token_ids;
    first_token_ids: int64 [vocab_size], None if a text keeps its first space. Else it has, for the first token of a
    text, the token that is its text without a leading space, or one of the constants above.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int], vocab_size: int):
        """Takes half a second and more for 128,000 tokens.

        Raises: UsageError for a model without an end token.
        """
        ends = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        if not ends:
            raise UsageError("the model has no end-of-text token, so no text can end where a schema wants it to")
        num_tokens = min(max(tokenizer.vocab_size, ends[-1] + 1), vocab_size)
        pieces = [tokenizer.token_bytes(token_id) for token_id in range(num_tokens)]
        special = sorted({token_id for token_id in tokenizer.special_token_ids if token_id < num_tokens} | {*ends})
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(ends)
        self.first_token_ids = _first_token_ids(pieces, vocab_size) if tokenizer.strips_leading_space else None
        self.library = llguidance.LLTokenizer(_Tokens(pieces, special, ends[0]), eos_token=ends)


def _first_token_ids(pieces: list[bytes], vocab_size: int) -> NDArray[np.int64]:
    ids = {piece: token_id for token_id, piece in reversed([*enumerate(pieces)]) if piece}
    first = np.arange(vocab_size)
    for token_id, piece in enumerate(pieces):
        if piece.startswith(b" "):
            first[token_id] = ids.get(piece[1:], NOT_ALLOWED) if piece != b" " else NOTHING
    return first


class _Tokens(llguidance.TokenizerWrapper):
    """What llguidance asks of a tokenizer, in place of what its own class makes of one."""

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int):
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        self.eos_token_id = eos_token_id
        self.tokens = tokens
        self.special_token_ids = special_token_ids

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("llguidance encodes text only where a grammar lets it force tokens; ours do not")
