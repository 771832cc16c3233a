"""Text on a terminal: what would command it is escaped, words break at its edge, the bar stays out of the way."""

import contextlib
import json
import os
import pty
import random
import re
import subprocess
import sys
import textwrap
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest
from chat_terminal import write_chat_llama
from results import Llmcli
from tiny_models import write_tiny_llama

from llmcli.cli.terminal import Terminal, WordWrap, visible

OSC_52 = "\x1b]52;c;aGk=\x07"  # writes the clipboard
ESC_ONLY = ("--logit-bias", "27=2000")  # the model writes nothing but ESC
# Quiet: a progress bar draws with escapes of its own.
EIGHT_TOKENS = ("--max-new-tokens", "8", "--temperature", "0", "--threads", "1", "--quiet")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_llama(tmp_path_factory.mktemp("gate") / "model")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("gate") / "other", seed=5)


Shown = Callable[..., str]


def pretend_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both streams say that they are terminals; what is written is still captured."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)


# Unicode's names of the format characters that scripts need, or that are visible.
HARMLESS = re.compile(
    "SOFT HYPHEN|ZERO WIDTH (SPACE|NON-JOINER|JOINER)|ARABIC (NUMBER|SIGN|FOOT|END|POUND|PIASTRE|DISPUTED)"
    "|SYRIAC|MONGOLIAN|KAITHI|EGYPTIAN|SHORTHAND|MUSICAL"
)


