"""Runs command lines in this process."""

from collections.abc import Callable

import pytest
from results import Result

from llmcli.cli.main import run
from llmcli.cli.terminal import terminal


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command line says and does is tested as on a machine without a card."""
    monkeypatch.setattr("llmcli.cli.device_choice.find_driver", lambda: None)
    monkeypatch.setattr("llmcli.cli.device_choice.start_card", lambda index, timeline: None)


@pytest.fixture
def llmcli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run one command line in this process."""
    monkeypatch.delenv("LLMCLI_DEBUG", raising=False)

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(terminal, "is_quiet", False)
        monkeypatch.setattr(terminal, "is_debug", False)
        capsys.readouterr()
        exit_code = run([str(argument) for argument in arguments])
        return Result(exit_code, *capsys.readouterr())

    return call
