"""Saving and loading: nothing is lost, people can read it, and what is no conversation is refused in words."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcli.engine.conversation import Answer, Conversation, Turn
from llmcli.engine.conversation_file import SavedConversation, load_conversation, save_conversation
from llmcli.errors import UsageError

Change = Callable[[dict[str, Any]], object]
CONVERSATION = Conversation(
    "Be kind.",
    (
        Turn("Grüße [\n1, 2 ]\n👩‍👩‍👧", Answer("Hello", "Hello", None, (1, 22, 333), "eos", 0)),
        Turn("Why?", Answer("<think>\nHm.\n</think>\n\nSo.", "So.", "Hm.", (4,), "interrupted", 2)),
        Turn("And?", None),
    ),
    1,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "conversation.json"
    save_conversation(path, SavedConversation("org/name", CONVERSATION))
    return path


def test_round_trip(path: Path) -> None:
    assert load_conversation(path) == SavedConversation("org/name", CONVERSATION)
    empty = SavedConversation("m", Conversation())
    save_conversation(path, empty)
    assert load_conversation(path) == empty


def test_people_can_read_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert '"content": "Hello"' in text
    assert '"token_ids": [1, 22, 333]' in text
    assert "Grüße" in text


def test_only_the_owner_can_read_it_and_nothing_else_is_left(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_write_that_fails_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UsageError, match="No space left on device"):
        save_conversation(path, SavedConversation("m", Conversation()))
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=2), "version 2 .* reads 1"),
        (lambda c: c.pop("version"), "version None"),
        (lambda c: c.update(format="other"), "no saved conversation"),
        (lambda c: c.pop("turns"), "turns is missing, expected a list"),
        (lambda c: c.update(num_dropped=9), "num_dropped is 9, expected 0 to 3"),
        (lambda c: c["turns"].insert(0, 5), "turn 1: expected an object"),
        (lambda c: c["turns"][1].pop("user"), "turn 2: user is missing"),
        (lambda c: c["turns"][0].update(answer="Hello"), "turn 1: answer is no object"),
        (lambda c: c["turns"][0]["answer"].update(token_ids=[1, "2"]), "turn 1: token_ids"),
        (lambda c: c["turns"][0]["answer"].update(finish_reason="bored"), "turn 1: finish_reason is 'bored'"),
        (lambda c: c["turns"][0]["answer"].update(sample=-1), "turn 1: sample is -1"),
        (lambda c: c["turns"][1]["answer"].update(content="Other."), "turn 2: text does not end with content"),
        (lambda c: c.update(system=1), "system is 1, expected a str"),
    ],
)
def test_what_is_no_conversation_is_refused(
    path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=message) as caught:
        load_conversation(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"null"])
def test_what_is_no_json_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(UsageError, match="no saved conversation"):
        load_conversation(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load_conversation(tmp_path / "none.json")
