"""Reasoning: separated as it streams, and the part of it in the next prompt."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_chat import ChatModel, ScriptedChat, finished, started, text_of

from llmcli.engine.chat_events import ReasoningSplitter, split_reasoning
from llmcli.tokenizer.chat_template import ChatTemplate

Load = Callable[[str], ChatModel]


@pytest.mark.parametrize(
    ("text", "starts_inside", "expected"),
    [
        ("Hello", False, (None, "Hello")),
        ("\n Hello <think>no</think>", False, (None, "\n Hello <think>no</think>")),
        ("<think>\na\n\nb\n</think>\n\nHello\n", False, ("a\n\nb", "Hello\n")),
        ("<think>\n\n</think>\n\nHello", False, ("", "Hello")),
        ("<think>still", False, ("still", "")),
        ("a < b</think>Hello", True, ("a < b", "Hello")),
        ("<think>\na</think>Hello", True, ("a", "Hello")),
        ("<thin", False, (None, "<thin")),
        ("", False, (None, "")),
    ],
)
def test_reasoning_and_answer(text: str, starts_inside: bool, expected: tuple[str | None, str]) -> None:
    assert split_reasoning(text, starts_inside) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "b", "<", "/", "</thi", "nk>"]), max_size=12),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_streaming_gives_the_same(parts: list[str], starts_inside: bool, random) -> None:
    text = "".join(parts)
    splitter = ReasoningSplitter(starts_inside)
    pieces = []
    position = 0
    while position < len(text):
        end = position + random.randint(1, 5)
        pieces += splitter.push(text[position:end])
        position = end
    pieces += splitter.flush()
    reasoning, answer = split_reasoning(text, starts_inside)
    assert "".join(piece.text for piece in pieces if piece.part == "answer") == answer
    assert "".join(piece.text for piece in pieces if piece.part == "reasoning").strip() == (reasoning or "")


def test_qwen3_drops_the_reasoning_of_past_turns(chat_model: Load, reference_ids: Callable[..., list[int]]) -> None:
    model = chat_model("qwen3")
    talk = ScriptedChat(model.tokenizer, model.template)
    talk.say("Hi", "<think>\nShort.\n</think>\n\nHello!")
    answer = talk.chat.conversation.last.answer
    assert (answer.reasoning, answer.content) == ("Short.", "Hello!")
    messages = talk.chat.conversation.ask("And?").messages()
    start = started(talk.say("And?", "<think>\nHm.\n</think>\n\nWell."))
    assert list(start.prompt_token_ids) == reference_ids("qwen3", messages)
    assert "Short" not in talk.tokenizer_text(start.prompt_token_ids)
    assert start.num_history_computed == len(talk.ids("Hello!", ends=False))


def test_reasoning_is_streamed_apart(chat_model: Load) -> None:
    model = chat_model("tiny")
    talk = ScriptedChat(model.tokenizer, model.template)
    events = talk.say("Hi", "<think>\nLet me see.\n</think>\n\nYes.")
    assert (text_of(events, "reasoning"), text_of(events)) == ("Let me see.", "Yes.")


def test_a_template_that_opens_the_reasoning(chat_model: Load) -> None:
    model = chat_model("tiny")
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}[assistant]<think>\n"
    template = ChatTemplate(source, "T", {})
    talk = ScriptedChat(model.tokenizer, template)
    talk.runner.interrupt_decode_after = 4
    events = talk.say("Hi", "so it is</think>Yes.")
    assert (text_of(events, "reasoning"), text_of(events)) == ("so i", "")
    events = talk.run(talk.chat.continue_answer(), "t is</think>Yes.")
    assert (text_of(events, "reasoning"), text_of(events)) == ("t is", "Yes.")
    answer = finished(events).answer
    assert (answer.reasoning, answer.content) == ("so it is", "Yes.")
    assert "so it is" not in talk.tokenizer_text(started(talk.say("And?", "x")).prompt_token_ids)
    template.close()
