"""`/n`, `/choose` and `/probs`: several answers to one message, and the probabilities of one."""

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_terminal import LETTERS_ONLY
from results import Result
from scripted_talk import Talk, answers

from llmcli.cli.chat_session import answer, commands
from llmcli.engine.conversation import load_conversation


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
    talk: Talk, llmcli: Callable[..., Result], talker: Path, monkeypatch: pytest.MonkeyPatch
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
