"""Conversations: the ids of every prompt, recomputed tokens, undo, edit, resuming, interrupts."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_chat import ChatModel, ScriptedChat, ScriptedChatRunner, finished, started, text_of

from llmcli.engine.conversation import Answer, Conversation
from llmcli.errors import TokenizerError, UsageError
from llmcli.tokenizer.chat_template import ChatTemplate

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
