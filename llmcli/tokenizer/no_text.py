"""`NoText`: a tokenizer of tokens without words, for benchmarks of shapes."""

from llmcli.tokenizer.base import Tokenizer


class NoText(Tokenizer):
    """Stands for a tokenizer where there is none: shapes have no words, and the figures need none."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.bos_token_id = None
        self.eos_token_ids = self.special_token_ids = frozenset()
        self.strips_leading_space = False

    def _encode(self, text: str, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
        return []

    def token_id(self, content: str) -> int | None:
        """No word has an id."""
        return None

    def piece(self, token_id: int) -> str:
        """No token has a piece."""
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        """No token has bytes."""
        return b""
