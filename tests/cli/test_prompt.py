"""Where a prompt comes from, and variables of chat templates."""

import io
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from results import Llmcli

from llmcli.cli import prompt
from llmcli.cli.prompt import parse_template_variables
from llmcli.errors import UsageError


class Stdin:
    """Standard input with these bytes."""

    def __init__(self, content: bytes):
        self.buffer = io.BytesIO(content)

    def isatty(self) -> bool:
        return False


def test_a_pipe_named_as_file_is_waited_for(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(b"from a pipe\r\n"))
    writer.start()
    assert prompt.read_prompt(None, path) == "from a pipe"
    writer.join()


def test_a_file_without_end_is_refused(tmp_path):
    link = tmp_path / "zero"
    link.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=f"{link} is longer than 64 MiB; give a shorter text"):
        prompt.read_prompt(None, link)


def test_the_limit_counts_for_standard_input_too(monkeypatch):
    monkeypatch.setattr(prompt, "MAX_BYTES", 8)
    monkeypatch.setattr(sys, "stdin", Stdin(b"12345678"))
    assert prompt.read_prompt(None, None) == "12345678"
    monkeypatch.setattr(sys, "stdin", Stdin(b"123456789"))
    with pytest.raises(UsageError, match="standard input is longer than 0 MiB"):
        prompt.read_prompt(None, None)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A pipe for standard input: where to write."""
    reader, writer = os.pipe()
    with open(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield writer


def fill(writer: int, content: bytes) -> None:
    os.write(writer, content)
    os.close(writer)


@pytest.mark.parametrize(
    ("argument", "in_file", "piped", "expected"),
    [
        ("Summarize this:", None, b"first line\nsecond\n", "Summarize this:\n\nfirst line\nsecond"),
        (None, "Summarize this:\n", b"a text", "Summarize this:\n\na text"),
        ("Once", None, b"", "Once"),
        ("Once", None, b"\n", "Once"),
        ("-", None, b"Once\n", "Once"),
    ],
)
def test_what_is_piped_in_joins_the_prompt(
    pipe: int, tmp_path: Path, argument: str | None, in_file: str | None, piped: bytes, expected: str
) -> None:
    path = None if in_file is None else tmp_path / "prompt"
    if path is not None:
        path.write_text(str(in_file))
    fill(pipe, piped)
    assert prompt.read_prompt(argument, path) == expected


def test_a_redirected_file_joins_and_a_device_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("a text\n")
    for path, expected in ((tmp_path / "text", "Once\n\na text"), (Path("/dev/zero"), "Once")):
        with path.open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert prompt.read_prompt("Once", None) == expected


def test_a_pipe_that_says_nothing_is_waited_for_with_a_word(pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def say(message: str) -> None:
        said.append(message)
        fill(pipe, b"late")  # else nothing would ever come

    monkeypatch.setattr(prompt, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(prompt.terminal, "info", say)
    assert prompt.read_prompt("Once", None) == "Once\n\nlate"
    assert [message[:57] for message in said] == ["waiting for standard input, to append it to the prompt; a"]


def test_an_evaluation_takes_no_pipe_beside_its_file(pipe: int, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("a text")
    fill(pipe, b"another")
    assert prompt.read_text(path) == "a text"


def test_without_a_text_the_message_names_what_the_command_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = Stdin(b"typed")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    for stdin in (typed, None):
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(UsageError, match="no prompt: give it as an argument"):
            prompt.read_prompt(None, None)
        with pytest.raises(UsageError, match="^no text: give it with --file, or on standard input$"):
            prompt.read_text(None)
    with pytest.raises(UsageError, match="standard input is closed; give the prompt as an argument"):
        prompt.read_prompt("-", None)
    monkeypatch.setattr(sys, "stdin", typed)
    assert prompt.read_prompt("-", None) == "typed"


# `--template-var`: variables of the chat template, for generate, chat and batch.


TEMPLATE = (
    "{% set own = 1 %}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}{{ effort | default('mid') | tojson }}"
    "{{ raise_exception('x') if own == 2 }}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def prompt_of(token_ids: list[int]) -> str:
    return bytes(token_ids).decode()


def test_the_template_sees_the_values(llmcli: Llmcli, model: Path, tmp_path: Path) -> None:
    flags = ("--template-var", "enable_thinking=false", "--template-var", "effort=high")
    generated = llmcli("generate", "--chat", "Hi", "-m", model, "--max-new-tokens", 1, "--json", *flags)
    assert prompt_of(json.loads(generated.stdout)["prompt_token_ids"]) == 'Hi<no>"high">'
    talked = llmcli("chat", model, "--message", "Hi", "--max-new-tokens", 1, "--json", *flags)
    assert prompt_of(json.loads(talked.stdout)["turns"][0]["prompt_token_ids"]) == 'Hi<no>"high">'
    (tmp_path / "in.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}')
    common = ("-m", model, "--max-new-tokens", 1)
    batch = llmcli("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", *common, *flags)
    assert batch.exit_code == 0, batch.stderr
    written = json.loads((tmp_path / "out.jsonl").read_text())
    assert prompt_of(written["prompt_token_ids"]) == 'Hi<no>"high">'
    # Another value would give other texts, so the output is not resumed.
    again = llmcli("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", *common, *flags[:2])
    again.expect_error(2, "template_var")


def test_a_special_token_in_a_value_is_text(llmcli: Llmcli, model: Path) -> None:
    flags = ("--template-var", "effort=<|end|>", "--max-new-tokens", 1, "--json")
    generated = llmcli("generate", "--chat", "Hi", "-m", model, *flags)
    assert prompt_of(json.loads(generated.stdout)["prompt_token_ids"]) == 'Hi"<|end|>">'


@pytest.mark.parametrize("name", ["nonsense", "own", "messages", "add_generation_prompt", "raise_exception"])
def test_a_name_that_the_template_does_not_look_up(llmcli: Llmcli, model: Path, name: str) -> None:
    result = llmcli("generate", "--chat", "Hi", "-m", model, "--quiet", "--template-var", f"{name}=1")
    result.expect_error(2, f"--template-var {name}: the chat template", "it has effort, enable_thinking")


def test_a_template_without_variables(llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hi")))
    flags = ("--quiet", "--chat-template", "plain", "--template-var", "a=1")
    llmcli("chat", model, *flags).expect_error(2, "`plain` has no such variable; it has none")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {}),
        (["a=true", "b=1", "c=high", "d="], {"a": True, "b": 1, "c": "high", "d": ""}),
        (['a={"x": [1, null]}', "b==", 'c="1"'], {"a": {"x": [1, None]}, "b": "=", "c": "1"}),
    ],
)
def test_values(flags: list[str], expected: dict[str, Any]) -> None:
    assert parse_template_variables(flags) == expected


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["a"], "expected NAME=VALUE"),
        (["=1"], "expected NAME=VALUE"),
        (["a b=1"], "expected NAME=VALUE"),
        (["a=1", "a=2"], "gives a twice"),
        (["a=False"], "a is 'False', expected JSON: true, false or null"),
        (["a=" + "[" * 100_000], "nested too deeply"),
        (["a=\udcff"], "is not UTF-8"),
        (['a=["\\ud800"]'], r"^--template-var a: \[0\] has the lone surrogate U\+D800, half of a character"),
    ],
)
def test_values_that_are_refused(flags: list[str], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        parse_template_variables(flags)


def test_it_belongs_to_chat(llmcli: Llmcli, model: Path) -> None:
    llmcli("generate", "Hi", "-m", model, "--template-var", "a=1").expect_error(2, "--template-var need --chat")
