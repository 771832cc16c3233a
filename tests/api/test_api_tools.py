"""Held calls of drawn tools in every form, valid by jsonschema; and what `chat` gives with tools."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tool_models import TEMPLATES, TIME, tool, write_tool_model

import llmcli

CALLS_OF_A_FORM = 35
ASKED: dict[str, Any] = {"max_new_tokens": 600, "logprobs": False}


@pytest.fixture(scope="module", params=TEMPLATES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[llmcli.Model]:
    folder = write_tool_model(tmp_path_factory.mktemp("models") / request.param, request.param)
    with llmcli.load(folder, device="cpu", rows=8) as model:
        yield model


def drawn_value(rng: random.Random, depth: int) -> dict[str, Any]:
    """A schema whose values are short, as a random model's strings have no end."""
    kinds = [
        {"type": "integer", "minimum": -9, "maximum": rng.randint(0, 999)},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["number", "null"], "multipleOf": 1, "minimum": 0, "maximum": 99},
        {"enum": ["red", 'a"b', "é\n", 3, None, True]},
        {"const": "x"},
        {"type": "string", "maxLength": rng.randint(0, 6)},
        {"type": "string", "pattern": "^[a-c]{1,4}$"},
    ]
    if depth:
        kinds += [
            {"type": "array", "items": drawn_value(rng, depth - 1), "maxItems": rng.randint(0, 2)},
            {**drawn_object(rng, depth - 1), "additionalProperties": False},
            {"anyOf": [drawn_value(rng, depth - 1), {"type": "null"}]},
            {"$ref": "#/$defs/colour"},
        ]
    return rng.choice(kinds)


def drawn_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["city", "n", "größe", "a b", "x1", "class", "when"], rng.randint(0, 4))
    properties = {name: drawn_value(rng, depth) for name in names}
    return {"type": "object", "properties": properties, "required": [name for name in names if rng.random() < 0.5]}


def drawn_tools(rng: random.Random) -> list[dict[str, Any]]:
    tools = [TIME, tool("open", {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2})]
    for index in range(rng.randint(1, 3)):
        schema = {**drawn_object(rng, 2), "$defs": {"colour": {"enum": ["red", "green"]}}}
        tools.append(tool(f"tool_{index}.x-{index}" if index else "tool_0", schema))
    return rng.sample(tools, len(tools))


def test_held_calls_are_valid(model: llmcli.Model) -> None:
    """Whatever a random model would write. A text that was cut is no valid call, and does not count."""
    found = Counter[str]()
    for seed in range(2 * CALLS_OF_A_FORM):
        rng = random.Random(f"{seed}")
        tools = drawn_tools(rng)
        name = rng.choice(tools)["function"]["name"]
        choice: Any = rng.choice(["required", {"type": "function", "function": {"name": name}}])
        answers = model.chat(
            "?", tools=tools, tool_choice=choice, parallel_tool_calls=seed % 2 == 0, seed=seed, n=2, **ASKED
        )
        for answer in answers:
            if answer.finish_reason != "eos":
                continue
            assert answer.is_complete
            assert answer.tool_calls
            assert answer.message["content"] is None
            assert len(answer.tool_calls) == 1 or seed % 2 == 0
            for call in answer.tool_calls:
                function = call["function"]
                (schema,) = (
                    one["function"].get("parameters", {"maxProperties": 0})
                    for one in tools
                    if one["function"]["name"] == function["name"]
                )
                jsonschema.validate(json.loads(function["arguments"]), schema)
                assert choice == "required" or function["name"] == name
                found[function["name"]] += 1
        if found.total() >= CALLS_OF_A_FORM:
            break
    assert found.total() >= CALLS_OF_A_FORM
    assert len(found) > 3
