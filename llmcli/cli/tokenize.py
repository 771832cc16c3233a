"""`llmcli tokenize`: text to token ids and back."""

from pathlib import Path
from typing import Annotated

import typer

from llmcli.cli import lazy
from llmcli.cli.options import DebugOption, ModelOption
from llmcli.cli.prompt import read_prompt
from llmcli.cli.session import model_folder
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError
from llmcli.tokenizer.base import decode as decode_text

MAX_DIGITS = 20


def tokenize(
    model: ModelOption = None,
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT", help="Text to tokenize; without it, or with `-`, read standard input."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", readable=False, metavar="FILE", help="Read the text from a file.")
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Read TEXT as token ids and print their text.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object: token_ids, pieces, text.")] = False,
    debug: DebugOption = False,
) -> None:
    """Show the tokens of a text: each id and its piece.

    Examples:

    llmcli tokenize "Once upon a time" -m my-model

    llmcli tokenize --decode "1 9038 2501" -m my-model
    """
    content = read_prompt(text, file)
    tokenizer = lazy.load_tokenizer(model_folder(model))
    token_ids = _parse_ids(content, tokenizer.vocab_size) if decode else tokenizer.encode(content)
    pieces = [tokenizer.piece(token_id) for token_id in token_ids]
    if json_:
        terminal.write_json(
            {"token_ids": token_ids, "pieces": pieces, "text": decode_text(tokenizer, token_ids, at_start=True)}
        )
    elif decode:
        terminal.write(f"{decode_text(tokenizer, token_ids, at_start=True)}\n")
    else:
        width = len(str(max(token_ids, default=0)))
        for token_id, piece in zip(token_ids, pieces, strict=True):
            shown = piece if piece.isprintable() else ascii(piece)[1:-1]
            terminal.write(f"{token_id:>{width}}  {shown}\n")
        terminal.info(f"{len(token_ids)} tokens")


def _parse_ids(text: str, vocab_size: int) -> list[int]:
    """Token ids out of text such as `1 2 3`, `1,2,3` or `[1, 2, 3]`.

    Raises: UsageError for anything else, or an id outside the vocabulary.
    """
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) < MAX_DIGITS) or int(word) >= vocab_size:
            raise UsageError(
                f"{word[:MAX_DIGITS]!r} is not a token id of this tokenizer, "
                f"expected numbers from 0 to {vocab_size - 1}"
            )
    return [int(word) for word in words]