def test_characters_that_command_a_terminal_or_reorder_or_hide_text_are_escaped():
    for code in (*range(0xD800), *range(0xE000, 0x30000), *range(0xE0000, 0xE0200)):
        character = chr(code)
        category, name = unicodedata.category(character), unicodedata.name(character, "")
        is_control = category == "Cc" and character not in "\n\t"
        is_format = category == "Cf" and not HARMLESS.match(name)
        if is_control:
            assert visible(character) == f"\\x{code:02x}"
        elif is_format:
            assert visible(character) == (f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
        elif category != "Cn":
            assert visible(character) == character


def test_emoji_and_scripts_stay_whole():
    text = "👨‍👩‍👧 ❤️ 🏳️‍🌈 葛󠄀 می‌خواهم क्‍ष ភាសា\u200bខ្មែរ"
    assert visible(text) == text


@pytest.mark.parametrize("write", [Terminal.write, Terminal.info, Terminal.show, Terminal.warn, Terminal.error])
def test_each_way_to_write_is_behind_the_gate(write, monkeypatch, capsys):
    pretend_terminal(monkeypatch)
    write(Terminal(), f"a{OSC_52}\x9b\x7f\tb\n")
    captured = capsys.readouterr()
    assert "a\\x1b]52;c;aGk=\\x07\\x9b\\x7f\tb\n" in captured.out + captured.err


@pytest.mark.parametrize("write", [Terminal.write, Terminal.info, Terminal.show, Terminal.warn, Terminal.error])
def test_a_pipe_gets_what_was_written(write, capsys):
    write(Terminal(), f"a{OSC_52}\x9bb")
    captured = capsys.readouterr()
    assert f"a{OSC_52}\x9bb" in captured.out + captured.err


def test_json_is_the_same_value_on_a_terminal_and_in_a_pipe(monkeypatch, capsys):
    pretend_terminal(monkeypatch)
    value = {"text": f"{OSC_52}\x7f\x80\x9fé\u202e\U000e0041\ufeff"}
    Terminal().write_json(value)
    written = capsys.readouterr().out
    assert json.loads(written) == value
    assert visible(written) == written


def test_the_prompt_is_shown_escaped(monkeypatch, capsys):
    pretend_terminal(monkeypatch)
    Terminal().show_prompt(f"Once{OSC_52}")
    assert "Once\\x1b]52" in capsys.readouterr().err


def test_a_model_cannot_command_the_terminal(model):
    command = ["-m", "llmcli", "generate", "ab", "-m", str(model), *ESC_ONLY, *EIGHT_TOKENS]
    settings = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1"}
    child = pexpect.spawn(sys.executable, command, env=settings, encoding="utf-8", timeout=120)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert "\\x1b" * 8 in child.before
    assert "\x1b" not in child.before


def test_a_pipe_gets_the_model_s_bytes(model, llmcli):
    assert llmcli("generate", "ab", "-m", model, *ESC_ONLY, *EIGHT_TOKENS).stdout == "\x1b" * 8 + "\n"


@pytest.fixture
def shown(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Run a command that takes both streams for terminals, without colours unless they are asked for; what it wrote."""
    for name, value in {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)

    def call(*arguments: object, exit_code: int = 0, no_color: str = "1") -> str:
        pretend_terminal(monkeypatch)
        monkeypatch.setenv("NO_COLOR", no_color)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", sys.stdout)  # both go to the terminal
            result = llmcli(*arguments)
        assert result.exit_code == exit_code, result.stdout
        return result.stdout

    return call


@pytest.mark.parametrize(
    "flags",
    [("--why",), ("--show-prompt",), ("--jsonl",), ("--json",), ("--chat", "--markdown"), ("--chat",)],
    ids=lambda flags: flags[-1],
)
def test_every_form_of_output_is_behind_the_gate(shown: Shown, model: Path, flags: tuple[str, ...]) -> None:
    if flags[0] == "--chat":
        text = shown("chat", model, "--message", "hi", *ESC_ONLY, *EIGHT_TOKENS, *flags[1:])
        assert "\\x1b" in text
        assert "\x1b\x1b" not in text
    else:
        assert "\x1b" not in shown("generate", f"a{OSC_52}", "-m", model, *ESC_ONLY, *EIGHT_TOKENS, *flags)


def test_escapes_on_a_terminal_are_our_own(shown: Shown, model: Path, other: Path) -> None:
    tinted = shown("generate", "ab", "-m", model, *ESC_ONLY, *EIGHT_TOKENS, "--color", "prob", no_color="")
    assert tinted.count("\\x1b") == 8
    assert tinted.replace("\x1b[", "").count("\x1b") == 0
    marked = shown("diff", model, other, f"a{OSC_52}", "--max-new-tokens", 24, "-q", no_color="")
    assert not [part for part in marked.split("\x1b")[1:] if not part.startswith(("[38;5;", "[7m", "[0m"))]


@pytest.mark.parametrize("write", [Terminal.info, Terminal.warn, Terminal.error])
def test_messages_break_between_words(write, monkeypatch, capsys):
    line = "the folder /tmp/a-long-name cannot be read: it is not a folder; name one that exists"
    pretend_terminal(monkeypatch)
    monkeypatch.setattr("llmcli.cli.terminal.columns_of", lambda stream: 30)
    write(Terminal(), line)
    rows = capsys.readouterr().err.splitlines()
    assert " ".join(rows).endswith(line)
    assert len(rows) == 3 + (len(" ".join(rows)) > 90)
    assert max(map(len, rows)) <= 30


def test_the_prompt_stands_before_each_sample(shown: Shown, model: Path) -> None:
    flags = ("-m", model, "--max-new-tokens", 8, "--seed", 1)
    _, *samples = re.split(r"--- sample \d ---\n", shown("generate", "Hello there", *flags, "-n", 3))
    assert len(samples) == 3
    for sample in samples:
        assert sample.startswith("Hello there")
        assert sample.count("Hello there") == 1
    assert "Hello there" not in shown("generate", "Hello there", *flags, "-q")
    assert "\x1b[2mHello there\x1b[0m" in shown("generate", "Hello there", *flags, no_color="")


def test_diff_says_what_its_marks_mean_and_shows_the_prompt(shown: Shown, model: Path, other: Path) -> None:
    flags = ("--max-new-tokens", 4)
    told = shown("diff", model, other, "Hello there", *flags)
    assert "[token>other] where B would choose another token" in told
    assert "tinted" not in told  # without colours
    assert told.rpartition("\n\n")[2].startswith(("the ", "they ", "B "))  # the verdict, apart from the text
    assert "Hello there" in told
    assert "where B finds A's token \x1b[" in shown("diff", model, other, "Hi", *flags, no_color="")
    assert "where B would" not in shown("diff", model, other, "Hi", *flags, "-q")


def test_names_and_tracebacks_are_escaped(shown: Shown, tmp_path: Path) -> None:
    for flags, word in (((), "\\x1b]52"), (("--debug",), "Traceback")):
        text = shown("info", f"{tmp_path}/{OSC_52}", *flags, exit_code=3)
        assert word in text
        assert "\x1b" not in text
    config = write_tiny_llama(tmp_path / "named") / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": "<|begin|>", "additional_special_tokens": [OSC_52]}))
    assert "\x1b" not in shown("info", config.parent)


# Streamed text breaks between words at the edge of a terminal; seen through a small terminal of the test's own.


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


# The progress bar on a terminal: its text before anything is done.


DRAWN = """
import time
from llmcli.cli.progress import progress
with progress("loading x", {unit!r}, first="importing torch") as on_progress:
    time.sleep(0.5)
    on_progress(1, 4)
    time.sleep(0.5)
"""


def drawn_by(program: str, columns: int = 100, **options: Any) -> str:
    """The output of a program on its terminal, without the control sequences."""
    master, slave = pty.openpty()
    environment = {"COLUMNS": str(columns)}
    process = subprocess.Popen([sys.executable, "-c", program], stderr=slave, env=environment, **options)
    os.close(slave)
    drawn = b""
    with contextlib.suppress(OSError), open(master, "rb", buffering=0) as terminal:  # its end is an error on Linux
        while piece := terminal.read(100_000):
            drawn += piece
    assert process.wait(timeout=60) == 0
    return re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", drawn).decode()


@pytest.mark.parametrize(("unit", "done"), [("bytes", "1/4 bytes"), ("prompts", "1/4")])
def test_nothing_is_counted_before_the_total_is_known(unit: str, done: str) -> None:
    told = drawn_by(DRAWN.format(unit=unit))
    before, _, after = told.partition(done)
    assert "loading x" in before
    assert "importing torch" in before
    assert "?" not in before
    assert "importing torch" not in after


COMPILED = """
import time
from llmcli.cli.progress import say_compiling
from llmcli.cli.progress import progress
with progress("loading x", first="starting the card") as on_progress:
    for done in range(3):
        say_compiling(done, 2)
        time.sleep(0.5)
"""


def test_the_bar_counts_what_is_compiled() -> None:
    told = drawn_by(COMPILED)
    assert told.count("compiling 2 kernels; the next start finds them compiled") == 1
    seen = re.findall(r"compiling kernels \d/\d|starting the card", told)
    assert list(dict.fromkeys(seen)) == ["starting the card", "compiling kernels 0/2", "compiling kernels 1/2"]
    assert seen[-1] == "starting the card"  # compiled, and nothing is read yet


def test_without_a_terminal_one_line_tells_of_compiling() -> None:
    process = subprocess.run([sys.executable, "-c", COMPILED], stderr=subprocess.PIPE, text=True, check=True)
    assert process.stderr == "compiling 2 kernels; the next start finds them compiled\n"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    home = tmp_path / "a file"
    home.write_text("not a folder")
    environment = {**os.environ, "LLMCLI_HOME": str(home)}
    process = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, stderr=subprocess.PIPE, text=True, check=True
    )
    assert process.stderr == f"compiling 2 kernels at each start: {home} is not a folder\n"


NARROW = """
import time
from llmcli.cli.progress import progress
with progress("loading a-model-of-some-name") as on_progress:
    on_progress(15 << 20, 21 << 20)
    time.sleep(0.3)
"""


def test_figures_stay_on_one_line_of_a_narrow_terminal() -> None:
    assert "15.0/21.0 MiB" in drawn_by(NARROW, columns=60)


PRINTED = """
import sys
from llmcli.cli.progress import progress
from llmcli.cli.terminal import terminal
with progress("telling", "prompts") as on_progress:
    on_progress(0, 2)
    terminal.write("a line of stdout that is longer than the terminal is wide\\n")
    on_progress(1, 2)
"""


def test_what_is_printed_beside_it_goes_to_stdout(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("wb") as stdout:
        told = drawn_by(PRINTED, columns=30, stdout=stdout)
    assert out.read_text() == "a line of stdout that is longer than the terminal is wide\n"
    assert "a line" not in told
