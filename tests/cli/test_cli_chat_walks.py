"""Every command of a chat after every other, in small contexts and odd conversations: no bug of ours ends it.

`--chat-walks N` draws N / 3 sequences.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from results import Llmcli
from scripted_talk import Line, Talk, open_talk

from llmcli.cli.chat_session.commands import COMMANDS
from llmcli.engine.conversation import FORMAT
from llmcli.sampling.params import SPECS

NUM_LINES = 40
CONTEXTS = (16, 40, 64, 200, 512)
TEXTS = (
    *("Hello", "One", "Two words", "?", "x" * 40, "x" * 90, "y " * 250, "z" * 3000, "caf\u00e9 \U0001f98a", "a\nb\n"),
    *("<|end|>", "<think>Well", "<think>\n\n</think>\n\nYes", "```\ncode\n```", "\u202e", "\0", "\ufeff", "-", " "),
)
NUMBERS = ("0", "1", "2", "3", "7", "16", "17", "100", "-1", "0.5", "1e-9", "1e30", "nan", "inf", "none", "x", "")
SETTINGS = (*SPECS, "seed", "max-new-tokens", "overflow", "thinking", "markdown")
VALUES = (*NUMBERS, "stop", "drop-oldest", "show", "fold", "hide", "on", "off")
PLACES = ("fox", "duck", "a.json", "./b", "none/c.json", "--force a.json", "--force", "2026-01-01", "odd.json", "")


@pytest.fixture
def draw(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture
def talk(llmcli: Llmcli, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: random.Random) -> Talk:
    monkeypatch.chdir(tmp_path)
    Path("odd.json").write_text(json.dumps(odd_conversation(draw)))
    return open_talk(llmcli, talker, tmp_path / "home", monkeypatch)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--chat-walks") // 3))


def odd_conversation(draw: random.Random) -> dict[str, Any]:
    """A file as left by another model, an editor, or a stopped chat."""
    turns: list[dict[str, Any]] = []
    for _ in range(draw.randrange(4)):
        text = draw.choice((*TEXTS, ""))
        answer: dict[str, Any] = {
            "content": text,
            "finish_reason": draw.choice(("eos", "stop", "length", "context", "interrupted")),
            "sample": draw.choice((0, 5, 2**32 - 1)),
            "token_ids": draw.choice(([], list(text.encode()), [1], [2, 2], [999_999, 3], [2**31 - 1], [97] * 600)),
        }
        if draw.random() < 0.3:
            answer |= {"reasoning": "Hm", "text": f"<think>Hm</think>{text}"}
        turns.append({"user": draw.choice(TEXTS), "answer": draw.choice((answer, answer, answer, None))})
    return {
        "format": FORMAT,
        "version": 1,
        "model": "m",
        "system": draw.choice((None, "", *TEXTS)),
        "num_dropped": draw.choice((0, len(turns), draw.randint(0, len(turns)))),
        "turns": turns,
    }


def a_line(draw: random.Random) -> Line:
    if draw.random() < 0.3:
        return draw.choice(TEXTS)
    name = draw.choice([command.name for command in COMMANDS if command.name != "quit"])
    arguments: dict[str, tuple[str, ...]] = {
        **{name: ("", *TEXTS) for name in ("system", "edit", "edit-answer")},
        **{name: PLACES for name in ("save", "load")},
        **{name: NUMBERS for name in ("n", "choose", "probs")},
        "set": tuple(f"{draw.choice(SETTINGS)} {draw.choice(VALUES)}" for _ in range(3)),
    }
    silly = draw.random() < 0.05
    return f"/{name} {draw.choice(TEXTS if silly else arguments.get(name, ('',)))}"


def test_no_sequence_of_commands_ends_in_an_internal_error(talk: Talk, draw: random.Random) -> None:
    lines = [a_line(draw) for _ in range(NUM_LINES)]
    flags = ["--context", draw.choice(CONTEXTS)]
    for flag, share in (
        ("--resume odd.json", 0.5),
        ("--overflow stop", 0.3),
        ("--rows 3", 0.2),
        ("--kv-cache int8", 0.1),
    ):
        flags += flag.split() * (draw.random() < share)
    result, editor = talk(*lines, flags=flags)
    assert editor.lines == []
    assert "internal error" not in result.stderr
    assert "cannot answer" not in result.stderr  # the last resort after the checks
