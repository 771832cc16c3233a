"""`llmcli chat` as a person uses it, in a real pseudo-terminal."""

import io
import json
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from chat_terminal import (
    ALT_ENTER,
    ANSWER,
    CTRL_C,
    CTRL_D,
    PASTE_BEGIN,
    PASTE_END,
    ChatTerminal,
)

from llmcli.engine.conversation import Conversation, SavedConversation, load_conversation, save_conversation

AT_LIMIT = rf"{ANSWER}\r\n\(stopped at --max-new-tokens; /continue resumes it\)"


def test_messages_of_several_lines_and_commands(
    open_terminal: Callable[..., ChatTerminal], talker: Path, tmp_path: Path
) -> None:
    terminal = open_terminal(talker, "--max-new-tokens", 12)
    pasted = terminal.command(f"{PASTE_BEGIN}one\ntwo\r\n/three{PASTE_END}", AT_LIMIT)
    terminal.command(f"four{ALT_ENTER}five", AT_LIMIT)
    terminal.enter('"""six')
    terminal.enter("")
    terminal.command('seven"""', AT_LIMIT)
    terminal.command("/history", r"four\r\nfive\r\n(.|\n)*six\r\n\r\nseven\r\n")
    path = tmp_path / "talk.json"
    terminal.command(f"/save {path}", "Saved to")
    messages = [turn.user for turn in load_conversation(path).conversation.turns]
    assert messages == ["one\ntwo\n/three", "four\nfive", "six\n\nseven"]

    terminal.command("/nonsense", "error: unknown command /nonsense; /help lists them")
    terminal.command("/set temperature hot", "error: temperature is 'hot', expected a number")
    terminal.command("/undo", "Removed: six")
    terminal.command("/undo", "Removed: four")
    again = terminal.command("/regen", AT_LIMIT)
    assert again != pasted
    terminal.child.send("/und")
    terminal.expect("Remove the last turn")
    terminal.child.send("\t")
    terminal.expect("o")
    terminal.command("", "Removed: one")
    terminal.command(f"/load {path}", "3 turns from")
    terminal.command("/edit", "five|seven")  # the last message comes up for editing
    terminal.command(" eight", AT_LIMIT)
    terminal.command(f"/save {path}", "Saved to")
    assert [turn.user for turn in load_conversation(path).conversation.turns][2] == "six\n\nseven eight"
    terminal.child.send(CTRL_D)
    assert terminal.finish() == 0


def test_characters_that_reorder_text_are_shown_escaped_on_the_prompt_line_too(
    open_terminal: Callable[..., ChatTerminal], talker: Path
) -> None:
    terminal = open_terminal(talker, "--max-new-tokens", 12)
    seen = io.StringIO()
    terminal.child.logfile_read = seen
    terminal.command("a\u202eb", "continue resumes it")
    terminal.command("/history", r"a\\u202eb")
    terminal.enter("/edit")
    terminal.expect(r"\\u202e")
    terminal.child.send(CTRL_C + CTRL_D)
    assert terminal.finish() == 0
    assert "\u202e" not in seen.getvalue()


def test_a_terminal_that_only_shows_text_gets_no_control_codes(home: Path, talker: Path, tmp_path: Path) -> None:
    terminal = ChatTerminal(home, talker, "--max-new-tokens", 12, term="dumb")
    output = io.StringIO()
    terminal.child.logfile_read = output
    with closing(terminal.child):
        terminal.expect("\n> ")
        terminal.enter('"""one')
        terminal.expect(r"\. ")
        terminal.enter('two"""')
        terminal.expect(rf"{AT_LIMIT}\s*> ")
        path = tmp_path / "talk.json"
        terminal.enter(f"/save {path}")
        terminal.expect("Saved to [^>]*> ")
        assert [turn.user for turn in load_conversation(path).conversation.turns] == ["one\ntwo"]
        terminal.enter("/edit")
        terminal.expect("type it again: /edit one\r\ntwo\r\n> ")
        terminal.child.send(CTRL_C)
        terminal.expect("press Ctrl-C again, or Ctrl-D, to quit\r\n> ")
        terminal.child.send(CTRL_D)
        assert terminal.finish() == 0
    assert "\x1b" not in output.getvalue()


def test_an_empty_line_ends_an_answer(open_terminal: Callable[..., ChatTerminal], talker: Path) -> None:
    terminal = open_terminal(talker, "--max-new-tokens", 12)
    terminal.command("one", AT_LIMIT + r"\r\n\r\n")
    terminal.command("/n 2", r"changes that\)\r\n\r\n")
    terminal.child.send(CTRL_D)
    assert terminal.finish() == 0


