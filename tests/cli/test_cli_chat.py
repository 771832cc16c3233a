"""`llmcli chat` without a terminal: one answer for each message, the transcript, saved conversations, refusals."""

import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_terminal import LETTERS_ONLY
from results import Llmcli, Result
from scripted_talk import Talk, answers

from llmcli.cli.chat_session import answer, commands
from llmcli.cli.chat_session.answer import View
from llmcli.cli.chat_session.commands import COMMANDS, is_command
from llmcli.cli.chat_session.message import is_open_block, unwrap
from llmcli.engine.chat_events import AnswerPiece
from llmcli.engine.conversation import load_conversation
from llmcli.errors import DeviceError

BOS_ID, END_ID = 256, 257


@pytest.fixture
def chat(llmcli: Llmcli, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path / "home"))

    def call(*arguments: object, lines: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
        return llmcli("chat", talker, "--seed", 1, "--max-new-tokens", 8, *LETTERS_ONLY, *arguments)

    return call


def test_one_answer_for_each_message(chat: Llmcli) -> None:
    result = chat("--message", "One", "--message", "Two")
    assert result.exit_code == 0
    assert [len(line) for line in result.stdout.splitlines()] == [8, 8]
    assert result.stderr.startswith("talker: CPU")
    assert chat(lines=b'One\n\n"""Two"""\n').stdout == result.stdout
    assert chat("--quiet", lines=b"One\nTwo").stderr == ""
    assert chat(lines=b"\xef\xbb\xbfOne\r\nTwo\r\n").stdout == result.stdout
    assert chat(lines=b'\xef\xbb\xbf"""One"""\nTwo').stdout == result.stdout


def test_an_answer_that_is_cut_says_so(chat: Llmcli) -> None:
    assert "(stopped at --max-new-tokens)" in chat("--message", "One").stderr
    full = chat("--message", "One", "--context", 40, "--max-new-tokens", 300, "--overflow", "stop")
    assert "(the context is full)" in full.stderr


def test_the_transcript(chat: Llmcli) -> None:
    result = chat("--message", "One", "--message", "Two", "--system", "Be kind.", "--json")
    transcript = json.loads(result.stdout)
    first, second = transcript["turns"]
    assert (transcript["seed"], transcript["system"], transcript["context"]) == (1, "Be kind.", 512)
    assert first["prompt_token_ids"] == [BOS_ID, *b"[system]Be kind.", END_ID, *b"[user]One", END_ID, *b"[assistant]"]
    answer = list(first["answer"].encode())
    assert first["token_ids"] == answer
    begin = [*first["prompt_token_ids"], *answer]
    assert second["prompt_token_ids"] == [*begin, END_ID, *b"[user]Two", END_ID, *b"[assistant]"]
    # The last token that was sampled has not been run yet.
    assert second["num_kept_tokens"] == len(begin) - 1
    assert second["timings"]["prefill_tokens"] == len(second["prompt_token_ids"]) - len(begin) + 1
    assert (second["message"], second["finish_reason"]) == ("Two", "length")
    assert second["num_history_tokens_computed"] == second["num_dropped_turns"] == 0
    assert second["timings"]["decode_tokens"] == 7


def test_a_script_leaves_the_last_conversation_alone_unless_it_goes_on_with_it(chat: Llmcli, tmp_path: Path) -> None:
    chat("--message", "One")
    assert not (tmp_path / "home").exists()
    chat("--continue", "--message", "One").expect_error(2, "--continue: no conversation in ")
    # What a terminal leaves:
    (tmp_path / "home" / "chat").mkdir(parents=True)
    last = tmp_path / "home" / "chat" / "last.json"
    empty = {"format": "llmcli conversation", "version": 1, "model": "m", "system": None, "num_dropped": 0, "turns": []}
    last.write_text(json.dumps(empty))
    both = chat("--message", "One", "--message", "Two").stdout
    halves = [chat("--continue", "--message", message).stdout for message in ("One", "Two")]
    assert "".join(halves) == both
    assert [turn.user for turn in load_conversation(last).conversation.turns] == ["One", "Two"]
    resumed = chat("--resume", last, "--message", "Three")
    assert "Resumed: 2 turns" in resumed.stderr
    assert len(load_conversation(last).conversation.turns) == 2
    by_name = chat("--resume", "last", "--message", "Three")  # a kept one, so it is resumed
    assert by_name.stdout == resumed.stdout
    assert len(load_conversation(last).conversation.turns) == 3


def test_overflow(chat: Llmcli) -> None:
    messages = [flag for number in range(6) for flag in ("--message", f"Question {number}")]
    result = chat(*messages, "--context", 120)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 6
    assert "warning: the context is full: the model no longer sees turn" in result.stderr
    stopped = chat(*messages, "--context", 120, "--overflow", "stop", "--json")
    assert stopped.exit_code == 2
    assert "tokens; the context holds 120" in stopped.stderr
    assert 1 < len(json.loads(stopped.stdout)["turns"]) < 6


def test_a_template_that_thinks(chat: Llmcli, tmp_path: Path) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text("{{ messages[-1].content }}<think>")
    flags = ("--message", "One", "--chat-template", template)
    hidden = chat(*flags)
    assert (hidden.stdout, "(thought for 0." in hidden.stderr) == ("\n", True)
    shown = chat(*flags, "--thinking", "show")
    assert shown.stdout == "\n"
    assert json.loads(chat(*flags, "--json").stdout)["turns"][0]["reasoning"] in shown.stderr


def test_a_model_without_a_template(llmcli: Llmcli, tiny_llama: Path) -> None:
    result = llmcli("chat", tiny_llama, "--message", "Hi")
    result.expect_error(2, "has no chat template", "--chat-template FILE", "plain")
    plain = llmcli("chat", "-m", tiny_llama, "--message", "Hi", "--chat-template", "plain", "--max-new-tokens", 3)
    assert plain.exit_code == 0


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--overflow", "roll"), ("--overflow is 'roll'", "stop, drop-oldest")),
        (("--thinking", "loud"), ("--thinking is 'loud'", "show, fold, hide")),
        (("--message", " "), ("--message is empty",)),
        (("--message", "a\udcff"), ("--message is not UTF-8 text",)),
        (("--message", "a", "--system", "\udcff"), ("--system is not UTF-8 text",)),
        (("--continue", "--resume", "x.json"), ("--resume and --continue cannot be combined",)),
        (("--resume", "none.json"), ("none.json", "No such file")),
        (("-m", "again"), ("the argument MODEL and --model cannot be combined",)),
        (("--context", "4", "--message", "Hello there"), ("the message has 30 tokens", "the context holds 4")),
    ],
)
def test_refusals(chat: Llmcli, flags: tuple[str, ...], parts: tuple[str, ...]) -> None:
    chat("--quiet", *flags).expect_error(2, *parts)


