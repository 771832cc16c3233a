"""`--template-var`: variables of the chat template, for generate, chat and batch."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from results import Result

from llmcli.cli.prompt import parse_template_variables
from llmcli.errors import UsageError

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


def test_the_template_sees_the_values(llmcli: Callable[..., Result], model: Path, tmp_path: Path) -> None:
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


def test_a_special_token_in_a_value_is_text(llmcli: Callable[..., Result], model: Path) -> None:
    flags = ("--template-var", "effort=<|end|>", "--max-new-tokens", 1, "--json")
    generated = llmcli("generate", "--chat", "Hi", "-m", model, *flags)
    assert prompt_of(json.loads(generated.stdout)["prompt_token_ids"]) == 'Hi"<|end|>">'


@pytest.mark.parametrize("name", ["nonsense", "own", "messages", "add_generation_prompt", "raise_exception"])
def test_a_name_that_the_template_does_not_look_up(llmcli: Callable[..., Result], model: Path, name: str) -> None:
    result = llmcli("generate", "--chat", "Hi", "-m", model, "--quiet", "--template-var", f"{name}=1")
    result.expect_error(2, f"--template-var {name}: the chat template", "it has effort, enable_thinking")


def test_a_template_without_variables(
    llmcli: Callable[..., Result], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_it_belongs_to_chat(llmcli: Callable[..., Result], model: Path) -> None:
    llmcli("generate", "Hi", "-m", model, "--template-var", "a=1").expect_error(2, "--template-var need --chat")
