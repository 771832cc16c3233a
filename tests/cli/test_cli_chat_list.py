"""Kept chats: their names, the list of them, resuming one by name or number, and which are removed."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from docs_schemas import check_docs_schema
from results import Result
from rich.cells import cell_len
from scripted_talk import Talk, answers, open_talk

from llmcli.cli.chat_session import keeping, kept_chats
from llmcli.cli.chat_session.keeping import Keeper
from llmcli.cli.chat_session.kept_chats import _table
from llmcli.engine.conversation import Conversation, SavedConversation, load_conversation, save_conversation

TODAY = "2026-11-22"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "home" / "chat"


@pytest.fixture
def talk(llmcli: Callable[..., Result], talker: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    clock = SimpleNamespace(strftime=lambda form: {"%Y-%m-%d": TODAY, "-%H%M%S": "-171819"}[form])
    monkeypatch.setattr(kept_chats, "time", clock)
    return open_talk(llmcli, talker, folder.parent, monkeypatch)


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.json"))


def messages(path: Path) -> list[str]:
    return [turn.user for turn in load_conversation(path).conversation.turns]


def test_a_chat_is_named_after_its_day_and_first_words(talk: Talk, folder: Path) -> None:
    for message in ("Tell me a story, please!", "Tell me: a STORY please?", "???", "x" * 41, "Où est l'été 日本語"):
        talk(message)
    assert names(folder) == [
        f"{TODAY}-171819",
        f"{TODAY}-171819-2",
        f"{TODAY}-où-est-l-été-日本語",
        f"{TODAY}-tell-me-a-story-please",
        f"{TODAY}-tell-me-a-story-please-2",
    ]


def test_the_list(talk: Talk, llmcli: Callable[..., Result], talker: Path, folder: Path) -> None:
    assert "no chats in " in llmcli("chat", "--list").stderr
    assert json.loads(llmcli("chat", "--list", "--json").stdout) == []
    talk("One", "Two\nand more")
    talk("Three")
    (folder / f"{TODAY}-broken.json").write_text("{}")
    os.utime(folder / f"{TODAY}-broken.json", ns=(time.time_ns() + 10**9,) * 2)
    os.mkfifo(folder / "pipe.json")
    listed = llmcli("chat", "--list")
    assert listed.exit_code == 0
    assert "broken.json is not a saved conversation" in listed.stderr
    heading, *rows = listed.stdout.splitlines()
    assert heading.split() == ["NAME", "WHEN", "TURNS", "MODEL", "BEGINS"]
    cells = [row.split() for row in rows]
    assert [[row[0], row[1], *row[4:]] for row in cells] == [
        ["2", f"{TODAY}-three", "1", str(talker), "Three"],
        ["3", f"{TODAY}-one", "2", str(talker), "One"],
    ]
    three, one = chats = json.loads(llmcli("chat", "--list", "--json").stdout)
    check_docs_schema("chat-list", chats)
    assert (three["name"], three["num_turns"], one["first_message"]) == (f"{TODAY}-three", 1, "One")
    assert one["path"] == str(folder / f"{TODAY}-one.json")
    assert one["model"] == str(talker)
    # The number in the list is the one that --resume takes.
    resumed, _ = talk(flags=("--resume", "3"))
    assert "> Two..." in resumed.stderr


@pytest.mark.parametrize("columns", [60, 80, 95, 96, 120])
def test_the_list_on_a_terminal_is_not_cut(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    for module in ("chat_session.kept_chats", "terminal"):
        monkeypatch.setattr(f"llmcli.cli.{module}.columns_of", lambda stream: columns)
    monkeypatch.setattr("sys.stdout", Screen())
    heading = ("", "NAME", "WHEN", "TURNS", "MODEL", "BEGINS")
    begins = "Tell me a story about a fox and a key."
    rows = [heading, ("1", f"{TODAY}-fox", f"{TODAY} 09:30", "1", "storyteller", begins)]
    rows.append(("12", "日本", f"{TODAY} 09:31", "2", "m", "Two"))
    lines = _table(rows).splitlines()
    assert max(cell_len(line) for line in lines) <= columns
    if columns > 95:
        assert [len(line.split()) for line in lines] == [5, 16, 7]
    else:
        assert lines[:3] == [f"1   {TODAY}-fox", f"    {TODAY} 09:30, 1 turn, storyteller", f"    {begins}"]
        assert lines[3:] == ["12  日本", f"    {TODAY} 09:31, 2 turns, m", "    Two"]


def test_going_on_by_name_and_number(talk: Talk, llmcli: Callable[..., Result], folder: Path) -> None:
    first, _ = talk("One")
    talk("Two")
    resumed, _ = talk("Three", flags=("--resume", f"{TODAY}-one"))
    assert f"> One\n{answers(first)[0]}\n" in resumed.stderr  # how it ended
    assert messages(folder / f"{TODAY}-one.json") == ["One", "Three"]
    talk("Four", flags=("--resume", "2"))  # the last but one
    assert messages(folder / f"{TODAY}-two.json") == ["Two", "Four"]
    for name in ("none", "3", "0", "x" * 300, "\0"):
        llmcli("chat", "--resume", name).expect_error(2, "no chat is named", "--list")
    llmcli("chat", "--resume", "./none").expect_error(2, "none", "No such file")


def test_a_long_end_is_cut(talk: Talk, folder: Path) -> None:
    talk("Zero", "One " * 40, "Two", flags=("--max-new-tokens", 100))
    conversation = load_conversation(*folder.glob("*.json")).conversation
    assert conversation.last.answer is not None
    resumed, _ = talk("/edit-answer " + "y" * 50 + "z" * 300, "/quit", flags=("--continue",))
    resumed, _ = talk(flags=("--continue",))
    assert f"> Two\n... {'z' * 300}\n" in resumed.stderr
    assert "> Zero" not in resumed.stderr
    assert f"> {('One ' * 40)[:60]}..." in resumed.stderr


def test_saving_under_a_name(talk: Talk, folder: Path) -> None:
    result, _ = talk("/save early", "One", "/save my trip", "Two", "/save my trip", "/save ours")
    assert "error: there is nothing to keep yet" in result.stderr
    assert names(folder) == ["my trip", "ours"]
    assert messages(folder / "ours.json") == messages(folder / "my trip.json") == ["One", "Two"]
    # No name takes the place of another chat, or of another file.
    (folder / "notes.json").write_text("mine")
    taken = ("ours", "--force ours", "notes", "--force notes")
    no_names = ("7", TODAY, f"{TODAY}-x", f"{TODAY} trip", "22.11.2026", "2026-1-1", "17:18", "٣", "--", "🦊")
    bad = (*no_names, ".hidden", "-x", "a\tb", "a\u202eb", "n" * 61)
    other, _ = talk("Three", *(f"/save {name}" for name in (*taken, *bad)))
    assert other.stderr.count("; choose another name") == len(taken)
    assert other.stderr.count(" cannot name a chat; ") == len(bad)
    assert (folder / "notes.json").read_text() == "mine"
    assert names(folder) == [f"{TODAY}-three", "my trip", "notes", "ours"]
    assert [path for path in folder.iterdir() if path.suffix == ".lock"] == []
    loaded, _ = talk("/load ours", "Four", "/load none")
    assert "2 turns from" in loaded.stderr
    assert "error: no chat is named 'none'" in loaded.stderr
    assert messages(folder / "ours.json") == ["One", "Two"]  # the copy is this chat's


def test_a_file_is_still_a_file(talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    talk("One", "/save talk.json", "/save ./plain", f"/save {tmp_path}/whole")
    for name in ("talk.json", "plain", "whole"):
        assert messages(tmp_path / name) == ["One"]
    talk("Two", flags=("--resume", "talk.json"))
    assert messages(tmp_path / "talk.json") == ["One"]


def test_only_chats_without_a_name_are_removed_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "MOST_UNNAMED", 3)
    saved = SavedConversation("m", Conversation().ask("Hi there"))

    def make(name: str, age: int) -> Path:
        path = tmp_path / f"{name}.json"
        save_conversation(path, saved, replace=False)
        os.utime(path, (time.time() - age,) * 2)
        return path

    make("named", 900)
    make("last", 800)
    make("2020-01-01-oldest", 700)
    make("2020-01-02-older", 600)
    open_path = make("2020-01-03-open", 650)
    make("2020-01-04-new", 500)
    make("2020-01-05-newest", 400)
    foreign = tmp_path / "2020-01-06-foreign.json"
    foreign.write_text("not a chat")
    os.utime(foreign, (0, 0))
    with closing(Keeper(tmp_path)) as other, closing(Keeper(tmp_path)) as keeper:
        assert other.continue_named("2020-01-03-open") == open_path
        keeper.save(saved)
        assert keeper.path is not None
        kept = {"named", "last", "2020-01-03-open", "2020-01-04-new", "2020-01-05-newest", foreign.stem}
        assert set(names(tmp_path)) == kept | {keeper.path.stem}
        keeper.save(saved)
        assert set(names(tmp_path)) == kept | {keeper.path.stem}
    assert [path for path in tmp_path.iterdir() if path.suffix == ".lock"] == []


def test_the_list_needs_no_heavy_library(tmp_path: Path) -> None:
    code = (
        "import sys; from llmcli.cli.main import run; run(['chat', '--list'])\n"
        "heavy = {'torch', 'tokenizers', 'sentencepiece', 'prompt_toolkit', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    environment = {**os.environ, "LLMCLI_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
