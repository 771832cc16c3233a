"""--help shows what most users need, --help-all the rest; both without types, ranges and colours, at any width."""

import importlib
import re
from collections.abc import Callable

import pytest
import typer
from results import Result

from llmcli.cli.command import add_command
from llmcli.cli.commands import COMMANDS

GROUPS = {"models": ("list", "rm"), "kernels": ("compare", "profile")}
NAMES = [command.name for command in COMMANDS if command.name not in GROUPS]
CALLS = [
    (),
    *((group,) for group in GROUPS),
    *((group, name) for group, names in GROUPS.items() for name in names),
    *((name,) for name in NAMES),
]
EXPERT = {
    "--xtc-probability",
    "--mirostat-tau",
    "--dry-base",
    "--logit-bias",
    "--sampler-order",
    "--kv-cache",
    "--debug",
}
EVERYDAY = {"--model", "--max-new-tokens", "--temperature", "--top-p", "--seed", "--stop", "--device", "--context"}


def declared(name: str) -> set[str]:
    """Every option of a command, by its declaration."""
    entry = next(entry for entry in COMMANDS if entry.name == name)
    app = typer.Typer()
    add_command(app, name, getattr(importlib.import_module(f"llmcli.cli.{entry.module}"), entry.attribute))
    found = (option for parameter in typer.main.get_command(app).params for option in parameter.opts)
    return {option for option in found if option.startswith("--") and "completion" not in option}


def listed(text: str) -> set[str]:
    """The options that have a row."""
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE))


@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_help_is_plain_and_fits(
    llmcli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, call: tuple[str, ...], flag: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    result = llmcli(*call, flag)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= width
    assert not re.search(r"<\w+>|<=|\x1b|2\^|\[/?bold", result.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_all_options_are_listed_somewhere(llmcli: Callable[..., Result], name: str) -> None:
    short, full = llmcli(name, "--help").stdout, llmcli(name, "--help-all").stdout
    assert listed(full) - {"--help"} == declared(name)
    assert listed(short) < listed(full) | {"--help-all"}
    num_left_out = len(listed(full) - listed(short))
    assert f"--help-all  Show all options ({num_left_out} more)." in short


@pytest.mark.parametrize("name", ["generate", "chat", "batch"])
def test_everyday_options_come_first(llmcli: Callable[..., Result], name: str) -> None:
    short, full = llmcli(name, "--help").stdout, llmcli(name, "--help-all").stdout
    assert listed(short) >= EVERYDAY
    assert not listed(short) & EXPERT
    assert listed(full) >= EXPERT
    assert short.index("--model") < short.index("--max-new-tokens") < short.index("--temperature")


def test_arguments_and_defaults(llmcli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = llmcli("batch", "--help").stdout
    assert text.startswith("Usage: llmcli batch [OPTIONS] IN OUT\n")
    assert "  --temperature X         Randomness: " in text
    assert "[default: the model's, or 0.8]" in " ".join(text.split())
    assert "  -q, --quiet  " in text
    assert llmcli("generate", "--help").stdout.startswith("Usage: llmcli generate [OPTIONS] [PROMPT]\n")


def test_help_all_behind_the_end_of_options_is_an_argument(llmcli: Callable[..., Result], tiny_llama: object) -> None:
    result = llmcli("tokenize", "-m", tiny_llama, "--", "--help-all")
    assert result.exit_code == 0
    assert "Usage" not in result.stdout


@pytest.mark.parametrize("call", [("--help",), ("generate", "--help-all")], ids=" ".join)
def test_help_does_not_import_torch(call: tuple[str, ...]) -> None:
    import subprocess
    import sys

    code = f"import sys; from llmcli.cli.main import run; run({list(call)}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
