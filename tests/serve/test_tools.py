"""Tool calls over the protocol: OpenAI's own client, streams cut anywhere, the next turn, refusals by name."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from here import run_here
from paged import make_request
from server import ServerProcess, running_server
from test_tool_calls import CALLS, NAMES, TEXTS
from tool_models import TIME, WEATHER, tool, write_tool_model

from llmcli.engine.chat_events import Start
from llmcli.engine.request import Finished, FinishReason, Timings, Token
from llmcli.serve.answers import ChatAnswer
from llmcli.tokenizer.tool_offer import Offer
from llmcli.tool_calls import named_form
from llmcli.tools import Tools

MESSAGES = [{"role": "user", "content": "Wie ist das Wetter in Wien?"}]
ASKED: dict[str, Any] = {"model": "caller", "messages": MESSAGES, "tools": [WEATHER, TIME], "max_tokens": 500}
ONE: dict[str, Any] = {**ASKED, "parallel_tool_calls": False}  # a random model may go on calling
OTHER_FORMS = {"mistral": 258, "llama": 260}  # the token of each one's mark
TIMINGS = Timings(1, 0.0, 0.0, 0, 0.0)
END = Finished(0, "", "", (), "eos", TIMINGS)


def offer_of(form: str) -> Offer:
    return Offer(Tools(tuple(tool(name) for name in NAMES), NAMES), named_form(form), is_single=False)


def answer_in(
    form: str, parts: Sequence[str], reason: FinishReason = "eos", start: Start = "answer"
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The choice of a text that comes in these tokens, and the choices of its stream's pieces."""
    request, offer = make_request([97], 7), offer_of(form)
    whole, streamed = (ChatAnswer("m", [request], None, start=start, offer=offer) for _ in range(2))  # type: ignore[arg-type]
    pieces = []
    for event in [*(Token(0, 97, part) for part in parts), Finished(0, "", "", (), reason, TIMINGS)]:
        for answer in (whole, streamed):
            answer.take(0, event)
        pieces += [json.loads(piece)["choices"][0] for piece in streamed.pieces()]
    return whole.whole()["choices"][0], pieces


