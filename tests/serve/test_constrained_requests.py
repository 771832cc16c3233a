"""Requests with a schema: the texts of `generate`, valid by other libraries; refusals by name."""

import json
import re
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from test_openai_client import MESSAGES, MODEL, generate, samples_of

from llmcli.serve.bodies import CompletionBody, parse_body

SCHEMA = {
    "type": "object",
    "properties": {"hero": {"enum": ["Tom", "Lily", "Max"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["hero", "age"],
    "additionalProperties": False,
}


def as_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "hero", "schema": schema, **more}}


def test_a_response_format_tells_what_generate_tells(client: Any) -> None:
    (question,) = (message["content"] for message in MESSAGES)
    told = generate(question, "--chat", "--schema", json.dumps(SCHEMA), "--seed", 5, "-n", 3)
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 5, "n": 3}
    for strict in ({}, {"strict": True}, {"strict": False}):
        choices = client.chat.completions.create(**asked, response_format=as_format(SCHEMA, **strict)).choices
        texts = [choice.message.content for choice in choices]
        assert texts == [sample["text"] for sample in samples_of(told)]
        assert {choice.finish_reason for choice in choices} == {"stop"}
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


class Hero(pydantic.BaseModel):
    """What a program wants to know."""

    name: Literal["Tom", "Lily"]
    age: Annotated[int, pydantic.Field(ge=1, le=99)]
    friends: Annotated[list[Literal["owl", "snail"]], pydantic.Field(max_length=3)]


def test_the_clients_own_types_are_held(client: Any) -> None:
    """The client makes a strict schema of a class, and an object from the text."""
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 2, "response_format": Hero}
    message = client.chat.completions.parse(**asked).choices[0].message
    assert isinstance(message.parsed, Hero)
    with client.chat.completions.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.parsed == message.parsed
    assert text == message.content


def test_any_object_and_free_text(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 4, "max_tokens": 12}
    cut = client.chat.completions.create(**asked, response_format={"type": "json_object"}).choices[0]
    assert cut.message.content.startswith("{")
    assert cut.finish_reason == "length"
    free = client.chat.completions.create(**asked, response_format={"type": "text"}).choices[0]
    assert free.message.content == client.chat.completions.create(**asked).choices[0].message.content


@pytest.mark.parametrize(
    ("option", "value", "given"),
    [
        ("schema", SCHEMA, ("--schema", json.dumps(SCHEMA))),
        ("json_output", True, ("--json-output",)),
        ("regex", " [0-3][0-9] (May|June)", ("--regex", " [0-3][0-9] (May|June)")),
        ("choice", [" kind", " angry"], ("--choice", " kind", "--choice", " angry")),
    ],
)
def test_our_keys_are_the_options(client: Any, option: str, value: Any, given: tuple[str, ...]) -> None:
    told = generate("The dragon was", *given, "--seed", 3, "-n", 2, "--max-new-tokens", 40)
    asked: dict[str, Any] = {"model": MODEL, "prompt": "The dragon was", "seed": 3, "n": 2, "max_tokens": 40}
    answer = client.completions.create(**asked, extra_body={option: value})
    assert [choice.text for choice in answer.choices] == [sample["text"] for sample in samples_of(told)]
    pieces = client.completions.create(**asked, extra_body={option: value}, stream=True)
    texts = ["", ""]
    for piece in pieces:
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_a_grammar_is_held(client: Any) -> None:
    grammar = 'root ::= "a " [a-z]{3,5} "."'
    answer = client.completions.create(model=MODEL, prompt="It was", n=4, seed=1, extra_body={"grammar": grammar})
    assert all(re.fullmatch(r"a [a-z]{3,5}\.", choice.text) for choice in answer.choices)


def test_a_key_that_asks_for_nothing_goes_with_a_format() -> None:
    body = {"prompt": "Hi", "response_format": {"type": "json_object"}, "json_output": False}
    constraint = parse_body(CompletionBody, json.dumps(body).encode()).constraint
    assert constraint is not None
    assert constraint.key == "response_format"


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"response_format": as_format({"uniqueItems": True})}, "response_format", "'uniqueItems' at # cannot be held"),
        (
            {
                "response_format": as_format(
                    {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 3, "maxLength": 2}}
                )
            },
            "response_format",
            "response_format.json_schema.schema: #/items cannot be held: Unsatisfiable",
        ),
        ({"response_format": as_format([])}, "response_format", "expected an object with name and schema"),
        ({"response_format": as_format({}, strict=1)}, "response_format", "strict is 1, expected true or false"),
        ({"extra_body": {"schema": 3}}, "schema", "schema is 3, expected a JSON Schema"),
        ({"extra_body": {"schema_": {}}}, "schema_", "'schema_' is not supported; did you mean schema?"),
        ({"extra_body": {"regex": "(?=a)"}}, "regex", "regex: look-around"),
        ({"extra_body": {"regex": "a", "choice": ["b"]}}, "regex", "regex and choice cannot be combined"),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"regex": "a"}},
            "response_format",
            "response_format and regex cannot be combined",
        ),
        ({"extra_body": {"regex": "a", "ignore_eos": True}}, "regex", "ignore_eos and regex cannot be combined"),
        (
            {"response_format": as_format({}), "extra_body": {"ignore_eos": True}},
            "response_format",
            "ignore_eos and response_format",
        ),
        ({"extra_body": {"regex": "a", "min_new_tokens": 3}}, "regex", "set min_new_tokens to 0"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(client: Any, asked: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, **asked)
    assert caught.value.param == param
    assert words in str(caught.value)


def test_a_stream_that_is_refused_is_no_stream(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "stream": True}
    with pytest.raises(openai.BadRequestError, match="ignore_eos and regex"):
        client.chat.completions.create(**asked, extra_body={"regex": "a", "ignore_eos": True})
