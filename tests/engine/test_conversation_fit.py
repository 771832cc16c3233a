"""How many turns are dropped: as few as possible, to the token, and quickly in a long conversation."""

import json
import math
import random
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_chat import ChatModel

from llmcli.engine.chat import FREE_AFTER_DROP, MIN_FREE, FittedPrompt, build_prompt, fit_prompt
from llmcli.engine.conversation import (
    Answer,
    Conversation,
    SavedConversation,
    Turn,
    load_conversation,
    save_conversation,
)
from llmcli.errors import UsageError
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.chat_encoding import ChatTemplate, load_chat_template
from llmcli.tokenizer.load import load_tokenizer

Load = Callable[[str], ChatModel]
BARE = "{% for message in messages %}{{ message.content }}{% endfor %}"  # with one token a byte: lengths are counts


def said(tokenizer: Tokenizer, text: str, *, with_ids: bool = True) -> Answer:
    token_ids = tuple(tokenizer.encode(text, add_special_tokens=False)) if with_ids else ()
    return Answer(text, text, None, token_ids, "eos", 0)


def long_conversation(tokenizer: Tokenizer, num_turns: int, *, with_ids: bool = True) -> Conversation:
    answers = [said(tokenizer, f"Answer {number}, a short one.", with_ids=with_ids) for number in range(num_turns)]
    turns = tuple(Turn(f"Question {number}?", answer) for number, answer in enumerate(answers))
    return Conversation("Be kind.", turns).ask("And now?")


