"""No kept or saved conversation is lost: several chats at once, in any order of commands, against a model of files.

Each message is used only once, so a conversation is known by its messages. `--chat-walks N` draws N sequences.
"""

import json
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from scripted_talk import Talk

from llmcli.cli.chat import ConversationOptions
from llmcli.cli.chat_session.answer import NoWriter, View, run_answer
from llmcli.cli.chat_session.commands import run_command
from llmcli.cli.chat_session.kept_chats import Keeper
from llmcli.cli.chat_session.remote import RemoteChat, RemoteTalk
from llmcli.engine.conversation import Conversation, load_conversation
from llmcli.errors import LLMCliError, UsageError

NUM_STEPS = 60
NAMES = ("fox", "duck", "notes.txt", "my trip")
FILES = ("a.json", "./b", "sub/c.json")


def said_in(path: Path) -> tuple[str, ...]:
    """The messages of a file, read without the program's own reader."""
    return tuple(turn["user"] for turn in json.loads(path.read_text())["turns"])


def kept_in(home: Path) -> dict[str, tuple[str, ...]]:
    return {path.stem: said_in(path) for path in (home / "chat").glob("*.json")}


@dataclass(frozen=True)
class Said:
    """What a file holds: the system prompt, and each message with the sample index of its answer."""

    system: str | None = None
    turns: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, path: Path) -> "Said":
        content = json.loads(path.read_text())
        turns = tuple((turn["user"], turn["answer"]["sample"]) for turn in content["turns"])
        return cls(content["system"], turns)


def all_kept(home: Path) -> dict[str, Said]:
    return {path.stem: Said.of(path) for path in (home / "chat").glob("*.json")}


# What the program says of it.


