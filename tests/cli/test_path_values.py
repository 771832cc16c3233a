"""An empty path is refused by the name of its option: pathlib takes it for the current folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("quantize", "storyteller", ""), "DST"),
        (("convert", "storyteller", "", "--force"), "DST"),
        (("batch", "", "out.jsonl"), "IN"),
        (("batch", "in.jsonl", ""), "OUT"),
        (("replay", ""), "RECEIPT"),
        (("generate", "--file", ""), "--file"),
        (("generate", "-f", ""), "--file"),
        (("generate", "Hi", "--html="), "--html"),
        (("generate", "Hi", "--receipt", ""), "--receipt"),
        (("generate", "Hi", "--grammar", ""), "--grammar"),
        (("generate", "Hi", "--chat", "--chat-template", ""), "--chat-template"),
        (("tokenize", "--file", ""), "--file"),
        (("bench", "--scratch", ""), "--scratch"),
    ],
)
def test_an_empty_path(
    llmcli: Callable[..., Any],
    command: tuple[str, ...],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = llmcli(*command)
    result.expect_error(2, f"{name} is empty; give it a path")
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_an_empty_text_is_none(llmcli: Callable[..., Any]) -> None:
    assert llmcli("generate", "", "--max-new-tokens", 1, "--seed", 1).exit_code == 0
