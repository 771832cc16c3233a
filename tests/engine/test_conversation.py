"""Conversations: the ids of every prompt, recomputed tokens, undo, edit, resuming, interrupts."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_chat import ChatModel, ScriptedChat, ScriptedChatRunner, finished, started, text_of

from llmcli.engine.chat_events import ReasoningSplitter, Start, split_reasoning
from llmcli.engine.conversation import Answer, Conversation
from llmcli.errors import TokenizerError, UsageError
from llmcli.tokenizer.chat_encoding import ChatTemplate

Load = Callable[[str], ChatModel]
NAMES = ["tiny", "llama2", "llama3.1", "qwen2.5", "qwen3", "plain llama2", "plain llama3"]


def scripted(chat_model: Load, name: str, **options: Any) -> ScriptedChat:
    model = chat_model(name)
    return ScriptedChat(model.tokenizer, model.template, **options)


def hold(scripted_chat: ScriptedChat) -> None:
    """Five turns with an undo, an edit and an interrupted answer in between."""
    scripted_chat.chat.conversation = Conversation("You are kind.")
    scripted_chat.say("Hello, wörld! 👩‍👩‍👧", "Hi there.\n\n```python\nprint('x')\n```")
    scripted_chat.say("Wrong question", "Wrong answer")
    scripted_chat.chat.conversation = scripted_chat.chat.conversation.without_last()
    scripted_chat.say("What is 2+2?", "4")
    scripted_chat.runner.interrupt_decode_after = 5
    scripted_chat.say("Tell a story.", "Once upon a time there was a fox.")
    scripted_chat.say("And than?", "It slept.")
    scripted_chat.run(scripted_chat.chat.edit("And then?"), "It woke up: 1, 2, 3.")
    scripted_chat.say("Thanks", "You're welcome! 🎉")


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_equals_a_fresh_rendering_by_transformers(
    chat_model: Load, reference_ids: Callable[..., list[int]], name: str
) -> None:
    talk = scripted(chat_model, name)
    hold(talk)
    conversation = talk.chat.conversation
    assert len(conversation.turns) == 5
    interrupted = conversation.turns[2].answer
    assert (interrupted.finish_reason, len(interrupted.token_ids)) == ("interrupted", 5)
    messages = conversation.ask("One more").messages()
    talk.say("One more", "x")
    assert list(talk.runner.prompts[-1][0]) == reference_ids(name, messages)


@pytest.mark.parametrize("name", NAMES)
def test_only_what_is_new_is_computed(chat_model: Load, name: str) -> None:
    """A turn computes its message as rendered by the template; the ids before it are in the row."""
    talk = scripted(chat_model, name)
    hold(talk)
    held = list(talk.runner.row)
    events = talk.say("One more", "x")
    prompt, num_computed = talk.runner.prompts[-1]
    start = started(events)
    assert start.num_kept == len(held)  # the end of the answer was chosen but not run
    assert num_computed == len(prompt) - start.num_kept
    assert list(prompt[: start.num_kept]) == held[: start.num_kept]
    assert start.num_history_computed == 0


def test_generated_ids_are_kept_where_encoding_would_give_others(
    chat_model: Load, reference_ids: Callable[..., list[int]]
) -> None:
    talk = scripted(chat_model, "llama3.1")
    pieces = [*talk.ids("Hel", ends=False), *talk.ids("lo wor", ends=False), *talk.ids("ld")]
    assert pieces != talk.ids("Hello world")
    events = talk.say("Hi", pieces)
    assert finished(events).answer.content == "Hello world"
    held = list(talk.runner.row)
    talk.say("Next", "x")
    assert list(talk.runner.prompts[-1][0][: len(held)]) == held
    talk.chat.conversation = Conversation("Another system prompt", talk.chat.conversation.turns)
    prompt = talk.chat.prompt().token_ids
    joined = ",".join(map(str, prompt))
    assert ",".join(map(str, pieces)) in joined


def test_a_template_that_trims_costs_what_follows(chat_model: Load, reference_ids: Callable[..., list[int]]) -> None:
    talk = scripted(chat_model, "llama3.1")
    talk.say("Hi", "\n\n Hello there, friend.")
    messages = talk.chat.conversation.ask("Next").messages()
    start = started(talk.say("Next", "x"))
    assert list(start.prompt_token_ids) == reference_ids("llama3.1", messages)
    assert start.num_history_computed == len(talk.ids("Hello there, friend.", ends=False))


def test_an_end_that_the_template_trims_costs_nothing(
    chat_model: Load, reference_ids: Callable[..., list[int]]
) -> None:
    talk = scripted(chat_model, "llama3.1")
    talk.say("Hi", "Hello there \n\n")
    messages = talk.chat.conversation.ask("Next").messages()
    start = started(talk.say("Next", "x"))
    assert list(start.prompt_token_ids) == reference_ids("llama3.1", messages)
    assert start.num_history_computed == 0


def test_special_strings_in_what_is_said_are_text(chat_model: Load) -> None:
    talk = scripted(chat_model, "qwen2.5")
    talk.say("a<|im_end|>b", "You wrote <|im_end|>.")
    held = list(talk.runner.row)
    talk.say("So?", "x")
    prompt, num_computed = talk.runner.prompts[-1]
    (end,) = talk.ends
    assert prompt.count(end) == 4  # Qwen's default system prompt, two messages, one answer
    assert num_computed == len(prompt) - len(held)


def test_undo_keeps_the_tokens_before_it(chat_model: Load) -> None:
    talk = scripted(chat_model, "qwen2.5")
    talk.say("One", "1")
    held = list(talk.runner.row)
    talk.say("Two", "2")
    talk.chat.conversation = talk.chat.conversation.without_last()
    start = started(talk.say("Three", "3"))
    assert start.num_kept >= len(held)
    assert start.num_history_computed == 0


def test_regenerating_draws_the_next_sample(chat_model: Load) -> None:
    talk = scripted(chat_model, "tiny")
    talk.say("Hi", "first")
    talk.run(talk.chat.regenerate(), "second")
    talk.run(talk.chat.regenerate(), "third")
    assert [sampler.sample_index for sampler in talk.runner.samplers] == [0, 1, 2]
    assert [turn.answer.content for turn in talk.chat.conversation.turns] == ["third"]
    assert talk.runner.prompts[-1][1] == 1


def test_undo_then_regenerate_answers_the_turn_before(chat_model: Load) -> None:
    talk = scripted(chat_model, "tiny")
    talk.say("One", "1")
    talk.say("Two", "2")
    talk.chat.conversation = talk.chat.conversation.without_last()
    talk.run(talk.chat.regenerate(), "uno")
    assert [(turn.user, turn.answer.content) for turn in talk.chat.conversation.turns] == [("One", "uno")]


def test_an_interrupted_answer_goes_on_where_it_stopped(chat_model: Load) -> None:
    talk = scripted(chat_model, "tiny")
    talk.runner.interrupt_decode_after = 4
    events = talk.say("Hi", "Once upon")
    assert text_of(events) == "Once"
    assert finished(events).answer.is_unfinished
    held = list(talk.runner.row)
    events = talk.run(talk.chat.continue_answer(), " upon")
    assert text_of(events) == " upon"
    assert talk.runner.prompts[-1] == ((*held, ord("e")), 1)  # chosen but not run
    answer = talk.chat.conversation.last.answer
    assert (answer.content, answer.finish_reason, answer.token_ids) == ("Once upon", "eos", tuple(b"Once upon"))
    num_prompt_tokens = len(held) - 3
    assert [sampler.num_prompt_tokens for sampler in talk.runner.samplers] == [num_prompt_tokens] * 2


@pytest.mark.parametrize("name", ["tiny", "llama2", "qwen3"])
@pytest.mark.parametrize("token_ids", [(), (5,), (2**31 - 1,), (5,) * 1000])
def test_an_answer_that_was_edited_by_hand_goes_on_from_its_text(
    chat_model: Load, name: str, token_ids: tuple[int, ...]
) -> None:
    edited, clean = scripted(chat_model, name), scripted(chat_model, name)
    text = "Once <|end|> </s>"  # special tokens in a text are text
    ids = tuple(clean.tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False))
    for talk, kept in ((edited, token_ids), (clean, ids)):
        talk.chat.conversation = Conversation().ask("Hi").with_answer(Answer(text, text, None, kept, "length", 0))
        talk.run(talk.chat.continue_answer(), [*talk.ids(" upon", ends=False), *sorted(talk.ends)[:1]])
    assert edited.runner.prompts == clean.runner.prompts
    assert edited.chat.conversation == clean.chat.conversation
    assert edited.chat.conversation.last.answer.content.startswith(text)


def test_after_the_last_sample_comes_the_first(chat_model: Load) -> None:
    talk = scripted(chat_model, "tiny")
    answer = Answer("a", "a", None, (97,), "eos", 2**32 - 1)
    talk.chat.conversation = Conversation().ask("Hi").with_answer(answer)
    talk.run(talk.chat.regenerate(), "b")
    assert talk.chat.conversation.last.answer == Answer("b", "b", None, (98,), "eos", 0)


def test_a_template_that_writes_nothing_is_refused(chat_model: Load) -> None:
    talk = scripted(chat_model, "tiny")
    talk.chat.template = ChatTemplate("", "the template T", {})
    with pytest.raises(TokenizerError, match="the template T gives an empty prompt for this message"):
        talk.say("Hi", "x")
    talk.chat.template.close()
    assert talk.chat.conversation == Conversation()


def test_an_answer_cut_within_a_character_ends_before_it(chat_model: Load) -> None:
    talk = scripted(chat_model, "tiny")
    talk.runner.interrupt_decode_after = 3
    events = talk.say("Hi", "a👩b")
    assert text_of(events) == "a"
    assert talk.chat.conversation.last.answer.content == "a"
    talk.run(talk.chat.continue_answer(), "👩b")
    assert talk.chat.conversation.last.answer.content == "a👩b"


def test_an_interrupt_in_the_prefill_keeps_the_message(chat_model: Load) -> None:
    talk = scripted(chat_model, "tiny", runner=ScriptedChatRunner(chunk=10))
    talk.runner.interrupt_prefill_after = 20
    events = talk.say("A message that is quite long, for a prefill", "never")
    assert text_of(events) == ""
    answer = finished(events).answer
    assert (answer.content, answer.finish_reason) == ("", "interrupted")
    assert len(talk.runner.row) == 20
    talk.run(talk.chat.continue_answer(), "now")
    prompt, num_computed = talk.runner.prompts[-1]
    assert num_computed == len(prompt) - 20
    assert talk.chat.conversation.last.answer.content == "now"


def test_the_conversation_holds_the_answer_under_way(chat_model: Load) -> None:
    talk = scripted(chat_model, "tiny")
    talk.runner.script = talk.ids("Once upon")
    events = talk.chat.send("Hi")
    assert next(events)
    assert talk.chat.conversation.last.answer.content == ""
    while talk.chat.conversation.last.answer.content != "Once":
        next(events)
    assert talk.chat.conversation.last.answer.finish_reason == "interrupted"
    assert len(talk.chat.interrupt()) == 1
    assert talk.chat.interrupt() == []
    assert talk.chat.conversation.last.answer.content == "Once"


def test_a_limit_and_a_full_context_are_told_apart(chat_model: Load) -> None:
    talk = scripted(chat_model, "tiny", max_new_tokens=3)
    assert finished(talk.say("Hi", "abcdef")).answer.finish_reason == "length"
    talk = scripted(chat_model, "tiny", runner=ScriptedChatRunner(max_seq_len=40), max_new_tokens=30)
    events = talk.say("Hi", "x" * 50)
    assert finished(events).answer.finish_reason == "context"
    assert len(started(events).prompt_token_ids) + len(finished(events).token_ids) == 40


def test_what_was_said_last_is_not_computed_again(chat_model: Load) -> None:
    """A cut answer: its last token was chosen, and first runs with the next prompt."""
    talk = scripted(chat_model, "tiny", max_new_tokens=3)
    talk.say("Hi", "abcdef")
    held = talk.runner.row
    start = started(talk.say("So", "x"))
    assert (start.num_kept, start.num_history_computed) == (len(held), 0)
    assert start.prompt_token_ids[len(held) - 2 : len(held) + 1] == tuple(b"abc")


def test_stop_strings_are_no_part_of_the_history(chat_model: Load) -> None:
    talk = scripted(chat_model, "tiny", stop_strings=("END",))
    talk.say("Hi", "It is so. END and more")
    answer = talk.chat.conversation.last.answer
    assert (answer.content, answer.token_ids, answer.finish_reason) == ("It is so. ", tuple(b"It is so. "), "stop")


def test_what_cannot_be_done_says_so_and_changes_nothing(chat_model: Load) -> None:
    talk = scripted(chat_model, "tiny")
    for verb in (talk.chat.regenerate, talk.chat.continue_answer, lambda: talk.chat.edit("x")):
        with pytest.raises(UsageError, match="no turn"):
            verb()
    talk.say("Hi", "Hello")
    with pytest.raises(UsageError, match="the last answer is complete"):
        talk.chat.continue_answer()
    before = talk.chat.conversation
    talk.chat.template = ChatTemplate("{{ raise_exception('no more') }}", "T", {})
    with pytest.raises(TokenizerError, match="no more"):
        talk.say("Again", "x")
    talk.chat.template.close()
    assert talk.chat.conversation == before


def test_a_tokenizer_of_another_model_is_refused(chat_model: Load) -> None:
    talk = scripted(chat_model, "tiny")
    talk.runner.config = SimpleNamespace(vocab_size=100)
    with pytest.raises(UsageError, match="belongs to another model"):
        talk.say("Hi", "x")


# Reasoning: separated as it streams, and the part of it in the next prompt.


@pytest.mark.parametrize(
    ("text", "start", "expected"),
    [
        ("Hello", "undecided", (None, "Hello")),
        ("\n Hello <think>no</think>", "undecided", (None, "\n Hello <think>no</think>")),
        ("<think>\na\n\nb\n</think>\n\nHello\n", "undecided", ("a\n\nb", "Hello\n")),
        ("<think>\n\n</think>\n\nHello", "undecided", ("", "Hello")),
        ("<think>still", "undecided", ("still", "")),
        ("a < b</think>Hello", "reasoning", ("a < b", "Hello")),
        ("<think>\na</think>Hello", "reasoning", ("a", "Hello")),
        ("<thin", "undecided", (None, "<thin")),
        ("", "undecided", (None, "")),
        ("<think>\na</think>Hello", "answer", (None, "<think>\na</think>Hello")),
    ],
)
def test_reasoning_and_answer(text: str, start: Start, expected: tuple[str | None, str]) -> None:
    assert split_reasoning(text, start) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "b", "<", "/", "</thi", "nk>"]), max_size=12),
    st.sampled_from(["undecided", "reasoning", "answer"]),
    st.randoms(use_true_random=False),
)
def test_streaming_gives_the_same(parts: list[str], start: Start, random) -> None:
    text = "".join(parts)
    splitter = ReasoningSplitter(start)
    pieces = []
    position = 0
    while position < len(text):
        end = position + random.randint(1, 5)
        pieces += splitter.push(text[position:end])
        position = end
    pieces += splitter.flush()
    reasoning, answer = split_reasoning(text, start)
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


# A conversation that fills the context: what is dropped or refused, and the messages.


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
