"""Texts drawn under masks without a model, and vocabularies with awkward tokens."""

import decimal
import json
from collections import deque
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np

from llmcli.sampling.candidates import unpack_mask
from llmcli.schema.grammar import Grammar
from llmcli.schema.schema import ConstrainedText, Schema, Vocabulary
from llmcli.tokenizer.base import Tokenizer

EOS_ID, OTHER_EOS_ID, SPECIAL_ID = 256, 257, 258
VOCAB_SIZE = 351  # with ids that no token has
LONGEST = 60  # tokens of a drawn text, before it is completed
# Words, JSON's pieces, spaces, and pieces of characters; the same bytes twice.
PIECES = (
    '{"', '":', '", "', '"}', "}]", "[]", "true", "null", "false", " {", " [", ' "', " a", "  ", " ", "ab", "abc", "é",
    "日本", "12", "-1", ".5", "e", "\n", "\\n", '\\"', "a", "e1", "2024-", "0",
)  # fmt: skip
TORN = (b"\xc3", b"\xa9", b"\xe6\x97", b"\xa5", b'\xa9"', b"\xf0\x9f\x8e", b"\x88", b"\xff", b'"\xc3')


# Bytes that complete most texts, closing ones first.
CLOSING = (
    b'"', b"}", b"]", b"null", b"0", b"1", b"x", b"a", b"b", b"@", b".", b":", b"-", b"[", b"/", b",", b"{", b" ",
    b"D", b"S", b"M", b"Y", b"T", b"Z", b"_",
)  # fmt: skip


# Those of generated expressions, and one of each class.
CHARACTERS = [char.encode() for char in 'abcxé日🎈 0_.[]/"\n@:']