def drop_one_by_one(
    model: ChatModel, conversation: Conversation, context: int, max_new_tokens: int | None
) -> Conversation:
    """The reference: each count of dropped turns is rendered and encoded anew."""
    wanted = context if max_new_tokens is None else max_new_tokens

    def size(conversation: Conversation) -> int:
        answer = conversation.last.answer
        prompt = build_prompt(model.tokenizer, model.template, conversation)
        return len(prompt.token_ids) + (len(answer.token_ids) if answer else 0)

    if size(conversation) + min(wanted, max(1, context // 8)) > context:
        free = min(wanted, max(1, context // 4))
        while size(conversation) + free > context and len(conversation.seen_turns) > 1:
            conversation = replace(conversation, num_dropped=conversation.num_dropped + 1)
    return conversation


def fit(model: ChatModel, conversation: Conversation, context: int, **settings: Any) -> FittedPrompt:
    settings = {"max_new_tokens": None, "overflow": "drop-oldest", **settings}
    return fit_prompt(model.tokenizer, model.template, conversation, context=context, **settings)


@pytest.mark.parametrize("name", ["tiny", "llama2", "llama3.1", "qwen3", "plain llama2", "plain llama3"])
def test_as_few_turns_are_dropped_as_dropping_one_by_one_would(chat_model: Load, name: str) -> None:
    model, draw = chat_model(name), random.Random(1)
    words = ["a", "Once", " upon", "\n", "  ", "é", "👩‍👩‍👧", "the end", "<|end|>", "[x]", "12345", "User:"]

    def text() -> str:
        return "x" + "".join(draw.choice(words) for _ in range(draw.randint(0, 12)))

    num_with_drops = num_refused = 0
    for _ in range(15):
        answers = [said(model.tokenizer, text(), with_ids=draw.random() < 0.7) for _ in range(draw.randint(1, 14))]
        turns = [Turn(text(), answer) for answer in answers]
        conversation = Conversation(text() if draw.random() < 0.5 else None, tuple(turns))
        if draw.random() < 0.7:
            conversation = conversation.ask(text())
        conversation = replace(conversation, num_dropped=draw.randint(0, len(conversation.turns) // 3))
        context, max_new_tokens = draw.randint(20, 500), draw.choice([None, None, 1, 10, 60])
        expected = drop_one_by_one(model, conversation, context, max_new_tokens)
        try:
            fitted = fit(model, conversation, context, max_new_tokens=max_new_tokens)
        except UsageError:
            num_refused += 1
            assert len(expected.seen_turns) == 1
            assert len(build_prompt(model.tokenizer, model.template, expected).token_ids) >= context - 60
            continue
        assert fitted.conversation == expected
        assert fitted.prompt == build_prompt(model.tokenizer, model.template, expected)
        num_with_drops += expected.num_dropped > conversation.num_dropped
    assert num_with_drops >= 3
    assert num_refused < 9


@pytest.fixture
def bare(chat_model: Load) -> ChatModel:
    tiny = chat_model("tiny")
    return tiny._replace(template=ChatTemplate(BARE, "a template of contents alone", {}))


def turns_of(*sizes: int) -> Conversation:
    """Turns of that many tokens; the last one waits for its answer."""
    *before, last = sizes
    turns = [Turn("q", Answer("a" * (size - 1), "a" * (size - 1), None, (), "eos", 0)) for size in before]
    return Conversation(None, tuple(turns)).ask("q" * last)


@pytest.mark.parametrize(
    ("sizes", "max_new_tokens", "num_dropped"),
    [
        # With a context of 160, an eighth is 20 and a quarter 40.
        ((70, 60, 10), None, 0),  # exactly an eighth is free
        ((70, 60, 11), None, 1),
        ((50, 100, 20), None, 1),  # exactly a quarter is free then
        ((50, 100, 21), None, 2),
        ((50, 1, 100, 20), None, 2),
        ((50, 1, 99, 20), None, 1),
        ((50, 1, 50, 50, 100), None, 4),
        ((70, 70, 17), 3, 0),  # less is requested
        ((70, 70, 18), 3, 1),
        ((3, 140, 17), 3, 1),
        ((2, 141, 17), 3, 2),
        ((70, 60, 10), 30, 0),  # an eighth is required before a drop, all of it after one
        ((12, 119, 11), 30, 1),
        ((12, 120, 11), 30, 2),
        ((10, 120, 10, 11), 30, 2),
        ((10, 119, 11, 1), 30, 2),
        ((10, 120, 9, 1), 30, 0),
        ((11, 120, 9, 1), 30, 1),
        ((159,), None, 0),  # the last turn stays, if one token is free
        ((1, 159), None, 1),
    ],
)
def test_the_boundary_to_the_token(
    bare: ChatModel, sizes: tuple[int, ...], max_new_tokens: int | None, num_dropped: int
) -> None:
    fitted = fit(bare, turns_of(*sizes), 160, max_new_tokens=max_new_tokens)
    assert fitted.conversation.num_dropped == num_dropped
    assert len(fitted.token_ids) == sum(sizes[num_dropped:])


@pytest.mark.parametrize(("sizes", "num_dropped"), [((4, 2), 0), ((4, 3), 1)])
def test_at_least_one_token_is_free_in_the_smallest_context(
    bare: ChatModel, sizes: tuple[int, ...], num_dropped: int
) -> None:
    assert (int(7 * MIN_FREE), int(7 * FREE_AFTER_DROP)) == (0, 1)
    assert fit(bare, turns_of(*sizes), 7).conversation.num_dropped == num_dropped
    assert fit(bare, turns_of(2, 2), 3).conversation.num_dropped == 1  # a quarter of it is also 0


def test_an_answer_that_goes_on_counts(bare: ChatModel) -> None:
    begun = Answer("a" * 10, "a" * 10, None, (97,) * 10, "interrupted", 0)
    for size, num_dropped in [(70, 0), (71, 1)]:
        conversation = turns_of(60, size).with_answer(begun)
        assert fit(bare, conversation, 160).conversation.num_dropped == num_dropped


@pytest.mark.parametrize("with_ids", [True, False])
def test_the_history_ends_with_the_last_answer(bare: ChatModel, with_ids: bool) -> None:
    answers = [said(bare.tokenizer, "a" * size, with_ids=with_ids) for size in (5, 7)]
    conversation = Conversation("sys", tuple(Turn("q", answer) for answer in answers)).ask("q" * 4)
    prompt = build_prompt(bare.tokenizer, bare.template, conversation)
    assert (prompt.num_history_tokens, len(prompt.token_ids)) == (3 + 1 + 5 + 1 + 7, 3 + 1 + 5 + 1 + 7 + 4)
    assert build_prompt(bare.tokenizer, bare.template, Conversation().ask("q")).num_history_tokens == 0


def test_stop_takes_all_but_one_token(bare: ChatModel) -> None:
    fitted = fit(bare, turns_of(80, 79), 160, overflow="stop")
    assert (fitted.conversation.num_dropped, len(fitted.token_ids)) == (0, 159)
    with pytest.raises(UsageError, match="the conversation has 160 tokens; the context holds 160"):
        fit(bare, turns_of(80, 80), 160, overflow="stop")
    for overflow in ("stop", "drop-oldest"):
        with pytest.raises(UsageError, match="the message has 160 tokens .*; the context holds 160"):
            fit(bare, turns_of(160), 160, overflow=overflow)
    with pytest.raises(UsageError, match="the message has 160 tokens"):  # dropping all others does not help
        fit(bare, turns_of(1, 160), 160)


def load_long(chat_model: Load, name: str) -> ChatModel:
    if name != STORYTELLER:
        return chat_model(name)
    folder = resource_folder(STORYTELLER)
    tokenizer = load_tokenizer(folder)
    return ChatModel(folder, tokenizer, load_chat_template(folder, tokenizer))


@pytest.mark.parametrize(("name", "with_ids"), [(STORYTELLER, True), ("llama3.1", False)])
def test_a_thousand_turns(chat_model: Load, monkeypatch: pytest.MonkeyPatch, name: str, with_ids: bool) -> None:
    """Counts the slow work, equal on every machine: renderings, and encoded characters."""
    model = load_long(chat_model, name)
    conversation = long_conversation(model.tokenizer, 1000, with_ids=with_ids)
    fitted = fit(model, conversation, 1024)
    assert 950 < fitted.conversation.num_dropped < 990

    num_characters = len(build_prompt(model.tokenizer, model.template, conversation).text)
    counts = {"renderings": 0, "characters": 0}
    render, encode = ChatTemplate.render, type(model.tokenizer).encode

    def count_rendering(self: ChatTemplate, *args: Any, **variables: Any) -> str:
        counts["renderings"] += 1
        return render(self, *args, **variables)

    def count_characters(self: Tokenizer, text: str, **options: Any) -> list[int]:
        counts["characters"] += len(text)
        return encode(self, text, **options)

    monkeypatch.setattr(ChatTemplate, "render", count_rendering)
    monkeypatch.setattr(type(model.tokenizer), "encode", count_characters)
    assert fit(model, conversation, 1024) == fitted
    assert counts["renderings"] <= 2 * (math.ceil(math.log2(1000)) + 2)  # the whole, each half, the result
    assert counts["characters"] < 5 * num_characters  # not each answer's end anew


# Saving and loading: nothing is lost, the file is readable, and anything else is refused with a message. How files are
# read and written is tested in test_files.py; damaged ones in tests/fuzz.


Change = Callable[[dict[str, Any]], object]
CONVERSATION = Conversation(
    "Be kind.",
    (
        Turn("Grüße [\n1, 2 ]\n👩‍👩‍👧", Answer("Hello", "Hello", None, (1, 22, 333), "eos", 0)),
        Turn("Why?", Answer("<think>\nHm.\n</think>\n\nSo.", "So.", "Hm.", (4,), "interrupted", 2)),
        Turn("And?", None),
    ),
    1,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "conversation.json"
    save_conversation(path, SavedConversation("org/name", CONVERSATION), replace=False)
    return path


def test_round_trip(path: Path) -> None:
    assert load_conversation(path) == SavedConversation("org/name", CONVERSATION)
    empty = SavedConversation("m", Conversation())
    save_conversation(path, empty, replace=True)
    assert load_conversation(path) == empty


def test_people_can_read_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert '"content": "Hello"' in text
    assert '"token_ids": [1, 22, 333]' in text
    assert "Grüße" in text


def test_only_the_owner_can_read_it_and_nothing_else_is_left(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=2), "version 2 .* reads version 1"),
        (lambda c: c.pop("version"), "version None"),
        (lambda c: c.update(format="other"), "is not a saved conversation"),
        (lambda c: c.pop("turns"), "turns is missing, expected a list"),
        (lambda c: c.update(num_dropped=9), "num_dropped is 9, expected 0 to 3"),
        (lambda c: c["turns"].insert(0, 5), "turn 1: expected an object"),
        (lambda c: c["turns"][1].pop("user"), "turn 2: user is missing"),
        (lambda c: c["turns"][0].update(answer="Hello"), "turn 1: answer is not an object"),
        (lambda c: c["turns"][0]["answer"].update(token_ids=[1, "2"]), "turn 1: token_ids"),
        (lambda c: c["turns"][0]["answer"].update(finish_reason="bored"), "turn 1: finish_reason is 'bored'"),
        (lambda c: c["turns"][0]["answer"].update(sample=-1), "turn 1: sample is -1"),
        (lambda c: c["turns"][1]["answer"].update(content="Other."), "turn 2: text does not end with content"),
        (lambda c: c.update(system=1), "system is 1, expected a str"),
        (lambda c: c.update(model="a\0b"), "model holds a NUL character"),
    ],
)
def test_what_is_no_conversation_is_refused(
    path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=message) as caught:
        load_conversation(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "holds a JSON list, expected an object"),
        (b"{}", 'lacks the line "format"'),
        (b"[" * 100_000, "nested more than 64 levels deep"),
    ],
)
def test_what_is_no_such_json_is_refused(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        load_conversation(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 300


def test_what_exists_is_replaced_only_when_asked_for_and_only_a_conversation(path: Path) -> None:
    saved = SavedConversation("m", Conversation())
    with pytest.raises(UsageError, match=r"exists; replace it with /save --force FILE"):
        save_conversation(path, saved, replace=False)
    path.write_text(json.dumps(json.loads(path.read_text())))  # as another program would write it
    save_conversation(path, saved, replace=True)
    assert load_conversation(path) == saved


def test_what_is_not_a_conversation_is_never_replaced(tmp_path: Path) -> None:
    other = tmp_path / "other"
    for content in ("mine", ""):
        other.write_text(content)
        with pytest.raises(UsageError, match="exists and is not a saved conversation"):
            save_conversation(other, SavedConversation("m", Conversation()), replace=True)
        assert other.read_text() == content


def test_the_path_of_a_model_need_not_be_text(path: Path) -> None:
    save_conversation(path, SavedConversation("a\udcffb", CONVERSATION), replace=True)
    assert load_conversation(path) == SavedConversation("a?b", CONVERSATION)
