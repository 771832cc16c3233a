"""Token ids to text, one id at a time.

Owns the incomplete UTF-8 tail between two tokens and the leading space; never emits half a character.
"""

import codecs
from collections.abc import Iterable

from llmcli.tokenizer.base import Tokenizer


class StreamDecoder:
    """Turns token ids into text as they come. All `push` results and one `flush` together equal `decode`.

    `at_start` says that nothing visible comes before these tokens, so a tokenizer that strips the leading space
    strips it here; False when the text continues a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_within_character = False
        self._strips_next_space = at_start and tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """The text that this token completes, "" if its bytes end within a character."""
        text = None if self._is_within_character else self._tokenizer.token_text(token_id)
        if text is None:
            text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
            self._is_within_character = bool(self._utf8.getstate()[0])
        return self._strip(text) if self._strips_next_space else text

    def flush(self) -> str:
        """The rest, at the end of the tokens: a replacement character if a character was left incomplete."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strips_next_space and text:
            self._strips_next_space = False
            return text.removeprefix(" ")
        return text


def decode(tokenizer: Tokenizer, token_ids: Iterable[int], *, at_start: bool) -> str:
    """The text of all these tokens at once; bytes that are not UTF-8 become replacement characters."""
    text = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids).decode(errors="replace")
    return text.removeprefix(" ") if at_start and tokenizer.strips_leading_space else text
