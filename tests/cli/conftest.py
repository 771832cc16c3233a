"""Runs command lines in this process, and conversations here and in a terminal."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from chat_terminal import ChatTerminal, write_chat_llama
from cli.kept_programs import keep_programs
from results import Llmcli, Result
from scripted_talk import Talk, open_talk
from tiny_models import WIDE, write_tiny_llama

from llmcli.cli.main import run
from llmcli.cli.terminal import terminal


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line is tested as on a machine without a card."""
    monkeypatch.setattr("llmcli.cli.device_choice.find_driver", lambda: None)
    monkeypatch.setattr("llmcli.cli.device_choice.start_card", lambda index, timeline: None)


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a plan measure this machine on little data."""
    monkeypatch.setattr("llmcli.runners.host.predict.READ_BYTES", 2**20)
    monkeypatch.setattr("llmcli.runners.host.predict._SECONDS_A_RATE", 0.01)
    monkeypatch.setattr("llmcli.runners.host.predict._PROBE_ROWS", 16)


@pytest.fixture
def llmcli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Llmcli:
    """Run one command line in this process."""
    keep_programs(monkeypatch)
    monkeypatch.delenv("LLMCLI_DEBUG", raising=False)

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(terminal, "is_quiet", False)
        monkeypatch.setattr(terminal, "is_debug", False)
        capsys.readouterr()
        exit_code = run([str(argument) for argument in arguments])
        return Result(exit_code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in 16 bits, wide enough for groups of codes."""
    return write_tiny_llama(tmp_path_factory.mktemp("wide") / "model", dtype=torch.bfloat16, **WIDE)


@pytest.fixture
def model_copy(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to change."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    return write_chat_llama(tmp_path_factory.mktemp("talker") / "talker")


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for long answers and prompts."""
    sizes = {"num_hidden_layers": 6, "max_position_embeddings": 32768}
    return write_chat_llama(tmp_path_factory.mktemp("endless") / "endless", **sizes)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """LLMCLI_HOME of a conversation."""
    return tmp_path / "home"


@pytest.fixture
def talk(llmcli: Llmcli, talker: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """A conversation in this process."""
    return open_talk(llmcli, talker, home, monkeypatch)


@pytest.fixture
def open_terminal(home: Path) -> Iterator[Callable[..., ChatTerminal]]:
    """Open conversations in terminals, each at its first prompt; all are closed at the end."""
    opened: list[ChatTerminal] = []

    def open_one(*arguments: object) -> ChatTerminal:
        opened.append(ChatTerminal(home, *arguments))
        opened[-1].prompt()
        return opened[-1]

    yield open_one
    for one in opened:
        one.child.close(force=True)
