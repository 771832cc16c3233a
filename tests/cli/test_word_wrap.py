"""Streamed text breaks between words at the edge of a terminal; seen through a small terminal of the test's own."""

import os
import random
import re
import subprocess
import sys
import textwrap
import unicodedata

import pexpect
import pytest

from llmcli.cli.terminal import WordWrap

RED, RESET = "\x1b[31m", "\x1b[0m"


def width_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def rows_of(text: str, columns: int) -> list[str]:
    """A terminal's screen: a full row ends only when the next character comes."""
    rows, used = [""], 0
    for character in re.sub(r"\x1b\[[\d;]*m", "", text):
        if character == "\n":
            rows.append("")
            used = 0
            continue
        width = width_of(character)
        if used + width > columns:
            rows.append("")
            used = 0
        rows[-1] += character
        used += width
    return rows


def streamed(text: str, columns: int, cuts: random.Random | None = None) -> str:
    """The text as written when it comes in pieces of random length, or at once."""
    wrap = WordWrap(lambda: columns)
    written = ""
    while text:
        length = cuts.randint(1, 7) if cuts else len(text)
        written += wrap.push(text[:length])
        text = text[length:]
    return written + wrap.flush()


@pytest.mark.parametrize("columns", [8, 20, 31, 37, 80])
def test_prose_breaks_as_textwrap_breaks_it(columns: int) -> None:
    draw = random.Random(columns)
    for _ in range(200):
        longest = min(columns, 30)
        words = ["x" * draw.randint(1, draw.choice((3, longest))) for _ in range(draw.randint(1, 40))]
        lines = [" ".join(words), "", " ".join(reversed(words))]
        expected = [row for line in lines for row in textwrap.wrap(line, columns, break_long_words=False) or [""]]
        assert rows_of(streamed("\n".join(lines), columns, draw), columns) == expected


def test_wide_characters_break_anywhere_and_are_never_halved() -> None:
    text = "漢字かな交じり文 and emoji 🎉🎉 in one line, e\u0301tude 한국어"
    draw = random.Random(1)
    for columns in range(2, 40):
        rows = rows_of(streamed(text, columns, draw), columns)
        assert "".join(rows).replace(" ", "") == text.replace(" ", "")
        assert all(sum(map(width_of, row)) <= columns for row in rows)
        assert not [row for row in rows if unicodedata.combining(row[0])]
    assert rows_of(streamed("漢字かな交", 5), 5) == ["漢字", "かな", "交"]
    family = "👩\u200d👩\u200d👧"
    assert streamed(f"123456 {family}", 8) == f"123456\n{family}"


def test_a_long_word_is_cut_at_the_edge() -> None:
    address = "https://example.org/" + "x" * 65
    assert streamed(f"See {address} for more", 40) == f"See {address} for more"  # no break inside
    assert streamed(f"It is on this page: {address} yes", 40) == f"It is on this page:\n{address} yes"
    # After it, the rows that the terminal began count.
    assert rows_of(streamed("y" * 95 + " abc de", 40), 40) == ["y" * 40, "y" * 40, "y" * 15 + " abc de"]
    assert rows_of(streamed("y" * 75 + " abc de", 40), 40) == ["y" * 40, "y" * 35 + " abc", "de"]
    assert rows_of(streamed("y" * 80 + " abc", 40), 40) == ["y" * 40, "y" * 40, "abc"]


@pytest.mark.parametrize(
    "text",
    [
        "```python\nx = some_function(with_many, arguments, that_go, beyond_the_edge)\n\n    y = 2\n```\n",
        "~~~\na long line of text that goes beyond the edge\n```\nand another one that goes beyond it\n~~~\n",
        "    code that is indented and goes beyond the edge of it\n\tthe same with a tab, and beyond the edge\n",
        "  two spaces\n    four\n\n\n",
        "trailing  \nspaces \n",
    ],
)
def test_code_and_leading_spaces_stay(text: str) -> None:
    assert streamed(text, 20, random.Random(1)) == text


def test_what_stands_behind_code_breaks_again() -> None:
    code, prose = "```\na line of code that is long\n```\n", "some words that are too long"
    assert streamed(code + prose, 20, random.Random(2)) == code + "some words that are\ntoo long"
    listed = "    - a point of a list that is long"
    assert streamed(listed, 20, random.Random(2)) == "    - a point of a\nlist that is long"


def test_colours_take_no_room_and_move_with_their_word() -> None:
    text = f"one {RED}two{RESET} thr{RED}ee{RESET} {RED}four{RESET}"
    assert streamed(text, 11) == f"one {RED}two{RESET}\nthr{RED}ee{RESET} {RED}four{RESET}"
    assert rows_of(streamed(text, 14), 14) == ["one two three", "four"]


def test_a_space_that_has_no_room_makes_no_row() -> None:
    assert streamed("12345678 \nx", 8) == "12345678\nx"
    assert streamed("12345678 ", 8) == "12345678"
    assert streamed("1234567 \nx", 8) == "1234567 \nx"


def test_only_a_word_near_the_edge_is_held() -> None:
    wrap = WordWrap(lambda: 60)
    assert wrap.push("Once up") == "Once up"
    assert wrap.push("on a ti") == "on a ti"
    assert wrap.push(" " + "x" * 20) == " " + "x" * 20
    assert wrap.push(" sto") == ""
    assert wrap.push("ry") == ""
    assert wrap.push(" ") == " story"
    assert wrap.settle() == ""
    assert wrap.push("en") == ""
    assert wrap.settle() == " en"  # may go on
    assert wrap.push("d.") == "d."
    assert wrap.flush() == ""


def test_the_width_may_change_within_a_line() -> None:
    columns = 40
    wrap = WordWrap(lambda: columns)
    written = wrap.push("x" * 18 + " " + "y" * 17)
    columns = 20
    written += wrap.push(" zzz abc") + wrap.flush()
    # The terminal has moved the end of the line into a second row, in which two cells are left.
    assert written == "x" * 18 + " " + "y" * 17 + " zzz\nabc"


def test_generate_in_a_terminal_says_what_a_pipe_gets() -> None:
    command = ["-m", "llmcli", "generate", "Once upon a time there was a little", "--seed", "3", "--threads", "1"]
    command += ["--max-new-tokens", "50", "--color", "prob"]
    settings = {**os.environ, "TERM": "xterm-256color"}
    settings.pop("NO_COLOR", None)
    child = pexpect.spawn(sys.executable, command, env=settings, encoding="utf-8", timeout=120, dimensions=(24, 33))
    child.expect(pexpect.EOF)
    shown = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", child.before).replace("\r\n", "\n")
    piped = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120).stdout
    story = f"{command[3]}{piped}"
    expected = [row for line in story.splitlines() for row in textwrap.wrap(line, 33) or [""]]
    assert "\n".join(expected) in shown
