"""`TokenPieces`: what each token of a tokenizer adds to a text, kept in the user's cache.

Asking a tokenizer of 128,000 tokens takes 0.15 s, after it is loaded; a kept file is there at once.
Its name is a digest of the tokenizer's files, and it holds a digest of its own content.
"""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcli import __version__
from llmcli.errors import LLMCliError
from llmcli.reading import TOKENIZER_MODEL, TOKENIZER_SETTINGS
from llmcli.resources import private_folder, read_private, token_cache_folder
from llmcli.tokenizer.base import Tokenizer
from llmcli.writing import OutputFile

# All that `load_tokenizer` reads of a folder.
_FILES = (
    ("tokenizer.json", TOKENIZER_MODEL),
    ("tokenizer.model", TOKENIZER_MODEL),
    ("tokenizer_config.json", TOKENIZER_SETTINGS),
    ("special_tokens_map.json", TOKENIZER_SETTINGS),
    ("added_tokens.json", TOKENIZER_SETTINGS),
    ("config.json", TOKENIZER_SETTINGS),
)
_KEEPER = OutputFile("kept bytes of tokens", lambda head: True, "remove it", 0o600)
_DIGEST_BYTES = 32


@dataclass(frozen=True, eq=False)
class TokenPieces:
    """The bytes of all tokens, one after the other. Shapes: lengths [number of tokens] uint32"""

    content: bytes
    lengths: NDArray[np.uint32]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenPieces":
        """The pieces of every token of the vocabulary; b"" for special ones."""
        pieces = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        return cls.from_list(pieces)

    @classmethod
    def from_list(cls, pieces: list[bytes]) -> "TokenPieces":
        """Join these pieces."""
        return cls(b"".join(pieces), np.fromiter(map(len, pieces), np.uint32, len(pieces)))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, token_id: int) -> bytes:
        end = int(self._ends[token_id])
        return self.content[end - int(self.lengths[token_id]) : end]

    def first(self, count: int) -> "TokenPieces":
        """The pieces of the first `count` tokens."""
        if count >= len(self):
            return self
        return TokenPieces(self.content[: self._ends[count - 1] if count else 0], self.lengths[:count])

    def with_pieces(self, pieces: Mapping[int, bytes]) -> "TokenPieces":
        """The same, with other pieces for some tokens."""
        return TokenPieces.from_list([pieces.get(token_id, self[token_id]) for token_id in range(len(self))])

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.lengths, dtype=np.int64)


def find_kept_pieces(folder: Path) -> TokenPieces | None:
    """The kept pieces of the tokenizer in a model's folder; None if there are none, or they are damaged."""
    try:
        content = read_private(_place(folder))
    except (LLMCliError, OSError):
        return None
    digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        return None
    count = int.from_bytes(body[:4], "little")
    lengths = np.frombuffer(body, "<u4", count, 4).astype(np.uint32)
    return TokenPieces(body[4 * (count + 1) :], lengths)


def keep_pieces(folder: Path, pieces: TokenPieces) -> None:
    """Keep the pieces of the tokenizer in a model's folder; if that fails, nothing is kept."""
    lengths = pieces.lengths.astype("<u4").tobytes()
    body = len(pieces).to_bytes(4, "little") + lengths + pieces.content
    with suppress(LLMCliError, OSError):
        _KEEPER.write(_place(folder), hashlib.sha256(body).digest() + body, replace=True)


def _place(folder: Path) -> Path:
    """The file for a tokenizer of this content, whatever the folder's name.

    Raises: as `SmallFile.read_bytes`; OSError if others can write to the cache
    """
    digest = hashlib.sha256(__version__.encode())
    for name, kind in _FILES:
        if (path := folder / name).exists():
            content = kind.read_bytes(path)
            digest.update(f"\n{name} {len(content)}\n".encode())
            digest.update(content)
    return private_folder(token_cache_folder()) / f"{digest.hexdigest()}.tokens"
