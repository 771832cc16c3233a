"""`llmcli chat` without a terminal: one answer for each message, the transcript, saved conversations, refusals."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_terminal import LETTERS_ONLY
from results import Result

from llmcli.cli.chat_session.commands import COMMANDS, is_command
from llmcli.cli.chat_session.message import is_open_block, unwrap
from llmcli.engine.conversation import load_conversation

BOS_ID, END_ID = 256, 257


@pytest.fixture
def chat(llmcli: Callable[..., Result], talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path / "home"))

    def call(*arguments: object, lines: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
        return llmcli("chat", talker, "--seed", 1, "--max-new-tokens", 8, *LETTERS_ONLY, *arguments)

    return call


def test_one_answer_for_each_message(chat: Callable[..., Result]) -> None:
    result = chat("--message", "One", "--message", "Two")
    assert result.exit_code == 0
    assert [len(line) for line in result.stdout.splitlines()] == [8, 8]
    assert result.stderr.startswith("talker: CPU")
    assert chat(lines=b'One\n\n"""Two"""\n').stdout == result.stdout
    assert chat("--quiet", lines=b"One\nTwo").stderr == ""
    assert chat(lines=b"\xef\xbb\xbfOne\r\nTwo\r\n").stdout == result.stdout
    assert chat(lines=b'\xef\xbb\xbf"""One"""\nTwo').stdout == result.stdout


def test_an_answer_that_is_cut_says_so(chat: Callable[..., Result]) -> None:
    assert "(stopped at --max-new-tokens)" in chat("--message", "One").stderr
    full = chat("--message", "One", "--context", 40, "--max-new-tokens", 300, "--overflow", "stop")
    assert "(the context is full)" in full.stderr


def test_the_transcript(chat: Callable[..., Result]) -> None:
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


def test_the_same_seed_gives_the_same_conversation(chat: Callable[..., Result]) -> None:
    messages = ("--message", "One", "--message", "Two")
    assert chat(*messages).stdout == chat(*messages).stdout != chat(*messages, "--seed", 2).stdout


def test_verbose_says_what_was_computed(chat: Callable[..., Result]) -> None:
    result = chat("--message", "One", "--verbose")
    assert "prompt: 22 tokens (0 cached, 22 computed) in " in result.stderr


def test_a_script_leaves_the_last_conversation_alone_unless_it_goes_on_with_it(
    chat: Callable[..., Result], tmp_path: Path
) -> None:
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


def test_overflow(chat: Callable[..., Result]) -> None:
    messages = [flag for number in range(6) for flag in ("--message", f"Question {number}")]
    result = chat(*messages, "--context", 120)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 6
    assert "warning: the context is full: the model no longer sees turn" in result.stderr
    stopped = chat(*messages, "--context", 120, "--overflow", "stop", "--json")
    assert stopped.exit_code == 2
    assert "tokens; the context holds 120" in stopped.stderr
    assert 1 < len(json.loads(stopped.stdout)["turns"]) < 6


def test_a_template_that_thinks(chat: Callable[..., Result], tmp_path: Path) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text("{{ messages[-1].content }}<think>")
    flags = ("--message", "One", "--chat-template", template)
    hidden = chat(*flags)
    assert (hidden.stdout, "(thought for 0." in hidden.stderr) == ("\n", True)
    shown = chat(*flags, "--thinking", "show")
    assert shown.stdout == "\n"
    assert json.loads(chat(*flags, "--json").stdout)["turns"][0]["reasoning"] in shown.stderr


def test_a_model_without_a_template(llmcli: Callable[..., Result], tiny_llama: Path) -> None:
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
def test_refusals(chat: Callable[..., Result], flags: tuple[str, ...], parts: tuple[str, ...]) -> None:
    chat("--quiet", *flags).expect_error(2, *parts)


@pytest.mark.parametrize(("lines", "part"), [(b"\xff\n", "0xff in line 1"), (b'"""one\ntwo\n', "inside a")])
def test_broken_input(chat: Callable[..., Result], lines: bytes, part: str) -> None:
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


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys; from llmcli.cli.main import run; run(['chat', '--help'])\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'sentencepiece', 'prompt_toolkit', 'jinja2'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
