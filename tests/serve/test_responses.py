"""/v1/responses with OpenAI's own client: the answers of /v1/chat/completions as items, and the events of a stream."""

import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import response_create_params as reference
from paged import make_request
from server import ServerProcess, running_server
from test_openai_client import MESSAGES, MODEL

from llmcli.engine.request import Finished, Timings, Token
from llmcli.serve.bodies import parse_body
from llmcli.serve.refusal import Refusal
from llmcli.serve.responses import ResponsesAnswer, ResponsesBody
from llmcli.tokenizer.tool_offer import Offer
from llmcli.tool_calls import named_form
from llmcli.tools import Tools

ASKED = MESSAGES[0]["content"]
TEMPLATE = (
    "{{ bos_token }}{% for one in tools or [] %}{{ one | tojson }}\n{% endfor %}{% for one in messages %}"
    "{{ one.role }}: {% if one.reasoning_content %}<think>{{ one.reasoning_content }}</think>{% endif %}"
    "{{ one.content }}{% for call in one.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{{ one.tool_call_id }}\n{% endfor %}assistant:"
)
TOOLS_TEMPLATE = re.sub(r"{% if one.reasoning_content %}.*?{% endif %}", "", TEMPLATE)
THOUGHT = r"<think>\n(Yes|No)\n</think>\n\nThe [a-z]{3,5}\."  # a regular expression
PARAMETERS = {
    "type": "object",
    "properties": {"who": {"enum": ["snail", "owl"]}, "far": {"type": "boolean"}},
    "required": ["who", "far"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "look_for", "description": "Look.", "parameters": PARAMETERS, "strict": True}
CHAT_TOOL: Any = {"type": "function", "function": {name: one for name, one in TOOL.items() if name != "type"}}


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose template knows reasoning and tools."""
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    with running_server("--chat-template", path) as server:
        yield server


@pytest.fixture(scope="module")
def calling(caller: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{caller.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def doer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The client of a server whose template knows tools alone: its calls come at once."""
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TOOLS_TEMPLATE)
    with running_server("--chat-template", path) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def without_ids(response: Any) -> dict[str, Any]:
    """What two answers to the same question share."""
    keys: dict[str, Any] = response.to_dict()
    output = [{name: one for name, one in item.items() if name != "id"} for item in keys["output"]]
    for item in output:
        for part in item.get("content", []):
            part.pop("parsed", None)
        item.pop("parsed_arguments", None)
    times = ("id", "created_at", "completed_at", "usage")
    return {**{name: one for name, one in keys.items() if name not in times}, "output": output}


def test_the_text_is_that_of_chat_completions(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0.8, "extra_body": {"seed": 3, "top_k": 20}}
    system: Any = [{"role": "system", "content": "Be kind."}]
    chat = client.chat.completions.create(messages=[*system, *MESSAGES], max_completion_tokens=12, **asked)
    for given in (ASKED, MESSAGES, [{"type": "message", "role": "user", "content": [_part("input_text", ASKED)]}]):
        answer = client.responses.create(input=given, instructions="Be kind.", max_output_tokens=12, **asked)
        assert answer.output_text == chat.choices[0].message.content
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (answer.seed, answer.store, answer.instructions, answer.temperature) == (3, False, "Be kind.", 0.8)
    whole = client.responses.create(model=MODEL, input=ASKED, extra_body={"choice": ["Yes."]})
    assert (whole.status, whole.output_text, whole.output[0].status) == ("completed", "Yes.", "completed")
    assert whole.incomplete_details is whole.error is None


def _part(kind: str, text: str) -> dict[str, str]:
    return {"type": kind, "text": text}


