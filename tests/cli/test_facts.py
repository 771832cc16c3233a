"""Lines of a name and a text: whole in a pipe, hanging below their beginning on a terminal."""

import io
import textwrap

import pytest

from llmcli.cli.terminal import fact_lines

ROWS = [("model", "a folder of some name"), ("", "and what it holds: " + "weights " * 12), ("empty", "")]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_one_line_each() -> None:
    assert fact_lines(ROWS, 10, io.StringIO()) == "".join(f"{name:<10}{text}\n" for name, text in ROWS)


def test_a_terminal_gets_texts_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.cli.terminal.columns_of", lambda stream: 40)
    lines = fact_lines(ROWS, 10, Screen()).splitlines()
    assert lines[0] == "model     a folder of some name"
    expected = textwrap.wrap(ROWS[1][1].strip(), 30)
    assert [line[10:] for line in lines[1:-1]] == expected
    assert {line[:10] for line in lines[1:-1]} == {" " * 10}
    assert lines[-1].strip() == "empty"


def test_a_very_narrow_terminal_breaks_lines_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.cli.terminal.columns_of", lambda stream: 25)
    assert len(fact_lines(ROWS, 10, Screen()).splitlines()) == len(ROWS)