@pytest.mark.parametrize(("lines", "part"), [(b"\xff\n", "0xff in line 1"), (b'"""one\ntwo\n', "inside a")])
def test_broken_input(chat: Llmcli, lines: bytes, part: str) -> None:
    chat("--quiet", lines=lines).expect_error(2, part)


def test_blocks() -> None:
    texts = ['"""', ' """a\n', '"""a"""', "a"]
    assert [text for text in texts if is_open_block(text)] == texts[:2]
    assert unwrap('"""\na\n b\n"""') == "a\n b"
    assert unwrap("  /a ") == "/a"


def test_what_is_a_command() -> None:
    texts = ["/help", "/nonsense", "/edit a\nb", " /help", "/usr/bin\nis a folder", "help"]
    assert [text for text in texts if is_command(text)] == texts[:3]
    names = "help reset system regen n choose undo edit edit-answer continue save load history params set stats probs"
    assert [command.name for command in COMMANDS] == [*names.split(), "tokens", "template", "copy-code", "quit"]


# Answers that an error ends.


@pytest.fixture
def failing_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third piece of text that is shown fails, and no other."""
    show, shown = View.show, []

    def fail_once(view: View, piece: object) -> None:
        shown.extend([piece] if isinstance(piece, AnswerPiece) else [])
        if len(shown) == 3 and shown[-1] is piece:
            raise DeviceError("the screen fell over")
        show(view, piece)

    monkeypatch.setattr(View, "show", fail_once)


def turns(home: Path) -> list[tuple[str, int, str]]:
    """The message of each kept turn, the tokens of its answer, and its end."""
    kept = load_conversation(next((home / "chat").glob("*.json"))).conversation.turns
    answers = [(turn.user, turn.answer) for turn in kept]
    return [(user, len(answer.token_ids), answer.finish_reason) for user, answer in answers if answer is not None]


@pytest.mark.usefixtures("failing_view")
def test_an_answer_that_fails_is_kept_as_far_as_it_came_and_the_next_is_whole(talk: Talk, home: Path) -> None:
    result, _ = talk("One", "Two")
    assert result.stderr.count("error: the screen fell over") == 1
    assert turns(home) == [("One", 3, "interrupted"), ("Two", 8, "length")]


@pytest.mark.usefixtures("failing_view")
def test_of_several_answers_that_fail_the_one_that_has_begun_stays(talk: Talk, home: Path) -> None:
    result, _ = talk("One", "/n 2", "/choose 1", "Two", flags=["--max-new-tokens", 2])
    assert result.stderr.count("error: the screen fell over") == 1
    assert "answer 1 is used" in result.stderr
    assert [(user, reason) for user, _, reason in turns(home)] == [("One", "interrupted"), ("Two", "length")]


# `/n`, `/choose` and `/probs`: several answers to one message, and the probabilities of one.


@pytest.fixture
def folder(home: Path) -> Path:
    return home / "chat"


@pytest.mark.parametrize("rows", ["1", "3"])
def test_several_answers_are_those_of_regen(talk: Talk, folder: Path, rows: str) -> None:
    one_by_one = answers(talk("One", "/regen", "/regen", "/regen")[0])
    result, _ = talk("One", "/n 3", "/history", "/choose 3", "/history", "Two", flags=("--rows", rows))
    at_once = answers(result)
    assert at_once[:4] == one_by_one
    assert len(set(at_once[:4])) == 4
    for number in (1, 2, 3):
        assert f"[{number}]\n" in result.stderr
    assert "(answer 1 is used; /choose 2 or 3 changes that)" in result.stderr
    assert result.stderr.index(f"[answer 1]\n{at_once[1]}") < result.stderr.index(f"[answer 1]\n{at_once[3]}")
    # The others are gone, and the next turn continues the chosen one.
    path = max(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    first, second = load_conversation(path).conversation.turns
    assert first.answer is not None
    assert second.answer is not None
    assert first.answer.content == at_once[3]
    edited, _ = talk("One", f"/edit-answer {at_once[3]}", "Two")
    assert answers(edited)[1] == at_once[4] == second.answer.content


def test_another_answer_is_none_of_those_that_were_shown(talk: Talk) -> None:
    one_by_one = answers(talk("One", *["/regen"] * 6)[0])
    assert answers(talk("One", "/n 3", "/regen", "/n 2")[0]) == one_by_one
    assert answers(talk("One", "/n 3", "/choose 2", "/n 3")[0]) == one_by_one


def test_only_what_is_there_can_be_chosen(talk: Talk) -> None:
    result, _ = talk("/n 3", "One", "/choose 1", "/n", "/n 1", "/n 17", "/n x", "/n 2", "/choose 3", "/choose", "Two")
    for part in (
        "error: no turn yet; send a message first",
        "error: there is no answer 1 to choose: there is none; /n 3 gives three",
        "error: there is no answer 3 to choose: expected 1 to 2",
    ):
        assert part in result.stderr
    assert result.stderr.count("error: /n needs a number") == 4
    gone, _ = talk("One", "/n 2", "/undo", "/choose 2", "Two", "/n 2", "Three", "/choose 2")
    assert gone.stderr.count("error: there is no answer 2 to choose") == 2


def test_the_context_may_be_full_of_them(talk: Talk) -> None:
    """One row has pages for one context only: later answers wait for the pages of earlier ones."""
    flags = ("--context", 80, "--max-new-tokens", 100, "--rows", 1)
    result, _ = talk("One", "/n 3", "/choose 2", "/set max-new-tokens 5", "/continue", flags=flags)
    assert [len(text) for text in answers(result)[:4]] == [58] * 4
    assert "error: the message has 80 tokens" in result.stderr


def test_ctrl_c_keeps_what_has_come(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = answer._InOrder.take
    events: list[Any] = []

    def take(self: Any, event: Any) -> None:
        events.append(event)
        shown(self, event)
        if len(events) == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(answer._InOrder, "take", take)
    result, _ = talk("One", "/n 3", "/choose 3", "/history", "/continue", flags=("--rows", "3"))
    first, *cut, rest = answers(result)
    assert len(first) == 8
    assert len(cut) == 3
    assert all(0 < len(text) < 8 for text in cut)
    assert f"[answer 1]\n{cut[2]}\n" in result.stderr
    whole, _ = talk("One", "/n 3")
    assert answers(whole)[3].startswith(cut[2] + rest[: 8 - len(cut[2])])


def test_probabilities_are_those_of_generate(
    talk: Talk, llmcli: Llmcli, talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _ = talk("One", "/probs 20", "/probs 2", "And?")
    flags = ("--seed", 1, "--max-new-tokens", 8, *LETTERS_ONLY, "--json", "--logprobs", 4)
    generated = llmcli("generate", "--chat", "One", "-m", talker, *flags)
    sample = json.loads(generated.stdout)
    sample = sample["samples"][0] if "samples" in sample else sample
    assert sample["text"] == answers(result)[0]
    lines = result.stderr[result.stderr.index("#  token") :].splitlines()
    rows = [line.split() for line in lines[1:9]]
    logprobs = [one["logprob"] for one in sample["logprobs"]]
    assert [row[1] for row in rows] == list(sample["text"])
    for row, logprob in zip(rows, logprobs, strict=True):
        shown = 0.0005 if row[2] == "<0.1%" else float(row[2].rstrip("%")) / 100
        assert shown == pytest.approx(math.exp(logprob), abs=6e-4)
    least = sorted(range(8), key=logprobs.__getitem__)[:2]
    assert "the 2 least likely of 8 tokens" in result.stderr
    again = lines[[number for number, line in enumerate(lines) if line.startswith("#")][1] :]
    assert [int(line.split()[0]) for line in again[1:3]] == sorted(index + 1 for index in least)
    # Showing changes nothing.
    plain, _ = talk("One", "And?")
    assert answers(plain) == answers(result)
    none, _ = talk("/probs", "One", "/probs x")
    assert "error: no turn yet; send a message first" in none.stderr
    assert "error: /probs takes the number of tokens" in none.stderr


def test_probabilities_in_colour(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "has_color", lambda stream: stream is sys.stderr)
    result, _ = talk("One", "/probs")
    text = answers(result)[0]
    assert "probability of each token: over 50%" in result.stderr
    tinted = result.stderr[result.stderr.index("probability") :].splitlines()[1]
    assert "\x1b[4;" in tinted  # random weights: every token is a surprise
    assert re.sub(r"\x1b\[[\d;]*m", "", tinted) == text
