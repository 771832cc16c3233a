"""Tries a grammar before a model is opened: what takes too long while a text is written is refused up front.

What may follow in a text costs llguidance more with counted repeats, lengths and alternatives than their size tells. So
some texts are written with a made vocabulary, within a fraction of the limits that hold for a real one.
"""

import random
from functools import cache

import numpy as np

from llmcli.schema.library import Limits, Matcher, Tokens, byte_tokens
from llmcli.tokenizer.pieces import TokenPieces

# A real vocabulary, of up to 128,000 tokens, has needed up to four times as much as the made one.
_LIMITS = Limits(step_lexer_fuel=800_000, step_max_items=50_000, max_items_in_row=2_000)
_NUM_TOKENS = 4000
_WALKS, _STEPS = 2, 20
_LETTERS = "etaoinshrdlucmwfgypbvkjxqz"
_MARKS = ".,;:!?\"'()[]{}<>/\\|-_=+*&^%$#@~` \n\t"


def trial_error(lark: str) -> str:
    """What llguidance says where it does not read it or gives up in one of some texts, "" if all is well."""
    if error := Matcher(byte_tokens(), lark, _LIMITS).error:
        return error
    tokens = _tokens()
    begin, mask = Matcher(tokens, lark, _LIMITS), np.zeros(tokens.num_words, np.uint32)
    for seed in range(_WALKS):
        matcher, rng = begin.copy(), random.Random(seed)
        for _ in range(_STEPS):
            if not matcher.fill_mask(mask):
                break
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            allowed = allowed[allowed < tokens.end_id]
            if not len(allowed) or not matcher.consume(int(allowed[rng.randrange(len(allowed))])):
                break
        if matcher.has_error:
            return matcher.error
    return ""


@cache
def _tokens() -> Tokens:
    """Bytes, words, numbers, marks, spaces and letters of many scripts, as vocabularies have them."""
    rng, pieces = random.Random(0), {bytes([byte]): None for byte in range(256)}
    while len(pieces) < _NUM_TOKENS:
        length = min(1 + int(rng.expovariate(0.2)), 16)
        word = "".join(rng.choices(_LETTERS, range(len(_LETTERS), 0, -1), k=length))
        kind = rng.randrange(20)
        if kind < 10:
            word = f" {word}"
        elif kind == 10:
            word = word.upper()
        elif kind < 13:
            word = word.capitalize()
        elif kind == 13:
            word = str(rng.randrange(1000))
        elif kind < 16:
            word = "".join(rng.choices(_MARKS, k=min(length, 4)))
        elif kind == 16:
            word = rng.choice(" \n\t") * rng.randint(2, 40)
        elif kind < 19:
            word = "".join(chr(rng.randrange(0xC0, 0x9FFF)) for _ in range(min(length, 3)))
        pieces[word.encode()] = None
    return Tokens(TokenPieces.from_list([*pieces]))
