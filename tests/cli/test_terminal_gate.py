"""Text by others (models, files, hubs, arguments) never reaches a terminal as control characters; a pipe gets it."""

import json
import os
import re
import sys
import unicodedata
from pathlib import Path

import pexpect
import pytest
from chat_terminal import write_chat_llama
from tiny_models import write_tiny_llama

from llmcli.cli.terminal import Terminal, visible

OSC_52 = "\x1b]52;c;aGk=\x07"  # writes the clipboard
ESC_ONLY = ("--logit-bias", "27=2000")  # the model writes nothing but ESC
# Quiet: a progress bar draws with escapes of its own.
EIGHT_TOKENS = ("--max-new-tokens", "8", "--temperature", "0", "--threads", "1", "--quiet")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_llama(tmp_path_factory.mktemp("gate") / "model")


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


class PseudoTerminal:
    """A command in a real pseudo-terminal, and all that it wrote there."""

    def __init__(self, *arguments: object, **environment: str):
        settings = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1", **environment}
        command = ["-m", "llmcli", *map(str, arguments)]
        child = pexpect.spawn(sys.executable, command, env=settings, encoding="utf-8", timeout=120)
        child.expect(pexpect.EOF)
        child.close()
        self.text = child.before
        self.exit_code = child.exitstatus


def test_a_model_cannot_command_the_terminal(model):
    run = PseudoTerminal("generate", "ab", "-m", model, *ESC_ONLY, *EIGHT_TOKENS)
    assert run.exit_code == 0
    assert "\\x1b" * 8 in run.text
    assert "\x1b" not in run.text


def test_a_pipe_gets_the_model_s_bytes(model, llmcli):
    assert llmcli("generate", "ab", "-m", model, *ESC_ONLY, *EIGHT_TOKENS).stdout == "\x1b" * 8 + "\n"


def test_tinted_text_has_only_our_own_escapes(model):
    run = PseudoTerminal(
        "generate", "ab", "-m", model, *ESC_ONLY, *EIGHT_TOKENS, "--color", "prob", NO_COLOR="", COLORTERM="truecolor"
    )
    assert run.exit_code == 0
    assert run.text.count("\\x1b") == 8
    assert run.text.replace("\x1b[", "").count("\x1b") == 0


@pytest.mark.parametrize("flag", ["--why", "--show-prompt", "--jsonl", "--json"])
def test_other_forms_of_output_are_behind_the_gate_too(model, flag):
    run = PseudoTerminal("generate", f"a{OSC_52}", "-m", model, *ESC_ONLY, *EIGHT_TOKENS, flag)
    assert run.exit_code == 0
    assert "\x1b" not in run.text


@pytest.mark.parametrize("flags", [(), ("--markdown",)])
def test_answers_of_a_chat_are_behind_the_gate(model, flags):
    run = PseudoTerminal("chat", model, "--message", "hi", *ESC_ONLY, *EIGHT_TOKENS, *flags)
    assert run.exit_code == 0
    assert "\\x1b" in run.text
    assert "\x1b\x1b" not in run.text


def test_diff_marks_on_a_terminal_are_our_own(tmp_path, model):
    other = write_tiny_llama(tmp_path / "other", seed=5)
    run = PseudoTerminal(
        "diff", model, other, f"a{OSC_52}", "--max-new-tokens", "24", "--threads", "1", "-q", NO_COLOR=""
    )
    assert run.exit_code == 0
    assert not [part for part in run.text.split("\x1b")[1:] if not part.startswith(("[38;5;", "[7m", "[0m"))]


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


def test_the_prompt_stands_before_each_sample(model):
    flags = ("-m", model, "-n", "3", "--max-new-tokens", "8", "--seed", "1", "--threads", "1")
    _, *samples = re.split(r"--- sample \d ---\r\n", PseudoTerminal("generate", "Hello there", *flags).text)
    assert len(samples) == 3
    assert [sample.count("Hello there") for sample in samples] == [1, 1, 1]
    assert all(sample.startswith("Hello there") for sample in samples)
    assert "Hello there" not in PseudoTerminal("generate", "Hello there", *flags, "-q").text


def test_diff_says_what_its_marks_mean_and_shows_the_prompt(tmp_path, model):
    other = write_tiny_llama(tmp_path / "other", seed=5)
    flags = ("--max-new-tokens", "4", "--threads", "1")
    told = PseudoTerminal("diff", model, other, "Hello there", *flags).text
    assert "[token>other] where B would choose another token" in told
    assert "tinted" not in told  # without colours
    assert told.rpartition("\r\n\r\n")[2].startswith(("the ", "they ", "B "))  # the verdict, apart from the text
    assert "Hello there" in told
    assert "where B finds A's token \x1b[" in PseudoTerminal("diff", model, other, "Hi", *flags, NO_COLOR="").text
    assert "where B would" not in PseudoTerminal("diff", model, other, "Hi", *flags, "-q").text


def test_names_in_errors_and_in_info_are_escaped(tmp_path, model):
    run = PseudoTerminal("info", f"{tmp_path}/{OSC_52}")
    assert run.exit_code == 3
    assert "\\x1b]52" in run.text
    assert "\x1b" not in run.text
    config = model.parent / "named" / "tokenizer_config.json"
    write_tiny_llama(config.parent)
    config.write_text(json.dumps({"bos_token": "<|begin|>", "additional_special_tokens": [OSC_52]}))
    run = PseudoTerminal("info", config.parent)
    assert run.exit_code == 0
    assert "\x1b" not in run.text


def test_a_traceback_of_debug_is_behind_the_gate(tmp_path):
    run = PseudoTerminal("info", f"{tmp_path}/{OSC_52}", "--debug")
    assert "Traceback" in run.text
    assert "\x1b" not in run.text
