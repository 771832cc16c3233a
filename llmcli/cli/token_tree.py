"""`TokenTree`: a tokenizer's tokens for llguidance, made beside all else that a start takes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.cli import lazy

if TYPE_CHECKING:
    from llmcli.schema.library import Tokens
    from llmcli.tokenizer.base import Tokenizer


class TokenTree:
    """The tokens of the tokenizer in `folder`, for a model with `vocab_size` logits.

    They are begun at once from what an earlier run has kept; the tokenizer may still be loading then.
    """

    def __init__(self, folder: Path, vocab_size: int):
        self._folder = folder
        self._vocab_size = vocab_size
        self._pool = ThreadPoolExecutor(1, "tokens")
        self._kept = self._pool.submit(self._make_of_kept)
        self._made: Future[Tokens] | None = None

    def start(self, tokenizer: Tokenizer) -> None:
        """Go on with the tokenizer, if nothing was kept of it."""
        if self._made is None:
            self._made = self._pool.submit(self._make, tokenizer)

    def tokens(self) -> Tokens:
        """Wait for them; `start` must have been called."""
        assert self._made is not None
        return self._made.result()

    def _make_of_kept(self) -> Tokens | None:
        pieces = lazy.find_kept_pieces(self._folder)
        return None if pieces is None else lazy.Tokens(pieces.first(self._vocab_size))

    def _make(self, tokenizer: Tokenizer) -> Tokens:
        kept = self._kept.result()
        if kept is not None:
            return kept
        pieces = lazy.TokenPieces.of(tokenizer)
        self._pool.submit(lazy.keep_pieces, self._folder, pieces)
        return lazy.Tokens(pieces.first(self._vocab_size))
