"""OpenAI's published reference, key by key, in `serve` and in batch: done, without effect, or refused by name."""

import json
import typing
from typing import Any

import pytest
from openai.types import chat
from openai.types import completion_create_params as completion
from openai.types.chat import completion_create_params as chat_completion

from llmcli.batch.input import parse_line
from llmcli.errors import UsageError
from llmcli.serve.bodies import ChatBody, CompletionBody, TextsBody, parse_body
from llmcli.serve.refusal import Refusal

MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}

# By key: values that are served, and values that are refused. A null is always served.
SHARED: dict[str, tuple[list[Any], list[Any]]] = {
    "model": (["tiny"], [5]),
    "frequency_penalty": ([0, 0.0, -2, 2], [3, "1", True]),
    "presence_penalty": ([0, 1.5], [-3, []]),
    "logit_bias": ([{}, {"5": 10}], [[], {"a": 1}]),
    "max_tokens": ([1, 9], [-1, "9", 1.5]),
    "n": ([1], [0, "1", True]),
    "seed": ([0, 7], [-1, "7"]),
    "stop": (["a", ["a"], []], [5, [5], [""]]),
    "temperature": ([0, 1, 2], [-1, "1"]),
    "top_p": ([0, 0.0, 0.5, 1], [-0.1, 1.1, False, "0"]),
    "stream": ([False], ["yes"]),
    "user": (["ann", ""], [5]),
}
CHAT: dict[str, tuple[list[Any], list[Any]]] = {
    **SHARED,
    "messages": ([MESSAGES], [[], "Hi", [{}], [5]]),
    "audio": ([], [{"voice": "alloy", "format": "mp3"}]),
    "function_call": (["none", "auto"], ["f", {"name": "f"}]),
    "functions": ([[]], [[{"name": "f"}], {}]),
    "logprobs": ([False], [5]),
    "top_logprobs": ([0], [3, 21, True]),
    "max_completion_tokens": ([1, 9], [0, "9"]),
    "metadata": ([{}, {"a": "b"}], ["a", []]),
    "modalities": ([["text"]], [["audio"], ["text", "audio"], "text", []]),
    "moderation": ([], [{"model": "omni-moderation-latest"}]),
    "parallel_tool_calls": ([True, False], ["yes"]),
    "prediction": ([{"type": "content", "content": "Hi"}], ["Hi"]),
    "prompt_cache_key": (["a"], [5]),
    "prompt_cache_options": ([{"mode": "implicit"}], ["implicit"]),
    "prompt_cache_retention": (["in_memory", "24h"], [24]),
    "reasoning_effort": (["none", "minimal", "low", "medium", "high", "xhigh"], [1]),
    "response_format": ([{"type": "text"}, {"type": "json_object"}, SCHEMA], ["text", {"type": "xml"}]),
    "safety_identifier": (["a"], [5]),
    "service_tier": (["auto", "default"], ["flex", "priority", 1]),
    "store": ([False], [True, 0]),
    "stream_options": ([], [{"include_usage": True}, {"x": 1}, 5]),
    "tool_choice": (["none", "auto"], ["required", {"type": "function", "function": {"name": "f"}}]),
    "tools": ([[], [TOOL]], [[TOOL, TOOL], [{"type": "custom", "custom": {"name": "f"}}], {}]),
    "verbosity": (["low", "medium", "high"], [1]),
    "web_search_options": ([], [{}, {"search_context_size": "low"}]),
}
COMPLETION: dict[str, tuple[list[Any], list[Any]]] = {
    **SHARED,
    "prompt": (["Hi", ""], [5, {}]),
    "best_of": ([1], [2, True, "1"]),
    "echo": ([False], ["yes", 1]),
    "logprobs": ([], [-1, 21, "2"]),
    "stream_options": ([], [{"include_usage": True}, {"include_obfuscation": True}]),
    "suffix": ([""], [" The end."]),
}
FORMS: dict[str, tuple[type[TextsBody], Any, dict[str, tuple[list[Any], list[Any]]], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, chat_completion, CHAT, {"messages": MESSAGES}),
    "/v1/completions": (CompletionBody, completion, COMPLETION, {"prompt": "Hi"}),
}


@pytest.mark.parametrize("url", FORMS)
def test_the_tables_have_every_key_of_the_reference(url: str) -> None:
    _, reference, table, _ = FORMS[url]
    streaming, whole = reference.CompletionCreateParamsStreaming, reference.CompletionCreateParamsNonStreaming
    assert set(table) == {*typing.get_type_hints(streaming), *typing.get_type_hints(whole)}


