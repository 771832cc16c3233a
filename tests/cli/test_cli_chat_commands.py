"""The commands of a chat, its Markdown, and the list of saved conversations."""

import json
import os
import re
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from docs_schemas import check_docs_schema
from results import Llmcli, Screen
from rich.cells import cell_len
from scripted_talk import Talk, answers, open_talk

from llmcli.cli.chat_session import kept_chats
from llmcli.cli.chat_session.commands import CODE_BLOCK, COMMANDS, HABITS
from llmcli.cli.chat_session.kept_chats import Keeper, _table
from llmcli.cli.chat_session.markdown import MarkdownWriter
from llmcli.engine.conversation import Conversation, SavedConversation, load_conversation, save_conversation

ANSWER = "[a-h]{8}"


def test_regenerating_and_going_back(talk: Talk) -> None:
    result, _ = talk("One", "/regen", "Two", "/undo", "/edit Uno")
    first, second, _, edited = answers(result)
    assert first != second
    assert edited != second
    assert "Removed: Two" in result.stderr
    again, _ = talk("Uno")
    assert answers(again) == [edited]


def test_system_prompts(talk: Talk) -> None:
    result, _ = talk("/system", "/system Be kind.", "One", "/template", "/system -", "/template", "/reset", "/template")
    assert "no system prompt\nsystem prompt: Be kind.\n" in result.stderr
    assert "<|begin|>[system]Be kind.<|end|>[user]One<|end|>[assistant]\n" in result.stderr
    assert "<|begin|>[user]One<|end|>[assistant]\n" in result.stderr
    assert result.stderr.count("[assistant]") == 2


def test_saving_and_loading(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    lines = ("/save", "One", "/save", f"/save {path}", "/reset", "/history", f"/load {path}", "/save", "/history")
    result, editor = talk(*lines)
    assert "error: there is nothing to keep yet" in result.stderr
    assert f"kept as {TODAY}-one; `llmcli chat --resume {TODAY}-one` continues it\n" in result.stderr
    assert result.stderr.count(f"Saved to {path}\n") == 2
    assert f"1 turn from {path}" in result.stderr
    assert "no messages yet\n" in result.stderr
    assert f"[1]\nOne\n\n[answer 1]\n{answers(result)[0]}\n" in result.stderr
    assert " 0% of 512 tokens" in editor.facts[1]
    assert " 6% of 512 tokens" in editor.facts[2]
    resumed, _ = talk("/history", flags=("--continue",))
    assert answers(result)[0] in resumed.stderr


def test_settings(talk: Talk) -> None:
    lines = (
        "/set temperature 0",
        "/set top_k 5",
        "/set top-k 0.5",
        "/set mirostat_tau 4",
        "/set top-n-sigma 2",
        "/set dynatemp_range inf",
        "/set nonsense 1",
        "/set temprature 1",
        "/set Top-N-Sigme 1",
        "/set repeat_penalty 1",
        "/set max-new-tokens 3",
        "/set seed 7",
        "/set thinking loud",
        "/set markdown off",
        "/set overflow stop",
        "One",
        "/params",
    )
    result, _ = talk(*lines)
    for part in (
        "error: top_k is 0.5, expected an integer",
        "error: dynatemp_range is inf, expected a number >= 0",
        "error: /set nonsense: expected one of temperature, dynatemp_range",
        "error: /set temprature: did you mean temperature?\n",
        "error: /set top_n_sigme: did you mean top_n_sigma?\n",
        "error: /set repeat_penalty: did you mean repetition_penalty?\n",
        "mirostat_tau                4.0 (/set)",
        "top_n_sigma                 2.0 (/set)",
        "error: thinking is 'loud'",
        "temperature                 0.0 (/set)",
        "top_k                       5 (/set)",
        "seed                        7\n",
        "max_new_tokens              3\n",
        "overflow                    stop\n",
    ):
        assert part in result.stderr
    assert len(answers(result)[0]) == 3


def test_figures(talk: Talk) -> None:
    result, _ = talk("/stats", "One", "/stats", "/tokens")
    assert "error: no answer yet" in result.stderr
    assert "prompt: 22 tokens (0 cached, 22 computed)" in result.stderr
    assert "turn 1  8 tokens in the answer: One\nall     30 of 512 tokens (6%)" in result.stderr


def test_looking_at_what_no_longer_fits(talk: Talk) -> None:
    result, _ = talk("Hello", f"/system {'x' * 3000}", "/probs", "/tokens", "/system -", "/probs 1")
    assert "error: the conversation has 3041 tokens with the answer; the context holds 512; use" in result.stderr
    assert "the 1 least likely of 8 tokens" in result.stderr


def test_help_names_every_command(talk: Talk) -> None:
    result, _ = talk("/help")
    for name in ("/set NAME VALUE", "/copy-code", '"""', "Alt-Enter", "Ctrl-C"):
        assert name in result.stderr


def test_an_edited_answer_is_what_the_model_sees(talk: Talk, home: Path) -> None:
    result, editor = talk("One", "/edit-answer", " and\nmore", "/template", "Two", "/template")
    said = answers(result)[0]
    assert editor.drafts[2] == f"/edit-answer {said}"
    assert "answer changed" in result.stderr
    assert f"[user]One<|end|>[assistant]{said} and\nmore<|end|>[user]Two<|end|>[assistant]\n" in result.stderr
    assert result.stderr.count("and\nmore") == 1  # not in the prompt of the answer itself
    (path,) = (home / "chat").glob("*.json")
    assert load_conversation(path).conversation.turns[0].answer.content == f"{said} and\nmore"


def test_an_edited_answer_goes_on(talk: Talk) -> None:
    whole, _ = talk("One", flags=("--max-new-tokens", 16))
    whole_text = answers(whole)[0]
    cut, _ = talk("One", f"/edit-answer {whole_text[:4]}", "/set max-new-tokens 12", "/continue", "/history")
    assert answers(cut)[1] == whole_text[4:]  # drawn as if those four had come by themselves
    assert f"[answer 1]\n{whole_text}\n" in cut.stderr
    result, _ = talk("/edit-answer x", "/edit-answer")
    assert result.stderr.count("error: no turn yet; send a message first") == 2


def test_leaving(talk: Talk) -> None:
    result, editor = talk(KeyboardInterrupt, "One", KeyboardInterrupt, KeyboardInterrupt, "never")
    assert (len(answers(result)), editor.lines) == (1, ["never"])
    _, editor = talk("/quit", "never")
    assert editor.lines == ["never"]


def test_code_blocks() -> None:
    text = "a\n```python\nx = 1\n\ny\n```\nb\n~~~\nlast\n~~~\n"
    assert [match[1] for match in CODE_BLOCK.findall(text)] == ["x = 1\n\ny\n", "last\n"]


def test_markdown_is_drawn_block_by_block(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from llmcli.cli.chat_session.markdown import MarkdownWriter

    monkeypatch.setenv("COLUMNS", "60")
    text = "# Title\n\nSome *words*\nhere.\n\n1. one\n2. two\n   - deep\n\n```python\nx = 1\n\n    y = 2\n```\n\n"
    text += "| a | b |\n|---|---|\n| 1 | 2 |\nEnd"
    writer = MarkdownWriter()
    for position in range(0, len(text), 3):
        writer.write(text[position : position + 3])
    seen = capsys.readouterr().out
    assert "End" not in seen
    assert "x = 1" in seen
    writer.close()
    shown = seen + capsys.readouterr().out
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[1:11] == ["", "Some words here.", "", "1 one", "2 two", "• deep", "", "x = 1", "", "y = 2"]
    assert any(line.split() == ["1", "2"] for line in lines)
    assert lines[-1] == "End"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("/exit", "did you mean /quit? /help lists all; to send it as a message, put a space before it"),
        ("/bye now", "did you mean /quit? /help"),
        ("/retry", "did you mean /regen? /help"),
        ("/histroy", "did you mean /history? /help"),
        ("/nonsense", "/help lists them; to send"),
    ],
)
def test_a_command_of_another_name_is_hinted_at(talk: Talk, typed: str, hint: str) -> None:
    result, _ = talk(typed)
    assert f"unknown command {typed.split()[0]}; {hint}" in result.stderr
    assert not answers(result)


