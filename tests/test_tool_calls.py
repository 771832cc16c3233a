"""The families' own examples of tool calls, read whole and cut at every place; text that is no call stays text."""

import json
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcli.tool_calls import (
    Call,
    CallArguments,
    CallBegun,
    CallReader,
    Content,
    Said,
    form_of,
    named_form,
    openai_call,
)

NAMES = ("get_weather", "get_current_temperature", "get_temperature_date", "get_user_info", "brave_search", "add")

# Form, text, content, and each call with its arguments.
Case = tuple[str, str, str, Sequence[tuple[str, object]]]
HERMES = "<tool_call>\n{}\n</tool_call>"
CALLS: list[Case] = [
    # https://qwen.readthedocs.io/en/latest/framework/function_call.html
    (
        "hermes",
        '<tool_call>\n{"name": "get_current_temperature", "arguments": {"location": "San Francisco, CA, USA"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get_temperature_date", "arguments": {"location": "San Francisco, CA, '
        'USA", "date": "2024-10-01"}}\n</tool_call>',
        "",
        [
            ("get_current_temperature", {"location": "San Francisco, CA, USA"}),
            ("get_temperature_date", {"location": "San Francisco, CA, USA", "date": "2024-10-01"}),
        ],
    ),
    (
        "hermes",
        'I\'ll look.\n\n<tool_call>{"name":"add","arguments":{"a":"}\\"</tool_call>","b":[1,{}]}}</tool_call>\n',
        "I'll look.",
        [("add", {"a": '}"</tool_call>', "b": [1, {}]})],
    ),
    # https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1 and llama3_2
    (
        "llama",
        '{"name": "get_weather", "parameters": {"location": "San Francisco, CA", "unit": "Fahrenheit"}}',
        "",
        [("get_weather", {"location": "San Francisco, CA", "unit": "Fahrenheit"})],
    ),
    (
        "llama",
        '<|python_tag|>brave_search.call(query="Menlo Park California weather")',
        "",
        [("brave_search", {"query": "Menlo Park California weather"})],
    ),
    (
        "llama",
        "[get_weather(city='San Francisco', metric='celsius'), get_weather(city='Seattle', metric='celsius')]",
        "",
        [("get_weather", {"city": city, "metric": "celsius"}) for city in ("San Francisco", "Seattle")],
    ),
    (
        "llama",
        "[get_user_info(user_id=7890, special='black')]",
        "",
        [("get_user_info", {"user_id": 7890, "special": "black"})],
    ),
    (
        "llama",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": "1"}}; '
        '{"name": "add", "parameters": {}}',
        "",
        [("add", {"a": "1"}), ("add", {})],
    ),
    (
        "pythonic",
        "[add(a=-1.5, b=[True, None, {'x': \"(,)'\"}], c=true, d='\\'='), add()]",
        "",
        [("add", {"a": -1.5, "b": [True, None, {"x": "(,)'"}], "c": True, "d": "'="}), ("add", {})],
    ),
    ("pythonic", '[add(**{"a": ")"}), add(**{})]', "", [("add", {"a": ")"}), ("add", {})]),
    # https://huggingface.co/mistralai/Mistral-7B-Instruct-v0.3 and Devstral-Small-2507
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"location": "Paris, France", "format": "celsius"}}, '
        '{"name": "add", "arguments": {}}]',
        "",
        [("get_weather", {"location": "Paris, France", "format": "celsius"}), ("add", {})],
    ),
    (
        "mistral-args",
        'One moment. [TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]add[ARGS]{}',
        "One moment.",
        [("add", {"a": 1, "b": 2}), ("add", {})],
    ),
    ("json", '{"name": "add", "arguments": {"a": 1}}', "", [("add", {"a": 1})]),
    (
        "json",
        '[{"name": "add", "parameters": {"a": 1}}, {"name": "add", "arguments": {}}]',
        "",
        [("add", {"a": 1}), ("add", {})],
    ),
]
TEXTS = [
    *(("hermes", text) for text in ("", "  Hi.\n ", "Use <tool_call> for it.", '<tool_call>\n{"name": "other", "arg')),
    ("hermes", '{"name": "add", "arguments": {}}'),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": 3}\n</tool_call>'),
    *(
        ("llama", text)
        for text in ('{"name": "Ann", "age": 3}', '{"name": "add"}', "[add] is [a, b]", "[add(x)]", "<|")
    ),
    ("llama", 'Like {"name": "add", "parameters": {}} or [add(a=1)]'),
    *(("mistral", text) for text in ("[TOOL] [{", "[TOOL_CALLS] none", '[{"name": "add", "arguments": {}}]')),
    ("json", '[{"name": "Ann"}, {"name": "add", "arguments": {}}]'),
]


def said_in(form: str, parts: Iterable[str]) -> list[Said]:
    reader = CallReader(named_form(form), NAMES)
    return [*(said for part in parts for said in reader.push(part)), *reader.flush()]