def test_the_events_of_a_stream(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": ASKED, "max_output_tokens": 9, "extra_body": {"seed": 4}}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == whole.output_text
    assert events[0].response.status == events[1].response.status == "in_progress"
    assert without_ids(events[-1].response) == without_ids(whole)
    assert events[-1].response.output[0] == events[-2].item
    assert {event.item_id for event in events[3:-2]} == {events[-2].item.id}


def test_a_stream_is_server_sent_events_with_names(server: ServerProcess, client: Any) -> None:
    asked = {"model": MODEL, "input": ASKED, "max_output_tokens": 2, "stream": True}
    with client.responses.with_streaming_response.create(**asked) as response:
        *events, rest = response.read().decode().split("\n\n")
    assert rest == ""
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


class Hero(pydantic.BaseModel):
    """What a program wants to know."""

    name: Literal["Tom", "Lily"]
    is_brave: bool


def test_structured_output(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": ASKED, "text_format": Hero, "extra_body": {"seed": 2}}
    parsed = client.responses.parse(**asked)
    assert isinstance(parsed.output_parsed, Hero)
    assert parsed.text.format.name == "Hero"
    with client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert (text, final.output_parsed) == (parsed.output_text, parsed.output_parsed)
    text = {"format": {"type": "json_object"}}
    assert client.responses.create(model=MODEL, input=ASKED, max_output_tokens=5, text=text).output_text[0] == "{"


def test_reasoning_is_an_item(calling: Any) -> None:
    """It can be sent back, and the template gets it."""
    asked: dict[str, Any] = {"model": MODEL, "extra_body": {"seed": 1, "regex": THOUGHT}}
    answer = calling.responses.create(input=ASKED, **asked)
    thought, message = answer.output
    assert (thought.type, thought.summary, message.type) == ("reasoning", [], "message")
    assert thought.content[0].text in ("Yes", "No")
    assert re.fullmatch(r"The [a-z]{3,5}\.", answer.output_text)
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    events = list(calling.responses.create(input=ASKED, **asked, stream=True))
    assert without_ids(events[-1].response) == without_ids(answer)
    for kind, text in (("reasoning_text", thought.content[0].text), ("output_text", answer.output_text)):
        deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]
        assert "".join(deltas) == text
        assert [event.text for event in events if event.type == f"response.{kind}.done"] == [text]
    indexes = [event.output_index for event in events if hasattr(event, "output_index")]
    assert indexes == sorted(indexes)
    more: Any = [*MESSAGES, *(item.to_dict() for item in answer.output), {"role": "user", "content": "Why?"}]
    said = {"role": "assistant", "content": answer.output_text, "reasoning_content": thought.content[0].text}
    assert_prompt(calling, more, [*MESSAGES, said, more[-1]])


def assert_prompt(client: Any, items: Any, messages: Any, **asked: Any) -> None:
    """These items give the prompt of these messages; its text depends on all of it."""
    limits = {"max_output_tokens": 12, "extra_body": {"seed": 1}}
    told = client.responses.create(model=MODEL, input=items, **limits, **asked)
    limits = {"max_tokens": 12, "extra_body": {"seed": 1}}
    expected = client.chat.completions.create(model=MODEL, messages=messages, **limits)
    assert told.usage.input_tokens == expected.usage.prompt_tokens
    assert told.output_text == expected.choices[0].message.content


def test_functions_are_called(doer: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": ASKED, "tools": [TOOL], "extra_body": {"seed": 5}}
    for choice in ("required", {"type": "function", "name": "look_for"}):
        answer = doer.responses.create(**asked, tool_choice=choice, parallel_tool_calls=False)
        (call,) = answer.output
        chat = {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False, "seed": 5}
        told = doer.chat.completions.create(model=MODEL, messages=MESSAGES, **chat).choices[0].message.tool_calls[0]
        assert (call.type, call.call_id, call.name) == ("function_call", told.id, "look_for")
        assert call.arguments == told.function.arguments
        assert json.loads(call.arguments).keys() == {"who", "far"}
        assert (answer.tools[0].name, answer.parallel_tool_calls) == ("look_for", False)
    events = list(doer.responses.create(**asked, tool_choice="required", parallel_tool_calls=False, stream=True))
    names = [event.type.removeprefix("response.") for event in events]
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == call.arguments
    assert names[2] == "output_item.added"
    assert names[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert (events[2].item.name, events[2].item.arguments, events[-3].arguments) == ("look_for", "", call.arguments)
    assert events[-1].response.output[0] == events[-2].item
    assert [item["arguments"] for item in without_ids(events[-1].response)["output"]] == [call.arguments]
    with doer.responses.stream(**asked, tool_choice="required", parallel_tool_calls=False) as stream:
        assert stream.get_final_response().output[0].arguments == call.arguments


def test_functions_and_structured_output(doer: Any) -> None:
    """An answer is calls, or a text that the schema holds."""
    asked: dict[str, Any] = {"model": MODEL, "input": ASKED, "tools": [TOOL], "parallel_tool_calls": False}
    kinds = set()
    for seed in range(6):
        answer = doer.responses.parse(**asked, text_format=Hero, extra_body={"seed": seed})
        (item,) = answer.output
        kinds.add(item.type)
        if item.type == "message":
            assert isinstance(answer.output_parsed, Hero)
        else:
            assert json.loads(item.arguments).keys() == {"who", "far"}
    assert kinds == {"message", "function_call"}
    answer = doer.responses.parse(**asked, text_format=Hero, tool_choice="none")
    assert isinstance(answer.output_parsed, Hero)


def test_calls_that_begin_as_json_go_without_a_format(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TOOLS_TEMPLATE.replace("<tool_call>", "arguments").replace("</tool_call>", ""))
    with running_server("--chat-template", template) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        asked: dict[str, Any] = {"model": MODEL, "input": ASKED, "tools": [TOOL], "parallel_tool_calls": False}
        words = "tools and text.format.schema cannot be combined in this model's form of tool calls"
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            client.responses.parse(**asked, text_format=Hero)
        assert caught.value.param == "tools"
        assert client.responses.create(**asked, tool_choice="required").output[0].type == "function_call"


def test_calls_and_their_outputs_reach_the_template(calling: Any) -> None:
    """The items of a turn of the model are one message."""

    def call(call_id: str, arguments: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": call_id, "name": "look_for", "arguments": arguments}

    def called(call_id: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "look_for", "arguments": arguments}}

    def output(call_id: str, value: Any) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": call_id, "output": value}

    thought: dict[str, Any] = {"type": "reasoning", "summary": [], "content": [_part("reasoning_text", "Hm.")]}
    said = {"type": "message", "role": "assistant", "content": [{**_part("output_text", "I look."), "annotations": []}]}
    empty: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": "a"}
    two = [call("a1", '{"who": "owl"}'), call("a2", "{}")]
    outputs = [output("a1", "There."), output("a2", [_part("input_text", "Not "), _part("input_text", "there.")])]
    calls = [called("a1", '{"who": "owl"}'), called("a2", "{}")]
    told = [
        {"role": "tool", "tool_call_id": "a1", "content": "There."},
        {"role": "tool", "tool_call_id": "a2", "content": "Not there."},
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    for items, message in (
        (two, turn),
        ([thought, *two], {**turn, "reasoning_content": "Hm."}),
        ([thought, said, *two], {**turn, "content": "I look.", "reasoning_content": "Hm."}),
        ([empty, *two], turn),
        ([empty, thought, *two], {**turn, "reasoning_content": "Hm."}),
    ):
        assert_prompt(calling, [*MESSAGES, *items, *outputs], [*MESSAGES, message, *told])
    reasoned = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    assert_prompt(calling, [*MESSAGES, empty, *MESSAGES, thought], [*MESSAGES, *MESSAGES, reasoned])
    assert_prompt(
        calling, [*MESSAGES, thought, said, thought], [*MESSAGES, {**reasoned, "content": "I look."}, reasoned]
    )
    first: Any = [{"role": "developer", "content": "Look."}, *MESSAGES]
    joined = [{"role": "system", "content": "Be kind.\n\nLook."}, *MESSAGES]
    assert_prompt(calling, first, joined, instructions="Be kind.")


# By key: values that are served, and values that are refused. A null is always served.
KEYS: dict[str, tuple[list[Any], list[Any]]] = {
    "access_programs": ([], [{}]),
    "background": ([False], [True]),
    "background_options": ([], [{}]),
    "context_management": ([], [[]]),
    "conversation": ([], ["conv_1", {"id": "conv_1"}]),
    "image": ([], [{}]),
    "include": ([[], ["reasoning.encrypted_content"]], [["message.output_text.logprobs"], "all"]),
    "input": (["Hi", MESSAGES], [[], 5, [5], {}]),
    "instructions": (["Be kind.", ""], [5, []]),
    "max_output_tokens": ([1, 9], [0, "9"]),
    "max_tool_calls": ([], [1]),
    "metadata": ([{}, {"a": "b"}], ["a"]),
    "model": ([MODEL], [5]),
    "moderation": ([], [{}]),
    "parallel_tool_calls": ([True, False], ["yes"]),
    "previous_response_id": ([], ["resp_1"]),
    "prompt": ([], [{"id": "pmpt_1"}]),
    "prompt_cache_key": (["a"], [5]),
    "prompt_cache_options": ([{"mode": "implicit"}], ["implicit"]),
    "prompt_cache_retention": (["24h"], [24]),
    "reasoning": ([{}, {"effort": "low", "summary": "auto"}], ["low"]),
    "safety_identifier": (["a"], [5]),
    "service_tier": (["auto", "default"], ["flex"]),
    "store": ([False], [True]),
    "stream": ([False, True], ["yes"]),
    "stream_options": ([{"include_obfuscation": False}], [{"include_obfuscation": True}, 5]),
    "temperature": ([0, 2], [-1, "1"]),
    "text": (
        [{}, {"format": {"type": "text"}, "verbosity": "low"}, {"format": {"type": "json_object"}}],
        ["text", {"format": {"type": "xml"}}, {"shape": {}}, {"format": {"type": "json_schema", "name": "a"}}],
    ),
    "tool_choice": (["none", "auto"], ["required", {"type": "function", "name": "f"}]),
    "tools": (
        [[], [TOOL], [{"type": "function", "name": "f", "description": None, "defer_loading": False}]],
        [[{"type": "web_search"}], [5], {}, [{**TOOL, "x": 1}]],
    ),
    "top_logprobs": ([0], [3]),
    "top_p": ([0, 1], [1.1]),
    "truncation": (["disabled"], ["auto"]),
    "user": (["ann"], [5]),
}


def test_the_table_has_every_key_of_the_reference() -> None:
    streaming, whole = reference.ResponseCreateParamsStreaming, reference.ResponseCreateParamsNonStreaming
    assert set(KEYS) == {*typing.get_type_hints(streaming), *typing.get_type_hints(whole)}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_served_or_refused_by_its_name(key: str) -> None:
    served, refused = KEYS[key]
    for value in [*served, *([] if key == "input" else [None])]:
        parse_body(ResponsesBody, json.dumps({"input": "Hi", key: value}).encode())
    for value in refused:
        with pytest.raises(Refusal) as caught:
            parse_body(ResponsesBody, json.dumps({"input": "Hi", key: value}).encode())
        assert caught.value.status == 400
        assert (caught.value.param or "").replace("[", ".").split(".")[0] == key
        assert key in caught.value.message
        assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({}, "input is missing", "input"),
        ({"input": "a", "messages": MESSAGES}, "'messages' is not supported", "messages"),
        ({"input": "a", "n": 2}, "'n' is not supported", "n"),
        ({"input": "a", "max_tokens": 2}, "'max_tokens' is not supported", "max_tokens"),
        ({"input": "a", "echoed": {}}, "'echoed' is not supported", "echoed"),
        ({"input": "a", "store": True}, "store is true, expected false, as nothing is stored here", "store"),
        ({"input": "a", "previous_response_id": "r"}, "send the whole conversation in input", "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0] is an item_reference, and", "input[0].type"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type is 'web_search_call', expected", "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0] has no content", "input[0].content"),
        ({"input": [{"content": "a"}]}, "input[0] has no role", "input[0].role"),
        ({"input": [{"role": "fox", "content": "a"}]}, "input[0].role is 'fox'", "input[0].role"),
        ({"input": [{"role": "tool", "content": "a"}]}, "function_call_output instead", "input[0].role"),
        ({"input": [{"role": "user", "content": "a", "x": 1}]}, "'input[0].x' is not supported", "input[0].x"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            "input[0].content[0] is 'input_image', expected a part of type input_text",
            "input[0].content[0]",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
            "input[0].content[0].text is 5",
            "input[0].content[0].text",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]},
            "input[0].arguments is '{', which is not valid JSON",
            "input[0].arguments",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id is null", "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output is null", "input[0].output"),
        ({"input": [{"type": "reasoning", "content": "Hm."}]}, "input[0].content is 'Hm.'", "input[0].content"),
        ({"input": "a", "tools": [{"type": "function", "name": "f g"}]}, "tools[0].name is 'f g'", "tools[0].name"),
        ({"input": "a", "tools": [TOOL, TOOL]}, "tools[1].name is 'look_for' a second time", "tools[1].name"),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "names 'f'", "tool_choice"),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "mcp"}}, '"function", "name": ...}', "tool_choice"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": {}, "strict": 1}}},
            "text.format.strict is 1, expected true or false",
            "text",
        ),
        (
            {"input": "a", "regex": "a", "text": {"format": {"type": "json_object"}}},
            "text and regex cannot be combined",
            "text",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_the_words_of_this_form(body: Any, words: str, param: str) -> None:
    with pytest.raises(Refusal) as caught:
        parse_body(ResponsesBody, json.dumps(body).encode())
    assert words in caught.value.message
    assert caught.value.param == param
    assert "function.name" not in caught.value.message


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"input": "snail " * 3000}, "input", "shorten the prompt"),
        ({"input": "Hi", "max_output_tokens": 2000}, "max_output_tokens", "request at most"),
        (
            {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"uniqueItems": True}}}},
            "text",
            "text.format.schema: 'uniqueItems' at # cannot be held",
        ),
        ({"input": "Hi", "tools": [TOOL]}, "tools", "tools"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(client: Any, asked: Any, param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, **asked)
    assert caught.value.param == param
    assert words in str(caught.value)


def test_nothing_is_stored(client: Any) -> None:
    answer = client.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(answer.id)


def test_a_stream_that_fails_says_so_to_the_client() -> None:
    with running_server("--timeout", 1.5) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        events = client.responses.create(model=MODEL, input="Hi", stream=True, extra_body={"ignore_eos": True})
        with pytest.raises(openai.APIError, match="the answer took longer than 1.5 s"):
            assert len(list(events)) > 3


def test_the_items_are_the_same_however_a_text_comes() -> None:
    """A text that follows a call is an item of its own, and an empty answer is an empty message."""
    body = parse_body(ResponsesBody, b'{"input": "Hi"}')

    def events_of(texts: list[str], reason: Any = "eos", *, is_joined: bool = False) -> list[dict[str, Any]]:
        offer = Offer(Tools((CHAT_TOOL,), ("look_for",)), named_form("hermes"), is_single=False)
        requests: Any = [make_request([97], 7)]
        answer = ResponsesAnswer(MODEL, requests, None, body=body, start="undecided", offer=offer)
        events: list[dict[str, Any]] = []
        for event in [
            *(Token(0, 97, text) for text in texts),
            Finished(0, "", "", (), reason, Timings(1, 0.0, 0.0, 0, 0.0)),
        ]:
            answer.take(0, event)
            if is_joined and isinstance(event, Token):
                continue
            events += [json.loads(piece) for piece in answer.pieces()]
        assert answer.pieces() == []
        assert answer.whole()["output"] == events[-1]["response"]["output"]
        assert [event["response"]["status"] for event in events[:2]] == ["in_progress", "in_progress"]
        return events

    *_, last = events_of([])
    ((item,), status) = last["response"]["output"], last["response"]["status"]
    assert (item["type"], item["content"][0]["text"], status) == ("message", "", "completed")
    *_, last = events_of(["<think>Hm"], "length")
    ((item,), status) = last["response"]["output"], last["response"]["status"]
    assert (item["type"], item["status"], status) == ("reasoning", "incomplete", "incomplete")
    *_, last = events_of(["<think>", "Hm", "</think>", "Yes", "."])
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "completed"]
    *_, last = events_of(["<think>", "Hm", "</think>", "Yes"], "length", is_joined=True)
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]
    call = '<tool_call>{"name": "look_for", "arguments": {"far": true}}</tool_call>'
    whole = f"<think>Hm</think>I look.{call}{call}Done."
    for texts in ([*whole], [*f"{call}Done."], [call[:50], f"{call[50:]}Done."], [whole[:-20], whole[-20:]]):
        *events, last = events_of(texts)
        items = last["response"]["output"]
        assert [item["type"] for item in items[-2:]] == ["function_call", "message"]
        assert items[-1]["content"][0]["text"] == "Done."
        assert {item["arguments"] for item in items if item["type"] == "function_call"} == {'{"far": true}'}
        assert items == [event["item"] for event in events if event["type"] == "response.output_item.done"]