def test_habits_are_no_commands_and_mean_some() -> None:
    names = {command.name for command in COMMANDS}
    assert not names & HABITS.keys()
    assert set(HABITS.values()) <= names


# Markdown on a terminal: colours that read on a light background and on a dark one.


TEXT = """# Title
## Smaller

Some *words*, `code`, [a link](http://example.org) and ~~more~~.

> quoted

1. one
   ```python
   def f(x): return "a" + 1  # why
   ```

    indented code

| a | b |
|---|---|
| 1 | `2` |

```python
@decorator
class A(Exception):
    def f(self, x: int = 1) -> str:
        return f"a{x!r}\\n" and None  # why
```
```c
#include <x.h>
int main(void) { return 0x1; }
```
```html
<a href="x">y</a>
```
```diff
- a
+ b
```
"""

# Bold, dim, italic, underline, strike; red, green, magenta, cyan. None is a background, an absolute colour, or one
# that is near white or near black in the usual themes.
ON_ANY_BACKGROUND = {"0", "1", "2", "3", "4", "9", "31", "32", "35", "36"}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    for name, value in {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm", "COLUMNS": "60"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    writer = MarkdownWriter()
    writer.write(TEXT)
    writer.close()
    return capsys.readouterr().out


def test_no_colour_assumes_a_background(drawn: str) -> None:
    codes = {code for codes in re.findall(r"\x1b\[([\d;]*)m", drawn) for code in codes.split(";")}
    assert codes <= ON_ANY_BACKGROUND | {"39"}
    assert {"32", "35", "36"} <= codes  # there is some colour


def test_lines_are_not_filled_up_with_spaces(drawn: str) -> None:
    plain = re.sub(r"\x1b(\[[\d;]*m|\]8;[^\\]*\\)", "", drawn)
    assert "quoted\n" in plain
    assert not [line for line in plain.splitlines() if line != line.rstrip()]


# Kept chats: their names, the list of them, resuming one by name or number, and which are removed.


TODAY = "2026-11-22"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "home" / "chat"


@pytest.fixture
def talk(llmcli: Llmcli, talker: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
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


def test_the_list(talk: Talk, llmcli: Llmcli, talker: Path, folder: Path) -> None:
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


def test_going_on_by_name_and_number(talk: Talk, llmcli: Llmcli, folder: Path) -> None:
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


def test_only_chats_without_a_name_are_removed_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_chats, "MOST_UNNAMED", 3)
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
