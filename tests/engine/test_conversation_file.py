"""Saving and loading: nothing is lost, the file is readable, and anything else is refused with a message."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcli.engine.conversation import (
    Answer,
    Conversation,
    SavedConversation,
    Turn,
    load_conversation,
    save_conversation,
)
from llmcli.errors import OutputError, UsageError

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
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "conversation.json"
    save_conversation(path, SavedConversation("org/name", CONVERSATION), replace=False)
    return path


def test_round_trip(path: Path) -> None:
    assert load_conversation(path) == SavedConversation("org/name", CONVERSATION)
    empty = SavedConversation("m", Conversation())
    save_conversation(path, empty, replace=True)
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
    with pytest.raises(OutputError, match="No space left on device"):
        save_conversation(path, SavedConversation("m", Conversation()), replace=True)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=2), "version 2 .* reads version 1"),
        (lambda c: c.pop("version"), "version None"),
        (lambda c: c.update(format="other"), "is not a saved conversation"),
        (lambda c: c.pop("turns"), "turns is missing, expected a list"),
        (lambda c: c.update(num_dropped=9), "num_dropped is 9, expected 0 to 3"),
        (lambda c: c["turns"].insert(0, 5), "turn 1: expected an object"),
        (lambda c: c["turns"][1].pop("user"), "turn 2: user is missing"),
        (lambda c: c["turns"][0].update(answer="Hello"), "turn 1: answer is not an object"),
        (lambda c: c["turns"][0]["answer"].update(token_ids=[1, "2"]), "turn 1: token_ids"),
        (lambda c: c["turns"][0]["answer"].update(finish_reason="bored"), "turn 1: finish_reason is 'bored'"),
        (lambda c: c["turns"][0]["answer"].update(sample=-1), "turn 1: sample is -1"),
        (lambda c: c["turns"][1]["answer"].update(content="Other."), "turn 2: text does not end with content"),
        (lambda c: c.update(system=1), "system is 1, expected a str"),
        (lambda c: c.update(model="a\0b"), "model holds a NUL character"),
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[]", "holds a JSON list, expected an object"),
        (b"null", "holds a JSON null, expected an object"),
        (b"{}", 'lacks the line "format"'),
        (b"[" * 100_000, "nested more than 64 levels deep"),
        (b'{"format": ' + b"[" * 65 + b"]" * 65 + b"}", "nested more than 64 levels deep"),
        (b'{"version": 1' + b"0" * 5000 + b"}", "an integer has more than 100 digits"),
        (b'{"system": "\\ud800"}', "system has the lone surrogate U\\+D800"),
    ],
)
def test_what_is_no_such_json_is_refused(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        load_conversation(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 300


def loaded(path: Path) -> tuple[SavedConversation | None, str]:
    """A conversation, or the reason of its refusal."""
    try:
        return load_conversation(path), ""
    except UsageError as error:
        return None, str(error)


@pytest.mark.parametrize("value", [None, True, 1.5, float("nan"), -1, 10**99, "x", [], {}, [[]], "y" * 10_000])
@pytest.mark.parametrize("key", ["format", "version", "model", "system", "turns", "num_dropped"])
def test_a_value_of_any_kind_is_taken_or_refused_in_words(path: Path, key: str, value: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {key: value}))
    assert len(loaded(path)[1]) < 300


@pytest.mark.parametrize("value", [None, True, 1.5, -1, 2**31, 10**99, "x", [], {}, [[]], [10**99], [2**31], [1.0]])
@pytest.mark.parametrize("key", ["content", "reasoning", "text", "finish_reason", "sample", "token_ids"])
def test_an_answer_of_any_kind_is_taken_or_refused_in_words(path: Path, key: str, value: object) -> None:
    content = json.loads(path.read_text())
    content["turns"][1]["answer"][key] = value
    path.write_text(json.dumps(content))
    saved, reason = loaded(path)
    assert ("turn 2: " in reason) == (saved is None)
    if saved is not None:
        answer = saved.conversation.turns[1].answer
        assert answer is not None
        assert all(0 <= token_id < 2**31 for token_id in answer.token_ids)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load_conversation(tmp_path / "none.json")


@pytest.mark.timeout(20)
def test_what_is_not_a_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(UsageError, match="is not a regular file, expected a saved conversation"):
            load_conversation(path)
    with pytest.raises(UsageError, match="is not a valid path"):
        load_conversation(tmp_path / "a\0b")


def test_what_exists_is_replaced_only_when_asked_for_and_only_a_conversation(path: Path) -> None:
    saved = SavedConversation("m", Conversation())
    with pytest.raises(UsageError, match=r"exists; replace it with /save --force FILE"):
        save_conversation(path, saved, replace=False)
    path.write_text(json.dumps(json.loads(path.read_text())))  # as another program would write it
    save_conversation(path, saved, replace=True)
    assert load_conversation(path) == saved


@pytest.mark.parametrize("replace", [False, True])
def test_what_is_not_a_conversation_is_never_replaced(path: Path, tmp_path: Path, replace: bool) -> None:
    link, pipe, other, empty = (tmp_path / name for name in ("link", "pipe", "other", "empty"))
    link.symlink_to(path)
    os.mkfifo(pipe)
    other.write_text("mine")
    empty.touch()
    before = path.read_bytes()
    for target, message in [
        (link, "is a link, not a regular file"),
        (pipe, "is a device or pipe"),
        (tmp_path, "is a folder"),
        (Path("/dev/null"), "is a device or pipe"),
        (other, "exists and is not a saved conversation"),
        (empty, "exists and is not a saved conversation"),
        (tmp_path / "none" / "x.json", "is not a folder"),
        (tmp_path / "a\0b", "cannot be written: embedded null"),
        (tmp_path / "a\ud800b", "surrogates not allowed"),
    ]:
        with pytest.raises(UsageError, match=message):
            save_conversation(target, SavedConversation("m", Conversation()), replace=replace)
    assert (path.read_bytes(), other.read_text(), empty.read_text()) == (before, "mine", "")
    assert link.is_symlink()
    assert pipe.is_fifo()


def test_the_path_of_a_model_need_not_be_text(path: Path) -> None:
    save_conversation(path, SavedConversation("a\udcffb", CONVERSATION), replace=True)
    assert load_conversation(path) == SavedConversation("a?b", CONVERSATION)
