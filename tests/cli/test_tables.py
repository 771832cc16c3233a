"""Tables of figures: plain columns in a pipe; on a terminal whole at every width, in several parts if need be."""

import io
import re

import pytest

from llmcli.cli.tables import format_table

HEADER = ("KERNEL", "MATRIX", "LAUNCHES", "SHARED", "LIMITED BY", "GB/s")
ROWS = [
    ("gemv 1", "q_proj k_proj v_proj", "16", "98.6 KiB", "registers", "4,100.3"),
    ("attention_decode", "", "16", "0 bytes", "warps, registers", "0.1"),
    ("漢字", "embed_tokens", "1", "1.2 MiB", "blocks", "12.0"),
]
_COLORS = re.compile(r"\x1b\[[\d;]*m")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, columns: int) -> list[str]:
    monkeypatch.setattr("sys.stdout", Screen())
    monkeypatch.setattr("llmcli.cli.tables.columns_of", lambda stream: columns)
    return _COLORS.sub("", format_table(HEADER, ROWS)).splitlines()


def test_a_pipe_gets_plain_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    lines = format_table(HEADER, ROWS).splitlines()
    assert [re.split(r"\s{2,}", line.strip()) for line in (lines[0], lines[1])] == [list(HEADER), list(ROWS[0])]


def test_a_wide_terminal_gets_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(monkeypatch, 120)
    assert len(lines) == 2 + len(ROWS)
    assert lines[0].split() == " ".join(HEADER).split()


@pytest.mark.parametrize("columns", range(30, 120, 3))
def test_nothing_is_cut_at_any_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    lines = drawn(monkeypatch, columns)
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    assert "…" not in text
    for row in (HEADER, *ROWS):
        for cell in row:
            whole = [cell] if re.search(r"\d", cell) else cell.split()
            assert all(re.search(rf"(?<!\S){re.escape(part)}(?!\S)", text) for part in whole), cell


def test_every_part_begins_with_the_first_column(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = "\n".join(drawn(monkeypatch, 40)).split("\n\n")
    assert len(parts) > 1
    for part in parts:
        words = part.split()
        assert words[0] == "KERNEL"
        assert {"attention_decode", "漢字"} <= set(words)
