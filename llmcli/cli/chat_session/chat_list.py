"""`llmcli chat --list`: the chats that are kept, as a table or as JSON."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.cells import cell_len, set_cell_size

from llmcli.cli.chat_session.kept_names import kept_paths
from llmcli.cli.chat_session.turn_commands import first_line
from llmcli.cli.facts import fact_lines
from llmcli.cli.terminal import columns_of, terminal
from llmcli.engine.conversation import SavedConversation, load_conversation
from llmcli.errors import LLMCliError


@dataclass(frozen=True)
class KeptChat:
    """One kept chat; `written` is in seconds since 1970."""

    number: int
    path: Path
    written: float
    saved: SavedConversation

    @property
    def name(self) -> str:
        """What `--resume` calls it."""
        return self.path.stem


def kept_chats(folder: Path) -> Iterator[KeptChat]:
    """Every chat, the one that was written last first. What cannot be read is named in a line, and left out."""
    for number, path in enumerate(kept_paths(folder), start=1):
        try:
            yield KeptChat(number, path, path.stat().st_mtime, load_conversation(path))
        except FileNotFoundError:  # removed since
            continue
        except LLMCliError as error:
            terminal.warn(str(error))


def show_list(folder: Path, *, as_json: bool) -> None:
    """Print the chats, the one that was written last first."""
    chats = list(kept_chats(folder))
    if as_json:
        terminal.write_json([_chat_json(chat) for chat in chats])
        return
    if not chats:
        terminal.info(f"no chats in {folder}")
        return
    rows = [("", "NAME", "WHEN", "TURNS", "MODEL", "BEGINS")]
    for chat in chats:
        when = f"{datetime.fromtimestamp(chat.written):%Y-%m-%d %H:%M}"
        turns = chat.saved.conversation.turns
        begins = first_line(turns[0].user) if turns else ""
        rows.append((str(chat.number), chat.name, when, str(len(turns)), chat.saved.model, begins))
    terminal.write(_table(rows))
    terminal.info(f"continue one with `llmcli chat --resume NAME` (or its number); they are kept in {folder}")


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns below a heading; on a terminal that is too narrow for them, lines of their own for each chat."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(set_cell_size, row, widths)).rstrip() for row in rows]
    if not sys.stdout.isatty() or max(map(cell_len, lines)) <= columns_of(sys.stdout):
        return "".join(f"{line}\n" for line in lines)
    records = []
    for number, name, when, turns, model, begins in rows[1:]:
        count = f"{turns} turn{'' if turns == '1' else 's'}"
        records += [(number, name), ("", f"{when}, {count}, {model}"), ("", begins)]
    return fact_lines(records, widths[0] + 2, sys.stdout)


def _chat_json(chat: KeptChat) -> dict[str, object]:
    turns = chat.saved.conversation.turns
    return {
        "name": chat.name,
        "path": str(chat.path),
        "written": datetime.fromtimestamp(chat.written).astimezone().isoformat(timespec="seconds"),
        "model": chat.saved.model,
        "num_turns": len(turns),
        "system": chat.saved.conversation.system,
        "first_message": turns[0].user if turns else None,
    }
