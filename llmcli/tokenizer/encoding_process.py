"""The parent's side of the child process that encodes with a tokenizer.json whose steps are not known to be quick.

document.py says which these are. The limits are far above what a tokenizer takes that ends at all.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmcli.tokenizer.bounded_process import BoundedProcess

LIMIT_SECONDS = 4
# A busy machine loads ten million characters a second and encodes one million.
FILE_CHARACTERS_A_SECOND = 1_000_000
TEXT_CHARACTERS_A_SECOND = 100_000


class EncodingProcess:
    """Encodes with one tokenizer.json; the process starts with the first text."""

    def __init__(self, path: Path, document: str, added_tokens: Sequence[dict[str, Any]]) -> None:
        setup = {"document": document, "added_tokens": list(added_tokens)}
        remedy = "its expressions or steps do not suit this text"
        limit_seconds = LIMIT_SECONDS + len(document) // FILE_CHARACTERS_A_SECOND
        program = "llmcli.tokenizer.encoding_sandbox"
        self._process = BoundedProcess(program, "tokenizers", str(path), remedy, (setup, limit_seconds))

    def encode(self, text: str, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
        """The token ids as the library gives them.

        Raises: TokenizerError if the library fails, needs too long, or more than 2 GB.
        """
        request = {
            "text": text,
            "add_special_tokens": add_special_tokens,
            "parse_special_tokens": parse_special_tokens,
        }
        return list(self._process.ask(request, LIMIT_SECONDS + len(text) // TEXT_CHARACTERS_A_SECOND))