def joined(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream's deltas, put together as clients do it: by index, the id and the name first."""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(one.get("content") or "" for one in deltas)}
    if reasoning := "".join(one.get("reasoning_content") or "" for one in deltas):
        message["reasoning_content"] = reasoning
    calls: list[dict[str, Any]] = []
    for delta in [call for one in deltas for call in one.get("tool_calls") or ()]:
        if delta["index"] == len(calls):
            assert delta["type"] == "function"
            calls.append({"id": delta["id"], "type": "function", "function": {**delta["function"], "arguments": ""}})
        else:
            assert set(delta) == {"index", "function"}
            assert set(delta["function"]) == {"arguments"}
            assert delta["index"] == len(calls) - 1
        calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    return message


def test_the_end_of_a_text_comes_after_its_calls() -> None:
    """For a slow client pieces are joined."""
    events = [Token(0, 97, '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'), END]
    answer = ChatAnswer("m", [make_request([97], 7)], None, offer=offer_of("hermes"))  # type: ignore[arg-type]
    for event in events:
        answer.take(0, event)
    first, last = (json.loads(piece)["choices"][0] for piece in answer.pieces())
    assert first["delta"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (first["finish_reason"], last["delta"], last["finish_reason"]) == (None, {}, "tool_calls")
    assert answer.pieces() == []


@pytest.mark.parametrize(("form", "text"), [*((form, text) for form, text, *_ in CALLS), *TEXTS])
def test_a_stream_is_the_whole_answer_wherever_the_text_ends(form: str, text: str) -> None:
    """Half a call too: at every character, in tokens of one character and of several."""
    for end in range(len(text) + 1):
        for size in (1, 7):
            parts = [text[first : min(first + size, end)] for first in range(0, end, size)]
            choice, pieces = answer_in(form, parts, "length" if end < len(text) else "eos")
            assert joined([piece["delta"] for piece in pieces]) == choice["message"]
            assert pieces[0]["delta"]["role"] == "assistant"
            assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
            reason = "length" if end < len(text) else "tool_calls" if "tool_calls" in choice["message"] else "stop"
            assert pieces[-1]["finish_reason"] == choice["finish_reason"] == reason


def test_reasoning_may_speak_of_calls() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    for start, begin in (("undecided", "<think>\n"), ("reasoning", "")):
        text = f"{begin}I could write {call}\n</think>\n\nSo:\n{call}"
        choice, pieces = answer_in("hermes", text, start=start)  # type: ignore[arg-type]
        message = choice["message"]
        assert joined([piece["delta"] for piece in pieces]) == message
        assert (message["content"], message["reasoning_content"]) == ("So:", f"I could write {call}")
        assert [one["function"] for one in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_tool_model(tmp_path_factory.mktemp("models") / "caller", "hermes")
    with running_server(folder, "--rows", 4) as server:
        yield server


@pytest.fixture(scope="module", params=OTHER_FORMS)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, int]]:
    """A client of a model whose mark is a special token, and that token."""
    folder = write_tool_model(tmp_path_factory.mktemp("models") / "caller", request.param)
    with running_server(folder, "--rows", 4) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        yield client, OTHER_FORMS[request.param]


def check(choice: Any, names: Sequence[str] = ("get_weather", "get_time")) -> None:
    """A choice of calls that are valid."""
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    for call in choice.message.tool_calls:
        assert call.function.name in names
        schema = WEATHER["function"]["parameters"] if call.function.name == "get_weather" else {"maxProperties": 0}
        jsonschema.validate(json.loads(call.function.arguments), schema)


def streamed(client: Any, **asked: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The message and the finish reason of each choice of a stream."""
    deltas: list[list[dict[str, Any]]] = [[] for _ in range(asked.get("n", 1))]
    reasons = [""] * len(deltas)
    for piece in client.chat.completions.create(**asked, stream=True):
        for choice in piece.choices:
            deltas[choice.index].append(choice.delta.to_dict())
            reasons[choice.index] += choice.finish_reason or ""
    return [joined(one) for one in deltas], reasons


def test_calls_that_must_come(client: Any) -> None:
    choices = client.chat.completions.create(**ONE, tool_choice="required", seed=1, n=4).choices
    for choice in choices:
        check(choice)
    assert streamed(client, **ONE, tool_choice="required", seed=1, n=4) == (
        [choice.message.to_dict() for choice in choices],
        ["tool_calls"] * 4,
    )
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 4
    named = {"type": "function", "function": {"name": "get_time"}}
    for choice in client.chat.completions.create(**ONE, tool_choice=named, seed=1, n=4).choices:
        check(choice, ["get_time"])


def test_one_call_or_several(client: Any) -> None:
    def counts(**more: Any) -> set[int]:
        asked = {**ASKED, "tool_choice": "required", "n": 12, "seed": 2, **more}
        return {len(choice.message.tool_calls or ()) for choice in client.chat.completions.create(**asked).choices}

    assert max(counts()) > 1
    assert max(counts(parallel_tool_calls=True)) > 1
    assert counts(parallel_tool_calls=False) == {1}


def test_the_model_decides(client: Any) -> None:
    """A bias towards the mark makes it call, one against it makes it tell."""
    for bias, calls in ((100, True), (-100, False)):
        (choice,) = client.chat.completions.create(**ONE, seed=3, logit_bias={"261": bias}).choices
        if calls:
            check(choice)
        else:
            assert choice.message.tool_calls is None
            assert choice.message.content


def test_no_tools_are_shown_if_none_may_be_called(client: Any) -> None:
    asked = {**ASKED, "seed": 3, "max_tokens": 20}
    without = client.chat.completions.create(**{**asked, "tools": []})
    none = client.chat.completions.create(**asked, tool_choice="none")
    assert none.usage.prompt_tokens == without.usage.prompt_tokens
    assert none.choices == without.choices


def test_the_next_turn(client: Any) -> None:
    """The client's own message comes back with the result of each call."""
    (choice,) = client.chat.completions.create(**ONE, tool_choice="required", seed=1).choices
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "20"}]}
        for call in choice.message.tool_calls
    ]
    messages = [*MESSAGES, choice.message, *results]
    answer = client.chat.completions.create(**{**ASKED, "messages": messages, "max_tokens": 5}, seed=1)
    assert answer.usage.prompt_tokens_details.cached_tokens > 100
    assert answer.choices[0].finish_reason == "length"


def test_marks_that_are_special_tokens(other: tuple[Any, int]) -> None:
    """They begin calls, and are in no content."""
    client, mark = other
    choices = client.chat.completions.create(**ONE, tool_choice="required", seed=1, n=3).choices
    for choice in choices:
        check(choice)
    messages, _ = streamed(client, **ONE, tool_choice="required", seed=1, n=3)
    assert messages == [choice.message.to_dict() for choice in choices]
    (choice,) = client.chat.completions.create(**ONE, seed=3, logit_bias={str(mark): 100}).choices
    check(choice)
    (choice,) = client.chat.completions.create(**{**ONE, "tools": []}, seed=3, logit_bias={str(mark): 100}).choices
    assert (choice.message.content, choice.message.tool_calls) == ("", None)


