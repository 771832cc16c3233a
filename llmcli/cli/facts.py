"""Lines of a name and what is said about it, such as those of `info`, `plan` and the `/help` of a chat."""

import textwrap
from collections.abc import Iterable
from typing import TextIO

from llmcli.cli.terminal import columns_of

LEAST_ROOM = 20  # columns beside the names; with fewer the terminal breaks the lines


def fact_lines(rows: Iterable[tuple[str, str]], width: int, stream: TextIO) -> str:
    """One line for each row, the names padded to `width`; on a terminal long texts continue below their beginning."""
    room = columns_of(stream) - width if stream.isatty() else 0
    return "".join(f"{name:<{width}}{_wrapped(text, width, room)}\n" for name, text in rows)


def _wrapped(text: str, width: int, room: int) -> str:
    if room < LEAST_ROOM or len(text) <= room:
        return text
    parts = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return f"\n{'':<{width}}".join(parts)
