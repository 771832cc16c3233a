"""The clients that are installed run their own examples against a server, with the model made for them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serve.server import running_server

from scripts import check_clients
from scripts.calling_model import write_calling_model

ROOT = Path(__file__).resolve().parents[2]
ASKED: dict[str, Any] = {"model": "calling", "messages": [{"role": "user", "content": "What time is it?"}]}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = write_calling_model(tmp_path_factory.mktemp("model") / "calling")
    with running_server(model, "--context", 4096) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_the_installed_clients_pass() -> None:
    """And those that are not installed are named."""
    command = [sys.executable, "-m", "scripts.check_clients", "openai", "dspy"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"| openai | {openai.__version__} | tools, tools streamed, structured, responses, " in ended.stdout


def test_a_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "try_it.py"
    report = {"package": "it", "version": "1", "results": {"a": "passed", "b": "failed: x"}}
    for text, said, code in (
        (f"print({json.dumps(report)!r})", "it, b failed: x", 1),
        ("1 / 0", "ZeroDivisionError", 1),
        ("import no_such_module", "not installed: no_such_module", 0),
    ):
        program.write_text(text)
        monkeypatch.setitem(check_clients.PROGRAMS, "it", program)
        monkeypatch.setattr(sys, "argv", ["check_clients", "it"])
        assert check_clients.main() == code
        assert said in "".join(capsys.readouterr())


def test_the_model_calls_each_tool_once_and_then_answers(client: Any) -> None:
    tools = [tool("get_time"), tool("get_weather", city={"type": "string"}, days={"type": "integer", "minimum": 1})]
    talk: list[Any] = list(ASKED["messages"])
    for name, arguments in (("get_time", "{}"), ("get_weather", '{"city":"a","days":7}')):
        choice = client.chat.completions.create(**{**ASKED, "messages": talk}, tools=tools).choices[0]
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments, choice.finish_reason) == (name, arguments, "tool_calls")
        talk += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": f"{name} said 5"}]
    answer = client.chat.completions.create(**{**ASKED, "messages": talk}, tools=tools).choices[0]
    assert (answer.message.content, answer.message.tool_calls) == ("I read: get_weather said 5", None)


def test_without_tools_it_answers(client: Any) -> None:
    for more in ({}, {"tools": [tool("get_time")], "tool_choice": "none"}, {"temperature": 2.0, "seed": 5}):
        answer = client.chat.completions.create(**ASKED, **more).choices[0].message
        assert (answer.content, answer.tool_calls) == ("I read: What time is it?", None)


def test_an_answer_may_be_held_besides_the_tools(client: Any) -> None:
    """A call comes first; after its result the answer fits the format; a call that must come comes all the same."""
    schema = tool("a", a={"type": "integer"})["function"]["parameters"]
    held = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked = {**ASKED, "tools": [tool("get_time")], "response_format": held}
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.content is None
    talk = [*ASKED["messages"], message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}]
    answer = client.chat.completions.create(**{**asked, "messages": talk}).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == ('{"a":7}', None, "stop")
    must = client.chat.completions.create(**{**asked, "messages": talk}, tool_choice="required").choices[0].message
    assert [call.function.name for call in must.tool_calls] == ["get_time"]


def test_every_client_has_a_program() -> None:
    assert set(check_clients.PROGRAMS) == {
        *("ai", "dspy", "instructor", "langchain", "litellm"),
        *("llama_index", "openai", "openai_agents", "pydantic_ai", "smolagents"),
    }
