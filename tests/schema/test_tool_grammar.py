"""Grammars of answers with tools: what may follow what, for the families' examples; schemas that cannot be held."""

import json
from typing import Any

import pytest
from held_walks import accepts
from test_tool_calls import CALLS, NAMES, TEXTS, joined, said_in
from tool_models import TIME, WEATHER, tool

from llmcli.errors import UsageError
from llmcli.schema.constraint import Constraint
from llmcli.schema.grammar import Grammar, grammar_of
from llmcli.tool_calls import FORMS, form_of

ANY = [tool(name, {"type": "object"})["function"] for name in NAMES]
FUNCTIONS = [WEATHER["function"], TIME["function"]]
VALID, EMPTY = '{"city": "Wien", "metric": true}', "{}"


def grammar(form: str, tools: list[dict[str, Any]] = FUNCTIONS, **more: Any) -> Grammar:
    value = {"form": form, "tools": tools, "names": [one["name"] for one in tools]}
    value |= {"must_call": False, "is_single": False, "start": "answer", **more}
    return grammar_of(Constraint("tools", "tools", value))


def call(form: str, name: str, arguments: str) -> str:
    """A call in the form's first spelling."""
    keywords = ", ".join(f"{key}={value!r}" for key, value in json.loads(arguments).items())
    return {
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        "mistral": f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}}}]',
        "mistral-args": f"[TOOL_CALLS]{name}[ARGS]{arguments}",
        "llama": f'{{"name": "{name}", "parameters": {arguments}}}',
        "json": f'{{"name": "{name}", "arguments": {arguments}}}',
        "pythonic": f"[{name}({keywords})]",
    }[form].replace("'", '"')


@pytest.mark.parametrize("case", CALLS, ids=lambda case: f"{case[0]} {case[1][:30]!r}")
def test_the_families_own_examples_may_be_written(case: Any) -> None:
    form, text, *_ = case
    if "[add(" in text or form == "llama" and ("'" in text or ".call" in text):
        return  # Python's strings are written as JSON's, and objects of any keys unpacked: see below
    assert accepts(grammar(form, ANY), text.rstrip())


@pytest.mark.parametrize(("form", "text"), TEXTS)
def test_any_text_may_be_written_until_a_call_begins(form: str, text: str) -> None:
    """A mark begins one; without a mark, the name of a tool at the text's start."""
    has_begun = (
        "<tool_call>" in text
        or "[TOOL_CALLS]" in text
        or (form in ("llama", "json") and text.startswith(('{"name": "add"', "[add(")))
    )
    assert accepts(grammar(form, ANY), text) != has_begun


@pytest.mark.parametrize("form", [form.name for form in FORMS])
def test_a_call_that_has_begun_is_held(form: str) -> None:
    held = grammar(form)
    right = call(form, "get_weather", VALID)
    assert accepts(held, right)
    assert accepts(held, call(form, "get_time", EMPTY))
    for name, arguments in (
        ("get_weather", EMPTY),
        ("get_weather", '{"city": "Rom", "metric": true}'),
        ("get_weather", '{"city": "Wien", "metric": 1}'),
        ("get_weather", '{"city": "Wien", "metric": true, "more": 1}'),
        ("get_time", VALID),
    ):
        assert not accepts(held, call(form, name, arguments)), (name, arguments)
    assert not accepts(held, right + " Done.")
    assert joined(said_in(form, [right]))[1][0].name == "get_weather"


@pytest.mark.parametrize("form", [form.name for form in FORMS])
@pytest.mark.parametrize("start", ["answer", "undecided", "reasoning"])
def test_a_text_without_calls_may_be_held_too(form: str, start: str) -> None:
    """Then calls come alone, and only where they must come the text's schema binds nothing."""
    schema = {"type": "object", "properties": {"hero": {"enum": ["Tom"]}}, "required": ["hero"]}
    held = grammar(form, start=start, text=("text.format.schema", schema))
    right, called = '{"hero": "Tom"}', call(form, "get_weather", VALID)
    before = "Well.</think>\n\n" if start == "reasoning" else ""
    for text in (right, called):
        assert accepts(held, before + text)
        assert accepts(held, f"<think>Hm</think>\n{text}") == (start != "answer")
    wrong = call(form, "get_weather", '{"city": 5}')
    for text in (
        "",
        "Hi.",
        '{"hero": "Max"}',
        '{"name": "get_time"}',
        wrong,
        f"Hi. {called}",
        f"{called}{right}",
        f"{right}{called}",
    ):
        assert not accepts(held, before + text), text
    listed = grammar(form, start=start, text=("text.format.schema", {"type": "array", "items": {"type": "boolean"}}))
    assert all(accepts(listed, before + text) for text in ("[true, false]", "[]", called))
    must = grammar(form, start=start, text=("text.format.schema", schema), must_call=True)
    assert accepts(must, before + called)
    assert not accepts(must, before + right)
    with pytest.raises(UsageError, match="text.format.schema: 'uniqueItems' at # cannot be held"):
        grammar(form, text=("text.format.schema", {"uniqueItems": True}))