@pytest.mark.parametrize(("url", "key"), [(url, key) for url, form in FORMS.items() for key in form[2]])
def test_a_key_is_served_or_refused_by_its_name(url: str, key: str) -> None:
    """In a batch too."""
    kind, _, table, required = FORMS[url]
    served, refused = table[key]
    asked = {"custom_id": "a", "method": "POST", "url": url}
    for value in [*served, *([] if key in required else [None])]:
        body = {**required, key: value}
        parse_body(kind, json.dumps(body).encode())
        assert parse_line(json.dumps({**asked, "body": body}).encode(), 1, ("tiny",)) is not None
    for value in refused:
        body = {**required, key: value}
        with pytest.raises(Refusal) as caught:
            parse_body(kind, json.dumps(body).encode())
        assert caught.value.status == 400
        assert (caught.value.param or "").replace("[", ".").split(".")[0] == key
        assert key in caught.value.message
        with pytest.raises(UsageError, match=f"{key}") as in_batch:
            parse_line(json.dumps({**asked, "body": body}).encode(), 1, ("tiny",))
        assert max(len(caught.value.message), len(str(in_batch.value))) < 250


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("temprature", "; did you mean temperature?"),
        ("max_token", "; did you mean max_tokens?"),
        ("tool", "; did you mean tools?"),
        ("top_logprob", "; did you mean top_logprobs?"),
        ("sprinkles", ""),
        ("x" * 5000, ""),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(key: str, hint: str) -> None:
    for value in (None, 1):
        with pytest.raises(Refusal) as caught:
            parse_body(ChatBody, json.dumps({"messages": MESSAGES, key: value}).encode())
        assert (caught.value.param, caught.value.code) == (key[:200], "unknown_key")
        assert caught.value.message.endswith(f" is not supported{hint}")
        assert len(caught.value.message) < 150


def _keys_of(union: Any) -> set[str]:
    return {key for one in typing.get_args(union) for key in typing.get_type_hints(one)}


def test_the_keys_of_messages() -> None:
    """All keys of an assistant's answer may come back with their values in an answer of text."""
    idle: dict[str, list[Any]] = {
        "role": ["system", "developer", "user", "assistant"],
        "content": ["", "Hi", [{"type": "text", "text": "Hi"}], []],
        "name": ["Ann", None],
        "refusal": [None],
        "audio": [None],
        "function_call": [None],
        "tool_calls": [None, []],
        "annotations": [None, []],
        "reasoning_content": ["Hm.", None],
        "parsed": [None, {"a": 1}],
    }
    for message in (
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{**CALL, "index": 0}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}]},
        {"role": "tool", "content": "a", "tool_call_id": "a"},
    ):
        parse_body(ChatBody, json.dumps({"messages": [message]}).encode())
    asking: dict[str, Any] = {
        "role": "function",
        "content": [{"type": "image_url", "image_url": {"url": "data:"}}],
        "name": 5,
        "refusal": "No.",
        "audio": {"id": "a"},
        "function_call": {"name": "f", "arguments": "{}"},
        "tool_calls": [TOOL],
        "annotations": [{}],
        "tool_call_id": "a",
        "reasoning_content": 5,
    }
    of_openai = _keys_of(chat.ChatCompletionMessageParam) | set(chat.ChatCompletionMessage.model_fields)
    assert set(asking) == of_openai | {"reasoning_content"}
    for key, values in idle.items():
        for value in values:
            parse_body(ChatBody, json.dumps({"messages": [{**MESSAGES[0], key: value}]}).encode())
    for key, value in asking.items():
        with pytest.raises(Refusal) as caught:
            parse_body(ChatBody, json.dumps({"messages": [{**MESSAGES[0], key: value}]}).encode())
        assert (caught.value.param or "").startswith(f"messages[0].{key}")


def test_options_of_a_stream() -> None:
    def parse(options: Any, *, stream: bool = True) -> TextsBody:
        return parse_body(
            ChatBody, json.dumps({"messages": MESSAGES, "stream": stream, "stream_options": options}).encode()
        )

    assert set(typing.get_type_hints(chat.ChatCompletionStreamOptionsParam)) == {"include_usage", "include_obfuscation"}
    for nothing in ({}, {"include_usage": False}, {"include_obfuscation": False, "continuous_usage_stats": None}, None):
        assert not parse(nothing).includes_usage
        parse(nothing, stream=False)
    asked = parse({"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False})
    assert (asked.includes_usage, asked.counts_in_pieces) == (True, True)
    with pytest.raises(Refusal) as caught:
        parse({"include_usge": True})
    assert caught.value.param == "stream_options.include_usge"
    assert caught.value.message.endswith("did you mean include_usage?")
    with pytest.raises(Refusal, match="expected false") as caught:
        parse({"include_obfuscation": True})
    assert caught.value.param == "stream_options.include_obfuscation"


def test_the_likeliest_token_is_asked_for_by_top_p() -> None:
    asked = parse_body(ChatBody, json.dumps({"messages": MESSAGES, "top_p": 0, "temperature": 1.5}).encode())
    assert asked.sampling == {"temperature": 0.0}


def test_no_tokens_are_asked_for_only_with_the_prompt() -> None:
    assert parse_body(CompletionBody, b'{"prompt": "a", "max_tokens": 0, "echo": true}').max_new_tokens == 0
    with pytest.raises(Refusal, match="max_tokens is 0, expected >= 1, or echo: true"):
        parse_body(CompletionBody, b'{"prompt": "a", "max_tokens": 0}')
    assert parse_body(CompletionBody, b'{"prompt": "a", "n": 3, "best_of": 3}').n == 3