def joined(said: Iterable[Said]) -> tuple[str, list[Call]]:
    content, calls = "", list[Call]()
    for piece in said:
        if isinstance(piece, Content):
            content += piece.text
        elif isinstance(piece, CallBegun):
            calls.append(Call(piece.name))
        else:
            calls[-1].arguments += piece.text
    return content, calls


@pytest.mark.parametrize("case", CALLS, ids=lambda case: f"{case[0]} {case[1][:30]!r}")
def test_the_families_own_examples(case: Case) -> None:
    form, text, content, calls = case
    told, found = joined(said_in(form, [text]))
    assert (told, [(call.name, json.loads(call.arguments)) for call in found]) == (content, calls)


@pytest.mark.parametrize(("form", "text"), TEXTS)
def test_a_text_that_is_no_call_stays_text(form: str, text: str) -> None:
    assert joined(said_in(form, [text])) == (text, [])


@pytest.mark.parametrize(("form", "text"), [*((form, text) for form, text, *_ in CALLS), *TEXTS])
def test_a_text_is_read_alike_wherever_it_is_cut(form: str, text: str) -> None:
    """In two parts at every place, in single characters, and every beginning of it: an answer may be cut anywhere."""
    for end in range(len(text) + 1):
        whole = joined(said_in(form, [text[:end]]))
        assert joined(said_in(form, text[:end])) == whole
        for place in range(end):
            assert joined(said_in(form, [text[:place], text[place:end]])) == whole


@given(
    st.sampled_from(CALLS), st.lists(st.integers(0, 200)), st.sampled_from(["", "}", "[", "\n<tool_call", " ; ", "é"])
)
def test_odd_texts_are_read_alike_too(case: Case, places: list[int], more: str) -> None:
    text = case[1]
    for place in places[:3]:
        text = text[: place % (len(text) + 1)] + more + text[place % (len(text) + 1) :]
    cuts = sorted({0, *(place % (len(text) + 1) for place in places), len(text)})
    parts = [text[first:last] for first, last in zip(cuts, cuts[1:], strict=False)]
    assert joined(said_in(case[0], parts)) == joined(said_in(case[0], [text]))


def test_the_name_comes_before_the_arguments_and_both_as_they_are_written() -> None:
    """Nothing waits for the end of a call."""
    reader = CallReader(named_form("hermes"), NAMES)
    assert reader.push('Yes.\n<tool_call>\n{"name": "add", "arguments"') == [Content("Yes.")]
    assert reader.push(': {"a"') == [CallBegun("add"), CallArguments('{"a"')]
    assert reader.push(": 1") == [CallArguments(": 1")]
    assert reader.push("}}\n</tool_") == [CallArguments("}")]
    assert (reader.push("call>"), reader.flush()) == ([], [])
    reader = CallReader(named_form("pythonic"), NAMES)
    assert reader.push("[add(a=1, b=[2") == [CallBegun("add"), CallArguments('{"a": 1')]
    assert reader.push(", 3])") == [CallArguments(', "b": [2, 3]}')]


def test_space_without_end_is_not_held_back() -> None:
    for form, begin in (("llama", "{"), ("hermes", "<tool_call>")):
        reader = CallReader(named_form(form), NAMES)
        assert joined(said for character in begin + 99 * " " + "x" for said in reader.push(character))[0]


def test_values_of_python_become_json() -> None:
    for value, expected in (
        ("'a\\'b'", "a'b"),
        ("[1e400, None]", "[1e400, None]"),  # no JSON has infinity
        ("f(1, 2)", "f(1, 2)"),
        ("NaN", "NaN"),
        ("{'a': (1, 2)}", {"a": [1, 2]}),
        ('"\\u00e9"', "é"),
        ("'\\ud800'", "\ud800"),
        ("-3", -3),
    ):
        (call,) = joined(said_in("pythonic", [f"[add(a={value})]"]))[1]
        assert json.loads(call.arguments) == {"a": expected}
        call.arguments.encode()


def test_the_form_that_a_template_shows() -> None:
    for template, name in (
        ('{% if tools %}<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}', "hermes"),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS] [", "mistral"),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]", "mistral-args"),
        ("{{ '<|python_tag|>' }}", "llama"),
        ("Respond in [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
        ('Answer {"name": ..., "arguments": ...}', "json"),
    ):
        form = form_of(template)
        assert form is not None
        assert form.name == name
    for template in ("<tool_call>\n<function=f>\n<parameter=a>", "Hello {{ messages }}"):
        assert form_of(template) is None


def test_ids_suit_mistrals_templates() -> None:
    call = openai_call(Call("add", "{}"), ("prompt", 1, 0))
    assert call == openai_call(Call("add", "{}"), ("prompt", 1, 0))
    assert call["id"] != openai_call(Call("add", "{}"), ("prompt", 1, 1))["id"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
