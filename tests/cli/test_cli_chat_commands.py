"""The commands of a conversation, run as the loop runs them, with a scripted prompt line."""

from pathlib import Path

import pytest
from scripted_talk import Talk, answers

from llmcli.cli.chat_session.commands import CODE_BLOCK, COMMANDS, HABITS
from llmcli.engine.conversation import load_conversation

ANSWER = "[a-h]{8}"


def test_regenerating_and_going_back(talk: Talk) -> None:
    result, _ = talk("One", "/regen", "Two", "/undo", "/edit Uno")
    first, second, _, edited = answers(result)
    assert first != second
    assert edited != second
    assert "Removed: Two" in result.stderr
    again, _ = talk("Uno")
    assert answers(again) == [edited]


def test_going_on_gives_what_would_have_come(talk: Talk) -> None:
    whole, _ = talk("One", flags=("--max-new-tokens", 16))
    parts, _ = talk("One", "/continue")
    assert "".join(answers(parts)) == "".join(answers(whole))


def test_system_prompts(talk: Talk) -> None:
    result, _ = talk("/system", "/system Be kind.", "One", "/template", "/system -", "/template", "/reset", "/template")
    assert "no system prompt\nsystem prompt: Be kind.\n" in result.stderr
    assert "<|begin|>[system]Be kind.<|end|>[user]One<|end|>[assistant]\n" in result.stderr
    assert "<|begin|>[user]One<|end|>[assistant]\n" in result.stderr
    assert result.stderr.count("[assistant]") == 2


def test_saving_and_loading(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    result, editor = talk("One", "/save", f"/save {path}", "/reset", "/history", f"/load {path}", "/save", "/history")
    assert "error: /save needs a name or a file" in result.stderr
    assert f"1 turn from {path}" in result.stderr
    assert "no messages yet\n" in result.stderr
    assert f"[1]\nOne\n\n[answer 1]\n{answers(result)[0]}\n" in result.stderr
    assert " 0% of 512 tokens" in editor.facts[0]
    assert " 6% of 512 tokens" in editor.facts[1]
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


def test_errors_do_not_end_the_conversation(talk: Talk) -> None:
    result, _ = talk("/undo", "/regen", "/continue", "/copy-code", "/load", "/load none.json", "/what", "One")
    assert result.stderr.count("error: ") == 7
    assert len(answers(result)) == 1


def test_looking_at_what_no_longer_fits(talk: Talk) -> None:
    result, _ = talk("Hello", f"/system {'x' * 3000}", "/probs", "/tokens", "/system -", "/probs 1")
    assert "error: the conversation has 3041 tokens with the answer; the context holds 512; use" in result.stderr
    assert "the 1 least likely of 8 tokens" in result.stderr


def test_help_names_every_command(talk: Talk) -> None:
    result, _ = talk("/help")
    for name in ("/set NAME VALUE", "/copy-code", '"""', "Alt-Enter", "Ctrl-C"):
        assert name in result.stderr


def test_edit_brings_the_message_up(talk: Talk) -> None:
    result, editor = talk("One", "/edit", " more", "/history")
    assert editor.drafts == ["", "", "/edit One", "", ""]
    assert "[1]\nOne more\n" in result.stderr


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