def test_a_file_is_that_of_its_conversation_only(talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result, _ = talk(
        "One", "/save one.json", "/undo", "Two", "/save one.json", "/save --force one.json", "Four", "/save"
    )
    assert "Removed: One\nStarted a new conversation\n" in result.stderr
    assert "error: one.json exists; replace it with /save --force FILE" in result.stderr
    assert "Saved to one.json" in result.stderr
    assert said_in(tmp_path / "one.json") == ("Two", "Four")


def test_a_file_that_another_chat_has_written_since(
    talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    talk("One", "/save one.json")
    with Walk(tmp_path / "home", random.Random(0)) as walk:
        first, second = walk.open(), walk.open()
        for chat, message in ((first, "Two"), (second, "Three")):
            chat.command("load one.json")
            chat.say(message)
        first.command("save")
        with pytest.raises(UsageError, match=r"one\.json was changed since this chat read it; replace it with /save "):
            second.command("save")
        assert said_in(tmp_path / "one.json") == ("One", "Two")
        first.say("Four")
        first.command("save")
        second.command("save --force one.json")
        second.command("save")
    assert said_in(tmp_path / "one.json") == ("One", "Three")


def test_a_file_of_markdown(talk: Talk, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.md").write_text("mine")
    result, _ = talk("/system Be *kind*.", "One", "/save talk.md", "/save talk.md", "Two", "/save --force talk.md")
    assert "Saved to talk.md as Markdown\n" in result.stderr
    assert "error: talk.md exists; replace it with /save --force FILE" in result.stderr
    said = (tmp_path / "talk.md").read_text().split("\n\n")
    first, second = (line for line in result.stdout.splitlines() if line)
    assert said[0] == "<!-- llmcli conversation -->"
    assert said[1].startswith("# Chat with ")
    assert said[2:6] == ["## System", "Be *kind*.", "## User", "One"]
    assert said[6:] == ["## Assistant", first.strip(), "## User", "Two", "## Assistant", f"{second.strip()}\n"]
    assert [names for names in kept_in(home).values()] == [("One", "Two")]
    other, _ = talk("Three", "/save --force mine.md")
    assert "error: mine.md exists and is not a saved conversation" in other.stderr
    assert (tmp_path / "mine.md").read_text() == "mine"


def test_the_folder_of_kept_chats_takes_names_only(talk: Talk, home: Path) -> None:
    folder = home / "chat"
    talk("One", "/save duck")
    result, _ = talk("Two", f"/save {folder}/duck.json", f"/save --force {folder}/duck.json", f"/save {folder}/x.json")
    assert result.stderr.count("is in the folder of the kept chats; give a name, such as /save duck") == 3 - 1
    assert "such as /save x" in result.stderr
    assert sorted(kept_in(home).values()) == [("One",), ("Two",)]


# Any sequence.


class Echo:
    """A client of a server that answers at once."""

    address = "nowhere"

    def pieces(self, body: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
        yield "Yes.", None
        yield "", "stop"


@dataclass
class Chat:
    """One chat of the program, and the model's view of it: `place` is its kept name, `seen` the files it may
    replace and what they held then."""

    state: RemoteTalk
    keeper: Keeper
    said: Said = Said()
    place: str | None = None
    seen: dict[str, Said] = field(default_factory=dict)

    def say(self, message: str) -> None:
        run_answer(self.state, self.state.chat.send(message), View(NoWriter(), "hide"))

    def command(self, text: str) -> None:
        outcome = run_command(self.state, f"/{text}")
        if outcome.events is not None:
            run_answer(self.state, outcome.events, View(NoWriter(), "hide"))


class Walk:
    """Chats at once in one home, and the model of all files. Every step is checked."""

    def __init__(self, home: Path, draw: random.Random):
        self.home = home
        self.draw = draw
        self.chats: list[Chat] = []
        self.kept: dict[str, Said] = {}
        self.files: dict[str, Said] = {}
        self._numbers = count(1)

    def __enter__(self) -> "Walk":
        return self

    def __exit__(self, *error: object) -> None:
        while self.chats:
            self.chats.pop().keeper.close()

    def open(self, resume: str | None = None) -> Chat:
        keeper = Keeper(self.home / "chat")
        options = ConversationOptions(resume=resume)
        source = options.source(keeper)
        saved = None if source is None else load_conversation(source)
        remote = RemoteChat(Echo(), saved.conversation if saved else Conversation(), {})  # type: ignore[arg-type]
        files = options.files(saved)
        state = RemoteTalk(chat=remote, model="m", thinking="hide", is_markdown=False, keeper=keeper, files=files)
        self.chats.append(Chat(state, keeper))
        return self.chats[-1]

    # Each step does one thing to one chat, does the same in the model, and returns the names that may have changed.

    def step(self) -> None:
        if not self.chats or (len(self.chats) < 3 and self.draw.random() < 0.1):
            self._begin()
            return
        chat = self.draw.choice(self.chats)
        step = self.draw.choice(
            (self._say, self._say, self._say, self._undo, self._edit, self._regen, self._system, self._reset)
            + (self._save_name, self._save_name, self._save_file, self._save_again, self._load, self._leave)
        )
        step(chat)

    def _message(self) -> str:
        return f"Message {next(self._numbers)}"

    def _hold(self, chat: Chat) -> None:
        """The turns are kept, in a new file if there is none yet."""
        if chat.place is None and chat.said.turns:
            (chat.place,) = set(all_kept(self.home)) - set(self.kept)
        if chat.place is not None:
            self.kept[chat.place] = chat.said

    def _say(self, chat: Chat) -> None:
        message = self._message()
        chat.say(message)
        chat.said = replace(chat.said, turns=(*chat.said.turns, (message, 0)))
        self._hold(chat)

    def _undo(self, chat: Chat) -> None:
        turns = chat.said.turns[:-1]
        with refused(not chat.said.turns):
            chat.command("undo")
        if turns:
            chat.said = replace(chat.said, turns=turns)
            self._hold(chat)
        elif chat.said.turns:
            self._anew(chat, Said(chat.said.system))

    def _edit(self, chat: Chat) -> None:
        message = self._message()
        with refused(not chat.said.turns):
            chat.command(f"edit {message}")
        if chat.said.turns:
            chat.said = replace(chat.said, turns=(*chat.said.turns[:-1], (message, 0)))
            self._hold(chat)

    def _regen(self, chat: Chat) -> None:
        with refused(not chat.said.turns):
            chat.command("regen")
        if chat.said.turns:
            *turns, (message, sample) = chat.said.turns
            chat.said = replace(chat.said, turns=(*turns, (message, sample + 1)))
            self._hold(chat)

    def _system(self, chat: Chat) -> None:
        chat.said = replace(chat.said, system=self._message())
        chat.command(f"system {chat.said.system}")
        self._hold(chat)

    def _reset(self, chat: Chat) -> None:
        chat.command("reset")
        self._anew(chat, Said(chat.said.system))

    def _anew(self, chat: Chat, said: Said) -> None:
        chat.said, chat.place, chat.seen = said, None, {}

    def _save_name(self, chat: Chat) -> None:
        name = self.draw.choice(NAMES)
        is_taken = name in self.kept and name != chat.place
        with refused(is_taken or not chat.said.turns):
            chat.command(f"save {name}")
        if not is_taken and chat.said.turns:
            if chat.place is not None and chat.place not in NAMES:  # a name that nobody gave
                del self.kept[chat.place]
            chat.place = name
            self._hold(chat)

    def _save_file(self, chat: Chat) -> None:
        self._save_to(chat, self.draw.choice(FILES), force=self.draw.choice(("", "", "--force ")))

    def _save_again(self, chat: Chat) -> None:
        if chat.seen:
            self._save_to(chat, "", force="")
        else:
            with refused(not chat.said.turns):
                chat.command("save")
            self._hold(chat)

    def _save_to(self, chat: Chat, path: str, force: str) -> None:
        target = path or list(chat.seen)[-1]
        is_refused = not force and target in self.files and chat.seen.get(target) != self.files[target]
        with refused(is_refused):
            chat.command(f"save {force}{path}")
        if not is_refused:
            self.files[target] = chat.said
            chat.seen.pop(target, None)
            chat.seen[target] = chat.said

    def _load(self, chat: Chat) -> None:
        name = self.draw.choice((*NAMES, *FILES))
        is_there = name in self.kept or name in self.files
        with refused(not is_there):
            chat.command(f"load {name}")
        if is_there:
            self._anew(chat, self.kept[name] if name in self.kept else self.files[name])
            if name in self.files:
                chat.seen = {name: chat.said}

    def _leave(self, chat: Chat) -> None:
        if self.draw.random() < 0.5:
            chat.keeper.close()
        elif chat.keeper._lock is not None:
            chat.keeper._lock.release()  # as after a kill: the lock's file, held by nobody
        self.chats.remove(chat)

    def _begin(self) -> None:
        kept = self.draw.choice((*self.kept, None))
        file = self.draw.choice((*self.files, None))
        if kept is not None and self.draw.random() < 0.7:
            chat = self.open(kept)
            chat.said = self.kept[kept]
            chat.place = None if any(other.place == kept for other in self.chats) else kept
        elif file is not None and self.draw.random() < 0.5:
            chat = self.open(file if "/" in file else f"./{file}")
            chat.said = self.files[file]
            chat.seen = {file: chat.said}
        else:
            self.open()

    def check(self, before: dict[str, Said]) -> None:
        """The files equal the model's; and in any case each remaining name keeps all its turns but the last."""
        kept = all_kept(self.home)
        assert kept == self.kept
        assert {name: Said.of(Path(name)) for name in FILES if Path(name).exists()} == self.files
        for name, said in before.items():
            now = kept.get(name)
            if now is None:  # moved to a name that was given
                assert name not in NAMES
                assert said in [kept[chat.place] for chat in self.chats if chat.place is not None]
            else:
                assert now.turns[: len(said.turns) - 1] == said.turns[: len(said.turns) - 1]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--chat-walks")))


def test_any_sequence_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path))
    Path("sub").mkdir()
    with Walk(tmp_path, random.Random(seed)) as walk:
        for _ in range(NUM_STEPS):
            before = all_kept(tmp_path)
            walk.step()
            walk.check(before)


def refused(is_expected: bool) -> Any:
    return pytest.raises(LLMCliError) if is_expected else nullcontext()