@pytest.mark.parametrize("form", [form.name for form in FORMS])
def test_a_call_must_come(form: str) -> None:
    must, named = grammar(form, must_call=True), grammar(form, must_call=True, names=["get_time"])
    for text in ("", "Hi.", f"Well. {call(form, 'get_time', EMPTY)}"):
        assert not accepts(must, text)
    assert accepts(must, call(form, "get_weather", VALID))
    assert accepts(must, call(form, "get_time", EMPTY))
    assert not accepts(named, call(form, "get_weather", VALID))
    assert accepts(named, call(form, "get_time", EMPTY))


def test_one_call_or_several() -> None:
    time = '{"name": "get_time", "arguments": {}}'
    for form, text in (
        ("hermes", f"<tool_call>\n{time}\n</tool_call>\n<tool_call>\n{time}\n</tool_call>"),
        ("mistral", f"[TOOL_CALLS] [{time}, {time}]"),
        ("mistral-args", "[TOOL_CALLS]get_time[ARGS]{}[TOOL_CALLS]get_time[ARGS]{}"),
        ("llama", f"{time}; {time}"),
        ("llama", f"<|python_tag|>{time};{time}"),
        ("pythonic", "[get_time(), get_time()]"),
        ("json", f"[{time}, {time}]"),
    ):
        assert accepts(grammar(form), text)
        assert not accepts(grammar(form, is_single=True), text)


def test_other_spellings_of_a_family() -> None:
    held = grammar("llama")
    for text in (
        '<|python_tag|>get_weather.call(city="Wien", metric=True)',
        '{"type": "function", "name": "get_time", "parameters": {}}',
        'I will. <|python_tag|>{"name": "get_time", "parameters": {}}',
        '[get_weather(city="Wien", days=3, metric=False), get_time()]',
    ):
        assert accepts(held, text)
    for text in ("<|python_tag|>print(1)", "[get_weather(days=3, metric=True)]", "[get_time(a=1)]"):
        assert not accepts(held, text)


def test_reasoning_comes_first() -> None:
    """And may speak of calls."""
    time = call("hermes", "get_time", EMPTY)
    for start, begin in (("undecided", "<think>\n"), ("reasoning", "")):
        for must_call in (False, True):
            held = grammar("hermes", start=start, must_call=must_call)
            assert accepts(held, f"{begin}A <tool_call>?\n</think>\n\n{time}")
            assert not accepts(held, f"{begin}A\n</think>\n\n<tool_call> ")
            assert accepts(held, f"{begin}A\n</think>\n\nHi.") != must_call
            assert accepts(held, f"{begin}A") != must_call
            assert accepts(held, time) == (start == "undecided" or not must_call)
    assert accepts(grammar("hermes"), f"<think>\nA\n</think>\n\n{time}")
    assert not accepts(grammar("hermes"), "<think>\nA <tool_call>?\n</think>")


def test_what_cannot_be_held_is_said_and_its_call_is_held_all_the_same() -> None:
    odd = tool("odd", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})["function"]
    for form in ("hermes", "pythonic"):
        held = grammar(form, [TIME["function"], odd])
        (note,) = held.notes
        assert note.startswith("tools[1].function.parameters: 'uniqueItems' at #/properties/a cannot be held")
        assert note.endswith("; the arguments of odd are any object")
    assert accepts(grammar("hermes", [odd]), call("hermes", "odd", '{"a": [1, 1]}'))
    assert not accepts(grammar("hermes", [odd]), call("hermes", "odd", "{}").replace("{}", "3"))
    assert accepts(grammar("pythonic", [odd]), '[odd(**{"a": [1, 1]})]')
    with pytest.raises(UsageError, match=r"^tools\[0\].function.parameters: 'uniqueItems'"):
        grammar("hermes", [{**odd, "strict": True}])


def test_every_form_is_the_one_that_its_marks_show() -> None:
    for form in FORMS:
        assert form_of(" ".join(form.signs[:1])) == form
