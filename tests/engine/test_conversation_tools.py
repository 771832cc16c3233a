"""Conversations with tool calls: what the model sees, what is kept, dropped, edited and refused."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_chat import ScriptedChat, finished
from tool_models import TIME, WEATHER, write_tool_model

from llmcli.engine.chat import ChatTools
from llmcli.engine.chat_events import AnswerPiece
from llmcli.engine.conversation import (
    Answer,
    Conversation,
    SavedConversation,
    Turn,
    load_conversation,
    save_conversation,
)
from llmcli.errors import UsageError
from llmcli.tokenizer.chat_encoding import encode_chat, load_chat_template
from llmcli.tokenizer.load import load_tokenizer
from llmcli.tokenizer.tool_offer import Offer
from llmcli.tools import Tools

ARGUMENTS = '{"city": "Wien", "metric": true}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
BOTH = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_model(tmp_path_factory.mktemp("models") / "caller", "hermes")


@pytest.fixture
def talk(folder: Path) -> Iterator[ScriptedChat]:
    tokenizer = load_tokenizer(folder)
    template = load_chat_template(folder, tokenizer, variables={"tools": [WEATHER, TIME]})
    offer = Offer.of(Tools((WEATHER, TIME), ("get_weather", "get_time")), template)
    hold_nothing: Callable[..., Any] = lambda start: None  # noqa: E731
    yield ScriptedChat(tokenizer, template, tools=ChatTools(offer, offer.token_ids(tokenizer), hold_nothing))
    template.close()


def shown(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, AnswerPiece))


def test_calls_and_results_reach_the_template(talk: ScriptedChat) -> None:
    events = talk.say("Wetter?", BOTH)
    assert shown(events) == f"Let me see.\nget_weather({ARGUMENTS})\nget_time({{}})"
    answer = finished(events).answer
    assert (answer.content, answer.text) == ("Let me see.", BOTH)
    assert [call["function"] for call in answer.calls] == [
        {"name": "get_weather", "arguments": ARGUMENTS},
        {"name": "get_time", "arguments": "{}"},
    ]
    assert talk.chat.conversation.waiting_calls == answer.calls
    talk.run(talk.chat.report(["20 °C", "drei"]), "Warm.")
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in answer.calls
    ]
    messages = [
        {"role": "user", "content": "Wetter?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "20 °C"},
        {"role": "tool", "tool_call_id": calls[1]["id"], "content": "drei"},
    ]
    assert list(talk.runner.prompts[-1][0]) == encode_chat(talk.tokenizer, talk.chat.template, messages)
    last = talk.chat.conversation.last
    assert (last.user, last.results) == ("20 °C\ndrei", ("20 °C", "drei"))
    assert last.answer is not None
    assert (last.answer.text, last.answer.calls) == ("Warm.", ())
    assert talk.chat.conversation.waiting_calls == ()


def test_a_result_may_be_changed(talk: ScriptedChat) -> None:
    talk.say("Wetter?", CALL)
    talk.run(talk.chat.report(["20"]), "Warm.")
    talk.run(talk.chat.edit("5"), "Kalt.")
    assert [(turn.user, turn.results) for turn in talk.chat.conversation.turns] == [("Wetter?", ()), ("5", ("5",))]
    talk.run(talk.chat.regenerate(), CALL)
    assert len(talk.chat.conversation.waiting_calls) == 1
    for change in (lambda: talk.chat.report(["1", "2"]), lambda: talk.chat.edit_answer("Hm")):
        with pytest.raises(UsageError, match=r"there are 1 calls, and 2 results|the last answer calls tools"):
            change()
    talk.run(talk.chat.regenerate(), BOTH)
    talk.run(talk.chat.report(["1", "2"]), "So.")
    with pytest.raises(UsageError, match="several results"):
        talk.chat.edit("3")


def test_a_call_that_is_cut_is_no_call(talk: ScriptedChat) -> None:
    """It may be continued."""
    talk.runner.interrupt_decode_after = len(talk.ids(CALL)) - 5
    answer = finished(talk.say("Wetter?", CALL)).answer
    assert answer.calls == ()
    assert answer.content == answer.text
    assert CALL.startswith(answer.text)
    rest = talk.ids(CALL)[len(answer.token_ids) :]
    events = talk.run(talk.chat.continue_answer(), rest)
    assert finished(events).answer.text == CALL
    assert finished(events).answer.calls[0]["function"]["arguments"] == ARGUMENTS


def test_results_stay_with_their_calls() -> None:
    called = Answer("x", "", None, (), "eos", 0, ({"id": "a"},))
    turns = (Turn("a", called), Turn("r", called, ("r",)), Turn("r", None, ("r",)))
    assert list(Conversation(turns=(Turn("q", called), *turns)).droppable) == [1]
    assert list(Conversation(turns=turns).droppable) == []
    assert list(Conversation(turns=(*turns, Turn("b"))).droppable) == [1, 2, 3]


def test_calls_are_kept_in_files(talk: ScriptedChat, tmp_path: Path) -> None:
    talk.say("Wetter?", BOTH)
    talk.run(talk.chat.report(["20 °C", "drei"]), "Warm.")
    saved, path = SavedConversation("caller", talk.chat.conversation), tmp_path / "kept.json"
    save_conversation(path, saved, replace=False)
    assert load_conversation(path) == saved
    content = json.loads(path.read_text())
    for damage, problem in (
        (lambda turns: turns[1].update(results=["20"]), "turn 2: 1 results, expected those of 2 calls"),
        (lambda turns: turns[1].update(results=[3, 4]), "turn 2: results holds something other than texts"),
        (lambda turns: turns[0]["answer"].update(calls=[{}]), "turn 1: calls\\[0\\] is {}, expected a call such as"),
        (lambda turns: turns[0]["answer"]["calls"][0].pop("id"), "turn 1: calls holds one without an id"),
    ):
        damaged = json.loads(json.dumps(content))
        damage(damaged["turns"])
        path.write_text(json.dumps(damaged))
        with pytest.raises(UsageError, match=problem):
            load_conversation(path)
