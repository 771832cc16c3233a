"""The storyteller on the CPU by `llmcli.load`, and the commands that it is compared with."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import llmcli
from llmcli.cli.main import run
from llmcli.cli.terminal import terminal


@pytest.fixture(scope="session")
def model() -> Iterator[llmcli.Model]:
    with llmcli.load(device="cpu") as model:
        yield model


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command on the CPU, and return the JSON values that it prints, one a line."""

    def call(*arguments: object) -> Any:
        monkeypatch.setattr(terminal, "is_quiet", False)
        capsys.readouterr()
        assert run([*map(str, arguments), "--device", "cpu"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return call
