"""Bad lines, through the real loop: each costs one line at most, and the conversation goes on."""

import os
import sys
from pathlib import Path

import pytest
from results import Llmcli, Result
from scripted_talk import ScriptedEditor, Talk, answers, open_talk

from llmcli.cli.chat_session.commands import COMMANDS
from llmcli.engine.conversation import FORMAT, Conversation, SavedConversation, save_conversation

MARK = "<<next>>"
PATHS = ("talk.json", "other.json", "notes.txt", "pipe", "folder", "link.json", "dangling", "deep.json", "none/x.json")
ARGUMENTS = (
    *PATHS, *(f"--force {path}" for path in PATHS), "talk.json --force", "--force", "--force --force",
    "", " ", "-", "--", '"', "'", '""', "\\", "\0", "a\0b", "\x01\x1b[31m\x7f", "\x85\u2028", "\uffff\U0010ffff",
    "\udcff", "a\udcffb", "\ud800", "\udfff", "\ud83d\ude00", "~", "~/", "~nouser", "~nouser/x", "~root/../x",
    "x" * 300, "x" * 1_000_000, "x/" * 3000, "0", "-1", "1" + "0" * 400, "1" * 5000, "1e400", "nan", "inf", "NaN",
    "temperature nan", "temperature 1e-320", "seed 1" + "0" * 400, "seed -1", "max-new-tokens 1" + "0" * 30,
    "top_k 1e400", "/", ".", "..", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem",
    "<|begin|>", "<|end|>", "{{ x }}", "{% raw %}", "%s%n", "$(true)", "a\nb", "e\u0301" * 100,
)  # fmt: skip
NAMES = ["", "nonsense", "\0", *(command.name for command in COMMANDS if command.name != "quit")]


@pytest.fixture
def talk(llmcli: Llmcli, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """In a folder of files that must not be read or replaced; stderr has a mark at each prompt."""
    folder = tmp_path / "work"
    (folder / "folder").mkdir(parents=True)
    monkeypatch.chdir(folder)
    for name in ("talk.json", "other.json"):
        saved = SavedConversation("m", Conversation("Be kind.").ask("Hi"))
        save_conversation(folder / name, saved, replace=False)
    (folder / "notes.txt").write_text("mine")
    (folder / "link.json").symlink_to("other.json")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "deep.json").write_text("[" * 100_000)
    os.mkfifo(folder / "pipe")
    read = ScriptedEditor.read

    def read_marked(editor: ScriptedEditor, draft: str, facts: str) -> str:
        sys.stderr.write(MARK)
        return read(editor, "", facts)

    monkeypatch.setattr(ScriptedEditor, "read", read_marked)
    return open_talk(llmcli, talker, tmp_path / "home", monkeypatch)


def check(result: Result, editor: ScriptedEditor) -> None:
    """All lines were read, each failed with a one-line reason, and an answer still came at the end."""
    assert editor.lines == []
    for said in result.stderr.split(MARK):
        assert said.count("error: ") <= 1
        if "error: " in said:
            assert said.startswith("error: ")
            assert said.count("\n") == 1
        assert "internal error" not in said
        assert "cannot answer" not in said  # the last resort after the checks; nothing here should reach it
    assert answers(result)[-1]
    assert Path("notes.txt").read_text() == "mine"
    assert Path("deep.json").read_text() == "[" * 100_000
    assert Path("link.json").is_symlink()
    assert Path("pipe").is_fifo()
    assert not Path("nowhere").exists()
    assert Path("/dev/null").is_char_device()
    for path in Path.cwd().rglob("*"):  # whatever was written is a conversation
        if path.is_file() and path.name not in ("notes.txt", "deep.json"):
            assert f'"format": "{FORMAT}"' in path.read_text()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", NAMES)
def test_every_command_survives_every_argument(talk: Talk, name: str) -> None:
    lines = [f"/{name} {argument}" for argument in ARGUMENTS]
    check(*talk(*lines, f"/{name}", "/reset", "/system -", "/set max-new-tokens 8", "/set seed 1", "And now?"))


@pytest.mark.timeout(60)
def test_messages_of_any_kind(talk: Talk) -> None:
    lines = [argument[:2_000] for argument in ARGUMENTS]
    lines += [*(f'"""{line}"""' for line in lines), '""""""', '"""', "And now?"]
    check(*talk(*lines, flags=("--max-new-tokens", 2)))


def test_a_line_that_is_not_text_comes_up_again_as_text(
    llmcli: Llmcli, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, editor = open_talk(llmcli, talker, tmp_path / "home", monkeypatch)("caf\udce9 au lait", "", "/history")
    assert "error: bytes that are not UTF-8 became question marks" in result.stderr
    assert editor.drafts == ["", "caf? au lait", "", ""]
    assert "[1]\ncaf? au lait\n" in result.stderr


@pytest.mark.timeout(60)
def test_a_working_folder_that_is_gone(talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    talk("One")  # what a session opens by relative names is open
    read = ScriptedEditor.read

    def read_and_remove(editor: ScriptedEditor, draft: str, facts: str) -> str:
        if editor.lines[:1] == ["/save x.json"]:
            os.chdir(gone)
            gone.rmdir()
        return read(editor, draft, facts)

    monkeypatch.setattr(ScriptedEditor, "read", read_and_remove)
    try:
        result, editor = talk("One", "/save x.json", "/load x.json", "/save ./x", "/save ..", "/regen", "And now?")
    finally:
        os.chdir(tmp_path / "work")
    assert result.stderr.count("error: ") == 4
    check(result, editor)
