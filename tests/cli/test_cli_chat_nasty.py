"""Lines that nobody should type, through the real loop: each costs one line at most, and the conversation goes on."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_terminal import write_chat_llama
from results import Result
from scripted_talk import Talk, answers, open_talk

from llmcli.cli.chat_session.commands import COMMANDS

ARGUMENTS = (
    "", " ", "-", "--", "--force", "--force --force", '"', "'", '""', "\\", "\0", "a\0b", "\x01\x1b[31m\x7f", "\x85\u2028",
    "\udcff", "a\udcffb", "\ud800", "\udfff", "\uffff\U0010ffff", "~", "~/", "~nouser", "~nouser/x", "~root/../x",
    "x" * 300, "x" * 1_000_000, "x/" * 3000, "0", "-1", "1" + "0" * 400, "1" * 5000, "1e400", "nan", "inf", "NaN",
    "/", ".", "..", "/dev/null", "/dev/zero", "/dev/full", "/dev/stdin", "/proc/self/mem", "/proc/self/fd/0",
    "<|begin|>", "<|end|>", "{{ x }}", "{% raw %}", "%s%n", "$(true)", "a\nb", "é" * 100,
)  # fmt: skip


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_llama(tmp_path_factory.mktemp("talker") / "talker")


@pytest.fixture
def talk(llmcli: Callable[..., Result], talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return open_talk(llmcli, talker, tmp_path / "home", monkeypatch)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["", "nonsense", *(command.name for command in COMMANDS if command.name != "quit")])
def test_commands_with_nasty_arguments(talk: Talk, name: str) -> None:
    for argument in ARGUMENTS:
        result, _ = talk("One", f"/{name} {argument}", flags=("--quiet",))
