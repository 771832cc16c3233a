"""A conversation that fills the context: what is dropped or refused, and the messages."""

from collections.abc import Callable
from typing import Any

import pytest
from scripted_chat import ChatModel, ScriptedChat, ScriptedChatRunner, finished, started

from llmcli.engine.conversation import Conversation
from llmcli.errors import UsageError

Load = Callable[[str], ChatModel]
CONTEXT = 160


@pytest.fixture
def talk(chat_model: Load, request: pytest.FixtureRequest) -> Callable[..., ScriptedChat]:
    def open_chat(**settings: Any) -> ScriptedChat:
        model = chat_model("tiny")
        scripted = ScriptedChat(model.tokenizer, model.template, ScriptedChatRunner(CONTEXT), **settings)
        scripted.chat.conversation = Conversation("Be kind.")
        return scripted

    return open_chat


def test_whole_turns_are_dropped_and_the_system_prompt_stays(talk: Callable[..., ScriptedChat]) -> None:
    scripted = talk()
    drops = []
    for number in range(9):
        start = started(scripted.say(f"Question {number}", f"Answer {number}"))
        prompt = bytes(token_id for token_id in start.prompt_token_ids if token_id < 256).decode()
        assert prompt.startswith("[system]Be kind.[user]Question")
        assert prompt.endswith(f"[user]Question {number}[assistant]")
        assert len(start.prompt_token_ids) <= CONTEXT * 7 / 8
        if start.num_dropped:
            drops.append((start.dropped_from, start.num_dropped))
            assert len(start.prompt_token_ids) <= CONTEXT * 3 / 4
            assert f"Question {start.dropped_from + start.num_dropped - 2}[" not in prompt
            assert start.num_history_computed > 0
        else:
            assert start.num_history_computed == 0
    assert drops
    assert drops[0][0] == 1
    conversation = scripted.chat.conversation
    assert sum(count for _, count in drops) == conversation.num_dropped
    assert len(conversation.turns) == 9  # people still see them


def test_stop_refuses_and_leaves_the_conversation_alone(talk: Callable[..., ScriptedChat]) -> None:
    scripted = talk(overflow="stop", max_new_tokens=10)
    for number in range(4):
        scripted.say(f"Question {number}", f"Answer {number}")
    before = scripted.chat.conversation
    with pytest.raises(UsageError, match=r"has \d+ tokens; the context holds 160; .*/undo.*--overflow drop-oldest"):
        scripted.say("x" * 40, "never")
    assert scripted.chat.conversation == before
    assert before.num_dropped == 0


def test_a_message_that_can_never_fit_is_refused(talk: Callable[..., ScriptedChat]) -> None:
    scripted = talk()
    scripted.say("Hi", "Hello")
    before = scripted.chat.conversation
    with pytest.raises(UsageError, match=r"the message has 5\d\d tokens .*; the context holds 160"):
        scripted.say("x" * 500, "never")
    assert scripted.chat.conversation == before


def test_an_answer_that_filled_the_context_goes_on_after_a_drop(talk: Callable[..., ScriptedChat]) -> None:
    scripted = talk()
    scripted.say("One", "1" * 60)
    answer = finished(scripted.say("Two", "2" * 90)).answer
    assert answer.finish_reason == "context"
    events = scripted.run(scripted.chat.continue_answer(), "3")
    assert started(events).num_dropped == 1
    assert finished(events).answer.content == answer.content + "3"


@pytest.mark.parametrize("max_new_tokens", [None, 69])  # 69 end where the context does
def test_an_answer_goes_on_after_a_drop_that_stop_does_not_make_by_itself(
    talk: Callable[..., ScriptedChat], max_new_tokens: int | None
) -> None:
    scripted = talk(overflow="stop", max_new_tokens=max_new_tokens)
    scripted.say("One", "1" * 30)
    answer = finished(scripted.say("Two", "2" * 90)).answer
    assert answer.is_unfinished
    assert scripted.chat.num_tokens() == CONTEXT
    events = scripted.run(scripted.chat.continue_answer(), "3")
    assert started(events).num_dropped == 1
    assert finished(events).answer.content == answer.content + "3"
    with pytest.raises(UsageError, match="remove turns with"):
        scripted.say("x" * 40, "never")


def test_stop_drops_nothing_while_a_token_has_room(talk: Callable[..., ScriptedChat]) -> None:
    scripted = talk(overflow="stop", max_new_tokens=68)
    scripted.say("One", "1" * 30)
    scripted.say("Two", "2" * 90)
    assert scripted.chat.num_tokens() == CONTEXT - 1
    assert started(scripted.run(scripted.chat.continue_answer(), "3")).num_dropped == 0


def test_undo_after_a_drop(talk: Callable[..., ScriptedChat]) -> None:
    scripted = talk()
    for number in range(6):
        scripted.say(f"Question {number}", f"Answer {number}")
    conversation = scripted.chat.conversation
    assert conversation.num_dropped > 1
    while conversation.turns:
        conversation = conversation.without_last()
        assert conversation.num_dropped <= len(conversation.turns)
    assert [message["role"] for message in conversation.messages()] == ["system"]