def test_ctrl_c_in_an_answer(open_terminal: Callable[..., ChatTerminal], endless: Path, tmp_path: Path) -> None:
    terminal = open_terminal(endless, "--context", 32768)
    terminal.enter("Tell me a story")
    terminal.expect("[a-h]{50}")
    terminal.child.sendintr()
    terminal.expect(r"\(stopped; /continue resumes it\)")
    terminal.prompt()
    (saved,) = (tmp_path / "home" / "chat").glob("*.json")
    first = load_conversation(saved).conversation.last.answer
    assert first is not None
    assert first.finish_reason == "interrupted"
    assert len(first.content) >= 50
    terminal.command("/set max-new-tokens 20", "max_new_tokens is 20")
    terminal.command("/continue", AT_LIMIT)
    second = load_conversation(saved).conversation.last.answer
    assert second is not None
    assert second.content.startswith(first.content)
    assert len(second.content) == len(first.content) + 20

    terminal.child.send(f"not sent{CTRL_C}")
    terminal.child.send(CTRL_C)
    terminal.expect("press Ctrl-C again, or Ctrl-D, to quit")
    terminal.prompt()
    terminal.command("And now", AT_LIMIT)
    terminal.child.send(CTRL_C)
    terminal.expect("press Ctrl-C again, or Ctrl-D, to quit")
    terminal.prompt()
    terminal.child.send(CTRL_C)
    assert terminal.finish() == 0


def test_ctrl_c_in_a_prefill(open_terminal: Callable[..., ChatTerminal], endless: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.json"
    save_conversation(path, SavedConversation("m", Conversation().ask("x" * 3000)), replace=False)
    terminal = open_terminal(endless, "--resume", path, "--max-new-tokens", 5, "--verbose")
    terminal.enter("/regen")
    terminal.expect(r"reading [1-9]\d* of 30\d+ tokens")
    terminal.child.sendintr()
    terminal.expect(r"prompt: 30\d+ tokens \(0 cached, \d+ computed\)")
    terminal.expect(r"\(stopped; /continue resumes it\)")
    terminal.prompt()
    terminal.enter("/continue")
    kept = terminal.expect(r"prompt: 30\d+ tokens \([1-9]\d* cached")
    terminal.prompt()
    assert int(kept.split()[3].lstrip("(")) < 3000
    terminal.command("/history", rf"x\r\n\r\n\[answer 1\]\r\n{ANSWER}")
    terminal.child.send(CTRL_D)
    assert terminal.finish() == 0


def test_a_resize_changes_nothing(open_terminal: Callable[..., ChatTerminal], talker: Path, tmp_path: Path) -> None:
    terminal = open_terminal(talker, "--max-new-tokens", 200, "--markdown")
    terminal.child.send("hel")
    terminal.child.setwinsize(10, 40)
    terminal.child.send("lo")
    terminal.enter("")
    terminal.child.setwinsize(40, 120)
    terminal.expect("stopped at --max-new-tokens")
    terminal.prompt()
    (path,) = (tmp_path / "home" / "chat").glob("*.json")
    saved = json.loads(path.read_text())
    assert [turn["user"] for turn in saved["turns"]] == ["hello"]
    terminal.command("/history", r"\[1\]\r\nhello\r\n\r\n\[answer 1\]\r\n[a-h]{200}\r\n")


def test_a_killed_conversation_goes_on(open_terminal: Callable[..., ChatTerminal], endless: Path) -> None:
    terminal = open_terminal(endless, "--max-new-tokens", 9)
    first = terminal.command("The first question", "[a-h]{9}")
    terminal.command("/set max-new-tokens none", "none")
    terminal.enter("The second question")
    terminal.expect("[a-h]{50}")
    terminal.child.kill(signal.SIGKILL)
    terminal.child.wait()

    terminal = open_terminal("--continue", "--max-new-tokens", 9)  # the file knows the model
    terminal.command("/history", rf"The first question\r\n\r\n\[answer 1\]\r\n{first}\r\n(.|\n)*The second question")
    terminal.command("/continue", AT_LIMIT)
    terminal.command("/tokens", r"turn 2\s+\d+ tokens in the answer: The second question")


def test_what_no_longer_fits_is_dropped_and_named(open_terminal: Callable[..., ChatTerminal], talker: Path) -> None:
    terminal = open_terminal(talker, "--context", 200, "--max-new-tokens", 20, "--system", "Be kind.")
    for number in range(3):
        terminal.command(f"Question {number}", AT_LIMIT)
    terminal.command("Question 3", r"the model no longer sees turns? 1.*?; \d+ tokens of the rest are recomputed")
    terminal.command("/history", "Be kind.(.|\n)*1, no longer seen by the model")
    terminal.command("/set overflow stop", "overflow is stop")
    terminal.command("x" * 150, r"error: the conversation has \d+ tokens; the context holds 200; remove turns")
    terminal.enter("/quit")
    assert terminal.finish() == 0
