"""Where conversations are kept: a file for each chat, the last one for `--continue`, and folders that refuse."""

import os
from contextlib import closing
from pathlib import Path

import pytest
from prompt_toolkit.history import InMemoryHistory
from scripted_talk import Talk, answers

from llmcli.cli.chat_session import line_editor
from llmcli.cli.chat_session.kept_chats import Keeper
from llmcli.engine.conversation import Conversation, SavedConversation, load_conversation, save_conversation
from llmcli.errors import UsageError

SAVED = SavedConversation("m", Conversation().ask("Hi"))


def messages(path: Path) -> list[str]:
    return [turn.user for turn in load_conversation(path).conversation.turns]


def kept(home: Path) -> list[list[str]]:
    """The messages of each conversation, the last one written last."""
    files = sorted((home / "chat").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    return [messages(path) for path in files]


def test_each_chat_has_a_file_of_its_own(talk: Talk, home: Path) -> None:
    talk("One")
    talk("Two")
    assert kept(home) == [["One"], ["Two"]]
    assert [path.suffix for path in (home / "chat").iterdir()] == [".json", ".json"]  # no lock is left
    for path in (home / "chat").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    assert (home / "chat").stat().st_mode & 0o777 == 0o700


def test_a_chat_in_which_nothing_is_said_is_not_the_last(talk: Talk, home: Path) -> None:
    talk("One")
    talk("/system Be kind.", "/reset")
    talk()
    assert kept(home) == [["One"]]
    result, _ = talk("Two", flags=("--continue",))
    assert "Resumed: 1 turn\n" in result.stderr
    assert kept(home) == [["One", "Two"]]


def test_a_chat_that_is_open_is_gone_on_with_in_a_new_file(talk: Talk, home: Path) -> None:
    talk("One")
    with closing(Keeper(home / "chat")) as other:
        other.continue_last()
        result, _ = talk("Two", flags=("--continue",))
    assert "is open in another chat: this one is saved in a new file" in result.stderr
    assert kept(home) == [["One"], ["One", "Two"]]


def test_no_two_keepers_hold_one_file(tmp_path: Path) -> None:
    with closing(Keeper(tmp_path)) as first, closing(Keeper(tmp_path)) as second, closing(Keeper(tmp_path)) as third:
        for keeper in (first, second):  # within one second, so that the names would be the same
            keeper.save(SAVED)
        assert first.path != second.path
        save_conversation(second.path or tmp_path, SAVED, replace=True)
        assert third.continue_last() == second.path
        assert third.path is None
        third.save(SAVED)
        assert len({first.path, second.path, third.path}) == 3
    with closing(Keeper(tmp_path)) as fourth:
        assert fourth.continue_last() == fourth.path == third.path
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_cannot_be_made_is_said_once(talk: Talk, home: Path) -> None:
    home.write_text("a file")
    result, _ = talk("One", "Two")
    assert len(answers(result)) == 2
    assert result.stderr.count("warning: ") == 1
    assert "cannot save conversations in" in result.stderr
    assert "Not a directory" in result.stderr


def test_other_things_in_the_folder_are_not_conversations(talk: Talk, home: Path) -> None:
    folder = home / "chat"
    (folder / "a.json").mkdir(parents=True)
    (folder / "b.json").symlink_to("nowhere")
    os.mkfifo(folder / "c.json")
    with pytest.raises(AssertionError, match="--continue: no conversation in "):
        talk(flags=("--continue",))
    result, _ = talk("One")
    assert "warning" not in result.stderr
    talk("Two", flags=("--continue",))
    (path,) = (path for path in folder.glob("*.json") if path.is_file())
    assert messages(path) == ["One", "Two"]


def test_a_lock_that_cannot_be_taken(talk: Talk, home: Path) -> None:
    talk("One")
    (path,) = (home / "chat").glob("*.json")
    path.with_suffix(".lock").mkdir()
    result, _ = talk("Two", flags=("--continue",))
    assert "warning: cannot save conversations in" in result.stderr
    assert sorted(kept(home)) == [["One"], ["One", "Two"]]


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no home folder; set HOME or LLMCLI_HOME"):
        Keeper(Path("~/.local/state/llmcli/chat")).save(SAVED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["folder", "pipe", "zero", "folder that is a file", "no home"])
def test_a_history_that_cannot_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "history"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "no home":
        path = Path("~/state/history")
    else:
        path.write_text("a file")
        path /= "history"
    history = line_editor._open_history(path)
    assert isinstance(history, InMemoryHistory)
    said = capsys.readouterr().err
    assert said.startswith("warning: the input history is not saved: ")
    assert said.count("\n") == 1


def test_a_history_that_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat" / "history"
    history = line_editor._open_history(path)
    history.store_string("caf\udce9\nau lait")
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(line_editor._open_history(path).load_history_strings()) == ["caf?\nau lait"]
    path.unlink()
    path.mkdir()
    history.store_string("typed after the file was lost")
