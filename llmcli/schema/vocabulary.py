"""`Vocabulary`: a model's tokens as masks have them, made from our own tokenizer.

Special tokens are never text; an end token is allowed where the text is complete, and only there.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UsageError
from llmcli.sampling.candidates import pack_mask
from llmcli.schema.library import Tokens
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.pieces import TokenPieces

# What a token stands for at the start of a text whose first space is dropped, if no token is the rest of it: nothing
# that may come; or if nothing is left of it: a beginning that changes nothing.
NOT_ALLOWED = -1
NOTHING = -2


class Vocabulary:
    """The tokens of a model with `vocab_size` logits, of which `eos_token_ids` end a text.

    Attributes: tokens: as llguidance has them; vocab_size: number of logits; eos_token_ids; ends: their mask;
    first_token_ids: int64 [vocab_size], None if a text keeps its first space. Else it has, for the first token of a
    text, the token that is its text without a leading space, or one of the constants above.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: Iterable[int], vocab_size: int, tokens: Tokens | None = None
    ):
        """`tokens` are the tokenizer's, if they are made already: that takes half a second for 128,000 of them.

        Raises: UsageError for a model without an end token.
        """
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        if not self.eos_token_ids:
            raise UsageError("the model has no end-of-text token, so no text can end where a schema wants it to")
        self.tokens = tokens or Tokens(TokenPieces.of(tokenizer).first(vocab_size))
        self.vocab_size = vocab_size
        self.ends = pack_mask(np.isin(np.arange(vocab_size), [*self.eos_token_ids]))
        pieces = self.tokens.pieces
        self.first_token_ids = _first_token_ids(pieces, vocab_size) if tokenizer.strips_leading_space else None

    def as_masks(self, found: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """What llguidance has found, with the model's end tokens in place of its own. Changes `found`.

        Shapes: found [texts, num_words of the tokens], result [texts, ceil(vocab_size / 32)]
        """
        end_id, num_words = self.tokens.end_id, len(self.ends)
        bit = np.uint32(1 << end_id % 32)
        may_end = (found[:, end_id // 32] & bit) != 0
        found[:, end_id // 32] &= ~bit
        masks = found[:, :num_words]
        if masks.shape[1] < num_words:
            masks = np.pad(masks, ((0, 0), (0, num_words - masks.shape[1])))
        masks &= ~self.ends
        masks[may_end] |= self.ends
        return masks


def _first_token_ids(pieces: TokenPieces, vocab_size: int) -> NDArray[np.int64]:
    tokens = [pieces[token_id] for token_id in range(len(pieces))]
    ids = {piece: token_id for token_id, piece in reversed([*enumerate(tokens)]) if piece}
    first = np.arange(vocab_size)
    for token_id, piece in enumerate(tokens):
        if piece.startswith(b" "):
            first[token_id] = ids.get(piece[1:], NOT_ALLOWED) if piece != b" " else NOTHING
    return first