class ListedTokenizer(Tokenizer):
    """A tokenizer that only knows its tokens' bytes."""

    def __init__(self, tokens: list[bytes], special: frozenset[int], *, strips_leading_space: bool = False):
        self.tokens = tokens
        self.vocab_size = len(tokens)
        self.special_token_ids = special
        self.eos_token_ids = frozenset()
        self.bos_token_id = None
        self.strips_leading_space = strips_leading_space

    def _encode(self, text: str, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
        raise NotImplementedError

    def token_id(self, content: str) -> int | None:
        raise NotImplementedError

    def piece(self, token_id: int) -> str:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        in_range = 0 <= token_id < len(self.tokens) and token_id not in self.special_token_ids
        return self.tokens[token_id] if in_range else b""


def awkward_tokenizer(*, strips_leading_space: bool = False) -> ListedTokenizer:
    """Every byte, special tokens, and PIECES and TORN."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"</s>", b"<|turn|>", b"<|tool|>", *(piece.encode() for piece in PIECES), *TORN]
    special = frozenset({EOS_ID, OTHER_EOS_ID, SPECIAL_ID})
    return ListedTokenizer(tokens, special, strips_leading_space=strips_leading_space)


def awkward_vocabulary(*, strips_leading_space: bool = False) -> Vocabulary:
    """With two end tokens."""
    tokenizer = awkward_tokenizer(strips_leading_space=strips_leading_space)
    return Vocabulary(tokenizer, [EOS_ID, OTHER_EOS_ID], VOCAB_SIZE)


def allowed_ids(held: ConstrainedText) -> np.ndarray:
    """The ids that may come next."""
    return np.flatnonzero(unpack_mask(held.mask()))


@cache
def all_pieces(tokenizer: Tokenizer, vocab_size: int) -> tuple[list[bytes], np.ndarray, np.ndarray]:
    """Each token's bytes, whether they close something, and their place in CLOSING or -1."""
    pieces = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    closes = np.array([piece.startswith((b'"', b"}", b"]")) for piece in pieces])
    return pieces, closes, np.array([CLOSING.index(piece) if piece in CLOSING else -1 for piece in pieces])


@dataclass
class Walk:
    """A drawn text: `ended` says whether its end was drawn too."""

    token_ids: list[int]
    text: bytes
    ended: bool


def walk(schema: Schema, tokenizer: Tokenizer, seed: int, most: int, *, at_start: bool = False) -> Walk:
    """Draw allowed tokens of random logits at temperature 1.5.

    Ends and closing marks are likelier than others: random logits alone would hardly ever close a long string.
    """
    generator, held = np.random.default_rng(seed), schema.begin(at_start=at_start)
    drawn = Walk([], b"", False)
    pieces, closes, _ = all_pieces(tokenizer, schema.vocabulary.vocab_size)
    for _ in range(most):
        ids = allowed_ids(held)
        is_end = np.isin(ids, list(schema.vocabulary.eos_token_ids))
        logits = generator.standard_normal(len(ids)) * 2 + 4.0 * is_end + 2.0 * closes[ids]
        place = int((logits / 1.5 + generator.gumbel(size=len(ids))).argmax())
        held.push(int(ids[place]))
        if is_end[place]:
            drawn.ended = True
            break
        drawn.token_ids.append(int(ids[place]))
        drawn.text += pieces[int(ids[place])]
    return drawn


def extend(
    schema: Schema, tokenizer: Tokenizer, begun: Walk, *, at_start: bool = False, most: int = 100, searches: bool = True
) -> bytes | None:
    """The bytes that complete an unfinished text, found by trying; None if not found.

    It has up to `most` tokens. If the simple way fails it searches, which takes long in large objects.
    """
    pieces, _, ranks = all_pieces(tokenizer, schema.vocabulary.vocab_size)
    for attempt in range(30):
        generator, held, text = np.random.default_rng(attempt), held_behind(schema, begun, at_start), b""
        for _ in range(most):
            if held.is_complete:
                return text
            ids = allowed_ids(held)
            known = ids[ranks[ids] >= 0]
            # Any token at times: a repetition or recursion may end with another token than a closing one.
            kinds = (known[ranks[known] < 4], known, ids)
            token_id = int(generator.choice(next(kinds[kind] for kind in generator.permutation(3) if len(kinds[kind]))))
            held.push(token_id)
            text += pieces[token_id]
    return shortest_end(held_behind(schema, begun, at_start), pieces, schema.grammar.lark) if searches else None


def held_behind(schema: Schema, begun: Walk, at_start: bool) -> ConstrainedText:
    held = schema.begin(at_start=at_start)
    for token_id in begun.token_ids:
        held.push(token_id)
    return held


def shortest_end(held: ConstrainedText, pieces: list[bytes], content: str) -> bytes | None:
    """As `extend`: all ways of the characters that the grammar names, the shortest first.

    Ways whose last five characters are the same count as one if the same may follow.
    """
    ids = {piece: token_id for token_id, piece in enumerate(pieces) if piece}
    spelt = [
        [char] if char in ids else [char[at : at + 1] for at in range(len(char))]
        for char in CHARACTERS
        if char.decode() in content
    ]
    chars = [[ids[part] for part in parts] for parts in spelt if all(part in ids for part in parts)]
    # The rests of an unfinished character.
    rests = [
        [ids[char[at : at + 1]] for at in range(first, len(char))]
        for char in CHARACTERS
        for first in range(1, len(char))
        if all(char[at : at + 1] in ids for at in range(first, len(char)))
    ]
    ways, seen = deque([list[list[int]]()]), set[object]()
    while ways:
        way = ways.popleft()
        token_ids = [token_id for char in way for token_id in char]
        try:
            (mask,) = held.masks(token_ids)
        except ValueError:  # not the first part of a character, but a later one does not fit
            continue
        if (state := (mask.tobytes(), str(way[-5:]))) in seen:
            continue
        seen.add(state)
        is_allowed = unpack_mask(mask)
        if is_allowed[list(held._vocabulary.eos_token_ids)].any():
            return b"".join(pieces[token_id] for token_id in token_ids)
        ways += [[*way, char] for char in (chars if way else [*chars, *rests]) if is_allowed[char[0]]]
    return None


def schema_validator(schema: dict[str, Any]) -> jsonschema.protocols.Validator:
    """A validator of values with numbers as decimals: jsonschema divides by multipleOf."""
    exact = parse_exactly(json.dumps(schema))
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    return kind(exact, format_checker=kind.FORMAT_CHECKER)


def parse_exactly(text: str) -> Any:
    """A JSON value with numbers as decimals; as infinity if the exponent is too large for one."""

    def number(digits: str) -> decimal.Decimal | float:
        try:
            return decimal.Decimal(digits)
        except decimal.InvalidOperation:
            return float(digits)

    return json.loads(text, parse_float=number)


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether it is a whole text of the grammar, byte by byte."""
    matcher, content = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar.lark, log_level=0), text.encode()
    return matcher.try_consume_tokens([*content]) == len(content) and matcher.is_accepting()


def shared(name: str) -> Path:
    """A folder next to the project, which may be missing."""
    return Path(__file__).resolve().parents[3] / "shared" / name
