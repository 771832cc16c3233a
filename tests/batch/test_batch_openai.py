"""OpenAI's form of a line: what it becomes, and that nothing in it is ignored."""

import json
from dataclasses import replace
from typing import Any

import pytest

from llmcli.batch.input import BODY_KEYS, Line, parse_line
from llmcli.errors import UsageError
from llmcli.schema.constraint import Constraint

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def line(body: Any, url: Any = COMPLETION, **changes: Any) -> Line | None:
    value = {"custom_id": "r1", "method": "POST", "url": url, "body": body, **changes}
    value = {key: item for key, item in value.items() if item is not ...}
    return parse_line(json.dumps(value).encode(), 5, ("models/tiny", "tiny"))


def test_every_key_is_taken() -> None:
    body = {
        "model": "tiny",
        "prompt": "Hi",
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "seed": 3,
        "stop": "x",
        "logit_bias": {"12": -100, "7": 1.5},
        "n": 1,
        "response_format": {"type": "json_object"},
        "top_k": 20,
    }
    assert body.keys() | {"max_completion_tokens"} >= {"prompt", *BODY_KEYS}
    sampling = {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "presence_penalty": -1.0, "frequency_penalty": 2.0}
    expected = Line(5, "r1", "Hi", None, 3, 9, ("x",), sampling, {12: -100.0, 7: 1.5}, "completion")
    expected = replace(expected, constraint=Constraint("schema", "body.response_format", {"type": "object"}))
    assert line(body) == expected


def test_a_chat() -> None:
    found = line({"messages": MESSAGES, "max_completion_tokens": 4, "model": "models/tiny"}, CHAT)
    assert found == Line(5, "r1", messages=tuple(MESSAGES), max_new_tokens=4, form="chat")


def test_a_response_format() -> None:
    schema = {"type": "array"}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}
    assert line({"prompt": "Hi", "response_format": wanted}).constraint == Constraint(
        "schema", "body.response_format.json_schema.schema", schema
    )
    assert line({"prompt": "Hi", "response_format": {"type": "text"}}).constraint is None
    for value, problem in (
        ("json_object", "expected an object of type text, json_object or json_schema"),
        ({"type": "xml"}, "expected an object of type text, json_object or json_schema"),
        ({"type": "json_object", "schema": {}}, "unknown key 'body.response_format.schema'"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "expected an object with name and schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}},
            "unknown key 'body.response_format.json_schema",
        ),
    ):
        with pytest.raises(UsageError, match=problem):
            line({"prompt": "Hi", "response_format": value})


def test_a_null_is_a_key_that_is_not_there() -> None:
    assert line({"prompt": "Hi", **dict.fromkeys(BODY_KEYS)}) == Line(5, "r1", "Hi", form="completion")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("tools", [{"type": "function"}], "an empty list, as no tools are called here"),
        ("logprobs", 1, "false"),
        ("stream", True, "false"),
        ("echo", True, "false"),
        ("best_of", 2, "the value of n"),
        ("suffix", "end", "an empty string, as texts have no given end"),
        ("user", 5, "a string"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(key: str, value: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=f"^body.{key} is .*, expected {expected}$"):
        line({"prompt": "Hi", key: value})


def test_the_likeliest_token_is_asked_for_by_either_key() -> None:
    assert line({"prompt": "Hi", "top_p": 0, "temperature": 2}) == line({"prompt": "Hi", "temperature": 0})
    with pytest.raises(UsageError, match="^top_p is False"):
        line({"prompt": "Hi", "top_p": False})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "body.prompt is missing, and /v1/completions needs it"),
        ({"prompt": "a", "messages": MESSAGES}, "'body.messages' is not supported"),
        ({"prompt": "a", "temprature": 1}, r"'body.temprature' is not supported; did you mean temperature\?$"),
        ({"prompt": ["a"]}, r"body.prompt is \['a'\], expected a string"),
        (
            {"prompt": "a", "model": "gpt-4o"},
            "body.model is 'gpt-4o', expected 'models/tiny' or 'tiny'; name this run's",
        ),
        ({"prompt": "a", "n": 2}, "body.n is 2, expected 1"),
        ({"prompt": "a", "n": True}, "body.n is true, expected 1"),
        (
            {"prompt": "a", "max_tokens": 1, "max_completion_tokens": 1},
            "body.max_tokens and body.max_completion_tokens",
        ),
        ({"prompt": "a", "max_tokens": 0}, "body.max_tokens is 0, expected an integer >= 1"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1, expected a number >= 0"),
        ({"prompt": "a", "frequency_penalty": 3}, "frequency_penalty is 3, expected a number >= -2 and <= 2"),
        ({"prompt": "a", "logit_bias": [1]}, "body.logit_bias is .*, expected token ids and numbers"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "body.logit_bias is .*, expected token ids and numbers"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "body.logit_bias is .*, expected token ids and numbers"),
        ({"prompt": "a", "logit_bias": {"1": float("nan")}}, "body.logit_bias is .*, expected token ids and numbers"),
        ({"prompt": "a", "stop": [""]}, r"body.stop is \[''\], expected a string or a list of strings"),
        ({"prompt": "a", "seed": "1"}, "body.seed is '1', expected an integer"),
        ("Hi", "body is 'Hi', expected an object"),
    ],
)
def test_refusals_in_the_body(body: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        line(body)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"custom_id": ...}, "custom_id is missing, expected custom_id, method, url, body"),
        ({"custom_id": 5}, "custom_id is 5, expected a string"),
        ({"method": "GET"}, "method is 'GET', expected 'POST'"),
        ({"url": "/v1/embeddings"}, "url is '/v1/embeddings', expected /v1/chat/completions or /v1/completions"),
        ({"url": []}, r"url is \[\], expected"),
        ({"body": ...}, "body is missing"),
        ({"id": "a"}, "unknown key 'id', expected custom_id, method, url, body"),
        ({"prompt": "a"}, "unknown key 'prompt', expected custom_id"),
        ({"url": CHAT}, "'body.prompt' is not supported"),
    ],
)
def test_refusals_around_the_body(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        line(**{"body": {"prompt": "Hi"}, **changes})


def test_messages_as_clients_of_openai_send_them() -> None:
    """An answer of OpenAI's client goes back as it came, with keys that are null."""
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", "prompt_cache_breakpoint": {}}]
    nothing = {"refusal": None, "tool_calls": None, "audio": None, "function_call": None, "annotations": []}
    sent = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": "Hi", "name": "Ann"},
        {"role": "assistant", "content": "Ho", **nothing},
        {"role": "assistant", "content": "Ho", "tool_calls": []},
    ]
    read = line({"messages": sent}, CHAT)
    assert read is not None
    assert list(read.messages or ()) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "Ann"},
        {"role": "assistant", "content": "Ho"},
        {"role": "assistant", "content": "Ho"},
    ]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (
            {"role": "function", "content": "a", "name": "f"},
            "role is 'function', expected system or developer or user or",
        ),
        ({"role": "assistant", "content": "a", "tool_calls": [{}]}, r"tool_calls\[0\] is {}, expected a call such as"),
        ({"role": "assistant", "content": "a", "refusal": "no"}, "refusal is 'no', expected null"),
        ({"role": "user", "content": None}, "content is null, expected a string, or a list of parts"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, r"content\[0\] is .*, expected a part"),
        ({"role": "user", "content": "a", "name": 5}, "name is 5, expected a string"),
    ],
)
def test_a_message_that_asks_for_more_is_refused_by_name(message: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=rf"^body.messages\[0\].{problem}"):
        line({"messages": [message]}, CHAT)
