"""tokenizer.model, read by the `sentencepiece` library, with the tokens that tokenizer_config.json adds to it.

Refuses a file that is not a SentencePiece model.
"""

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import sentencepiece

from llmcli.errors import TokenizerError
from llmcli.tokenizer.base import AddedToken, Tokenizer, TokenizerSettings

# A private-use character that no vocabulary holds, so it never merges with the text after it.
SENTINEL = "\U0010fffd"


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer.model. The text begins with a space if the model says so (`add_dummy_prefix`).

    Text after a special token gets no such space, unless the folder declares `legacy: true`. The unknown token is shown
    as in sentencepiece, " ⁇ ", unless the folder declares it special.
    """

    def __init__(self, path: Path, content: bytes, settings: TokenizerSettings) -> None:
        super().__init__(path, settings)
        self._processor, self._pieces = _load(path, content)
        # An entry that only repeats a piece of the model adds nothing.
        self._added_tokens = {
            token_id: token
            for token_id, token in settings.added_tokens.items()
            if self._pieces[token_id : token_id + 1] != [token.content]
        }
        self._added_ids = {token.content: token_id for token_id, token in self._added_tokens.items()}
        size = max([len(self._pieces), *(token_id + 1 for token_id in self._added_tokens)])
        self.vocab_size = self._checked_vocab_size(size)

        self._read_special_tokens()
        # "▁" alone decodes to nothing exactly if the decoder strips the leading space.
        space_id = self.token_id("▁")
        self.strips_leading_space = space_id is not None and self._processor.decode([space_id]) == ""
        unk_id = self._processor.unk_id()  # -1: the model has none, which is possible if every byte is a piece
        self._unknown_surface: bytes = self._processor.decode([unk_id]).encode() if unk_id >= 0 else b""
        self._sentinel_ids = self._processor.encode(SENTINEL)
        self._prepare_search()

    def _read_special_tokens(self) -> None:
        settings = self._settings
        model_bos, model_eos = self._processor.bos_id(), self._processor.eos_id()  # -1: the model has none
        self.bos_token_id = self._find_declared(
            "bos_token", settings.bos_token, is_added=settings.add_bos_token is True
        )
        if settings.bos_token is None and model_bos >= 0:
            self.bos_token_id = model_bos
        self._must_add_bos = settings.add_bos_token is not False
        self._final_eos_id = self._find_declared("eos_token", settings.eos_token, is_added=settings.add_eos_token)
        if settings.eos_token is None and model_eos >= 0:
            self._final_eos_id = model_eos
        self.eos_token_ids = frozenset(i for i in (self._final_eos_id, model_eos) if i is not None and i >= 0)
        controls = {token_id for token_id in range(len(self._pieces)) if self._processor.is_control(token_id)}
        declared = {self.token_id(content) for content in settings.special_tokens}
        self.special_token_ids = frozenset(controls | {i for i in declared if i is not None})

    def _prepare_search(self) -> None:
        behaviour = self._settings.special_tokens
        contents = sorted({self.piece(token_id) for token_id in self.special_token_ids} - {""})
        special = [behaviour.get(content) or AddedToken(content, special=True) for content in contents]
        ordinary = [token for i, token in self._added_tokens.items() if i not in self.special_token_ids]
        self._every_added_token = _finder([*special, *ordinary])
        self._ordinary_added_token = _finder(ordinary)
        self._strips_left = frozenset(token.content for token in [*special, *ordinary] if token.lstrip)
        # Declared special, but a piece that the model itself finds in any text ("user defined").
        found_anyway = [content for content in contents if self.token_id(content) in self._processor.encode(content)]
        self._found_anyway = re.compile("|".join(f"(?={re.escape(content)})" for content in found_anyway) or "(?!)")

    def _encode(self, text: str, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
        finder = self._every_added_token if parse_special_tokens else self._ordinary_added_token
        token_ids: list[int] = []
        position = 0
        for match in finder.finditer(text):
            before = text[position : match.start()]
            if match[match.lastindex or 0] in self._strips_left:
                before = before.rstrip()
            token_ids += self._encode_between(before, position == 0, parse_special_tokens)
            token_id = self.token_id(match[match.lastindex or 0])
            assert token_id is not None, "the finder is made of tokens that have an id"
            token_ids.append(token_id)
            position = match.end()
        token_ids += self._encode_between(text[position:], position == 0, parse_special_tokens)
        if add_special_tokens and self._settings.add_eos_token and self._final_eos_id is not None:
            token_ids.append(self._final_eos_id)
        return token_ids

    def _encode_between(self, text: str, is_first: bool, parse_special_tokens: bool) -> list[int]:
        """Encode text without added tokens, or whose added tokens count as ordinary text."""
        if parse_special_tokens:
            parts = [text]
        else:  # cut each special string after its first character, so that the model cannot find it
            cuts = [0, *(match.start() + 1 for match in self._found_anyway.finditer(text)), len(text)]
            parts = [text[start:end] for start, end in pairwise(cuts)]
        token_ids: list[int] = []
        for index, part in enumerate(parts):
            takes_prefix = index == 0 and (is_first or self._settings.legacy)
            token_ids += self._processor.encode(part) if takes_prefix else self._encode_continuation(part)
        return token_ids

    def _encode_continuation(self, text: str) -> list[int]:
        """Encode without the space that the model puts before a text; the library has no such option."""
        token_ids: list[int] = self._processor.encode(SENTINEL + text)[len(self._sentinel_ids) :]
        unk_id = self._processor.unk_id()
        # Without byte fallback the sentinel is unknown, and unknown characters after it join its token.
        if self._sentinel_ids[-1] == unk_id and text and self._processor.encode(text[0])[-1:] == [unk_id]:
            token_ids.insert(0, unk_id)
        return token_ids

    def token_id(self, content: str) -> int | None:
        """The id of a token given its vocabulary string, or None."""
        if content in self._added_ids:
            return self._added_ids[content]
        token_id: int = self._processor.piece_to_id(content)  # unknown strings get the unknown token's id, or -1
        return token_id if token_id >= 0 and self._pieces[token_id] == content else None

    def piece(self, token_id: int) -> str:
        """The vocabulary string of a token, such as "▁the"; "" for an id outside the vocabulary."""
        if token_id in self._added_tokens:
            return self._added_tokens[token_id].content
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else ""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to decoded text; b"" for a special token and for an id outside the vocabulary."""
        if token_id in self.special_token_ids:
            return b""
        piece = self.piece(token_id)
        if token_id in self._added_tokens or not piece:
            return piece.encode()
        if self._processor.is_byte(token_id):  # written <0xNN>
            return bytes.fromhex(piece[3:5])
        if self._processor.is_unknown(token_id):
            return self._unknown_surface
        return piece.replace("▁", " ").encode()


def _load(path: Path, content: bytes) -> tuple[sentencepiece.SentencePieceProcessor, list[str]]:
    """The model and its pieces by id."""
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise TokenizerError(f"{path} is not a SentencePiece model ({reason}); download the file again") from error
    pieces = list(processor.id_to_piece(list(range(processor.get_piece_size()))))
    for token_id, piece in enumerate(pieces):
        if processor.is_byte(token_id) and not re.fullmatch("<0x[0-9A-F]{2}>", piece):
            raise TokenizerError(f"{path} calls its piece {piece!r} a byte, expected <0x00> to <0xFF>")
    return processor, pieces


def _finder(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    """A pattern that finds the longest of these tokens at each place; its one matching group is the token's string."""
    patterns = []
    for token in sorted(tokens, key=lambda token: len(token.content), reverse=True):
        pattern = f"({re.escape(token.content)})"
        if token.single_word:
            pattern = rf"(?<!\w){pattern}(?!\w)"
        patterns.append(pattern + (r"\s*" if token.rstrip else ""))
    return re.compile("|".join(patterns) or "(?!)")