def test_probabilities_come_along(client: Any) -> None:
    asked: dict[str, Any] = {**ONE, "tool_choice": "required", "seed": 1, "logprobs": True, "top_logprobs": 1}
    (choice,) = client.chat.completions.create(**asked).choices
    text = "".join(token.token for token in choice.logprobs.content)
    assert all(call.function.arguments in text for call in choice.message.tool_calls)
    pieces = [piece.choices[0] for piece in client.chat.completions.create(**asked, stream=True)]
    told = [token for piece in pieces if piece.logprobs for token in piece.logprobs.content]
    assert told == choice.logprobs.content


def test_a_schema_that_cannot_be_held_is_logged(server: ServerProcess, client: Any) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    asked = {**ASKED, "tools": [tool("odd", odd)], "tool_choice": "required", "seed": 1, "max_tokens": 5}
    client.chat.completions.create(**asked)
    server.wait_for_line("1 of the schema's keywords and formats bind nothing")
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].function.parameters: 'uniqueItems'") as caught:
        client.chat.completions.create(**{**asked, "tools": [tool("odd", odd, strict=True)]})
    assert caught.value.param == "tools"


def called(arguments: str) -> list[dict[str, Any]]:
    return [*MESSAGES, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


NAMED = {"type": "function", "function": {"name": "fly"}}


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"tools": 3}, "tools", "tools is 3, expected a list of at most 128 tools such as"),
        ({"tools": [tool(f"f{number}") for number in range(129)]}, "tools", "expected a list of at most 128"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "expected a tool such as"),
        ({"tools": [{**TIME, "strict": True}]}, "tools[0].strict", "'tools[0].strict' is not supported"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "expected 1 to 128 letters, digits"),
        ({"tools": [TIME, TIME]}, "tools[1].function.name", "'get_time' a second time"),
        ({"tools": [tool("f", {"type": "string"})]}, "tools[0].function.parameters.type", "expected 'object'"),
        ({"tools": [tool("f", description=3)]}, "tools[0].function.description", "expected a string"),
        ({"tools": [tool("f", strict="yes")]}, "tools[0].function.strict", "expected true or false"),
        ({"tool_choice": "any"}, "tool_choice", "tool_choice is 'any', expected 'auto', 'none', 'required', or"),
        ({"tool_choice": NAMED}, "tool_choice", "tool_choice names 'fly', expected one of get_weather, get_time"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "'required', and there are no tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "is 1, expected true or false"),
        ({"extra_body": {"regex": "a"}}, "tools", "tools and regex cannot be combined"),
        ({"extra_body": {"ignore_eos": True}}, "tools", "ignore_eos and tools cannot be combined"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]}, "messages[0].tool_call_id", "alone"),
        (
            {
                "messages": [
                    *MESSAGES,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                ]
            },
            "messages[1].tool_calls[0].function.arguments",
            "is '{', which is not valid JSON",
        ),
        (
            {
                "messages": [
                    *MESSAGES,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]},
                ]
            },
            "messages[1].tool_calls[0].function.arguments",
            "is 3, expected a JSON object in a string",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(client: Any, asked: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**ASKED, **asked})
    assert (caught.value.param, words in caught.value.message) == (param, True), caught.value.message


def test_a_chat_with_a_server_calls_as_one_here(tmp_path: Path) -> None:
    folder, tools = write_tool_model(tmp_path / "caller", "mistral"), tmp_path / "tools.json"
    tools.write_text(json.dumps([WEATHER, TIME]))
    one_call = ("--logit-bias", "258=300", "--logit-bias", "93=250", "--logit-bias", "257=200")
    asked = ("--tools", tools, "--message", "Wetter?", "--message", "20 Grad", "--seed", 4)
    here = run_here("chat", folder, *asked, *one_call, "--device", "cpu", LLMCLI_HOME=tmp_path)
    with running_server(folder, *one_call) as server:
        there = run_here("chat", "--server", server.url, *asked, LLMCLI_HOME=tmp_path, LLMCLI_API_KEY=None)
    assert (there.returncode, there.stderr, there.stdout) == (0, "", here.stdout)
    assert len(here.stdout.splitlines()) == 2


def test_a_model_without_tools_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_server() as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(
            openai.BadRequestError, match="the chat template takes no tools; use a model that was"
        ) as caught:
            client.chat.completions.create(**{**ASKED, "model": "storyteller"})
    assert caught.value.param == "tools"
