"""Answers that an error ends."""

from pathlib import Path

import pytest
from scripted_talk import Talk

from llmcli.cli.chat_session.answer import View
from llmcli.engine.chat_events import AnswerPiece
from llmcli.engine.conversation import load_conversation
from llmcli.errors import DeviceError


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
