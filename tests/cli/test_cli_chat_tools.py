"""`llmcli chat --tools`: calls are shown, and what comes next are their results; refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from docs_schemas import check_docs_schema
from results import Llmcli
from scripted_talk import ScriptedEditor
from tool_models import TIME, WEATHER, tool, write_tool_model

from llmcli.cli import chat as chat_module

# The mark, and then the end of the list, are likelier than all else: each answer is one call.
ONE_CALL = ("--logit-bias", "258=300", "--logit-bias", "93=250", "--logit-bias", "257=200", "--seed", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_model(tmp_path_factory.mktemp("models") / "caller", "mistral")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path / "home"))
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([WEATHER, TIME]))
    return path


def shown(call: dict[str, Any]) -> str:
    return f"{call['function']['name']}({call['function']['arguments']})"


def test_the_next_message_is_the_result(llmcli: Llmcli, model: Path, tools: Path) -> None:
    asked = ("chat", model, "--tools", tools, *ONE_CALL, "--message", "Wetter?", "--message", "20 Grad")
    told = json.loads(llmcli(*asked, "--json").stdout)
    check_docs_schema("chat", told)
    first, second = told["turns"]
    (call,) = first["tool_calls"]
    assert (first["answer"], first["finish_reason"], first["is_complete"]) == ("", "eos", True)
    assert call["function"]["name"] in ("get_weather", "get_time")
    prompt = bytes(token_id for token_id in second["prompt_token_ids"] if token_id < 256).decode()
    assert "result: 20 Grad\nassistant: " in prompt
    assert f'"name": "{call["function"]["name"]}"' in prompt
    assert WEATHER["function"]["description"] in prompt
    lines = llmcli(*asked).stdout.splitlines()
    assert lines == [shown(turn["tool_calls"][0]) for turn in told["turns"]]


def test_a_person_types_the_result(llmcli: Llmcli, model: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And may take it back; `/history` shows the call."""
    editor = ScriptedEditor(["Wetter?", "20 Grad", "/undo", "/undo", "Hallo", "/history"])
    monkeypatch.setattr(chat_module.ConversationOptions, "is_interactive", property(lambda options: True))
    monkeypatch.setattr(chat_module, "refuse_without_terminal", lambda options, as_json: None)
    monkeypatch.setattr(chat_module, "open_prompt_line", lambda path, state: editor)
    result = llmcli("chat", model, "--tools", tools, *ONE_CALL)
    assert result.exit_code == 0
    calls = [line for line in result.stdout.splitlines() if line]
    assert len(calls) == 3
    assert [line for line in result.stderr.splitlines() if line.startswith("type the result of")] == [
        f"type the result of {call}"
        # after the message, its result, and `/undo` of that; after the other message and `/history`
        for call in (calls[0], calls[1], calls[0], calls[2], calls[2])
    ]
    assert f"[1]\nHallo\n\n[answer 1]\n{calls[2]}" in result.stderr
    assert "Removed: 20 Grad" in result.stderr


def test_what_cannot_be_held_is_said_once(llmcli: Llmcli, model: Path, tools: Path) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools.write_text(json.dumps([TIME, tool("odd", odd)]))
    result = llmcli("chat", model, "--tools", tools, *ONE_CALL, "--message", "a", "--message", "b")
    assert result.stderr.count("the arguments of odd are any object") == 1


@pytest.mark.parametrize(
    ("content", "flags", "problem"),
    [
        ("[", (), "is not valid JSON"),
        ("{}", (), "tools is {}, expected a list of at most 128 tools"),
        ('[{"type": "function", "function": {"name": "a b"}}]', (), "tools[0].function.name is 'a b', expected 1 to"),
        ("[]", ("--json-output",), "--tools and --json-output cannot be combined"),
        (None, (), "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_is_refused(
    llmcli: Llmcli, model: Path, tools: Path, content: str | None, flags: tuple[str, ...], problem: str
) -> None:
    if content is None:
        tools.unlink()
    else:
        tools.write_text(content)
    result = llmcli("chat", model, "--tools", tools, *flags, "--message", "Hi")
    assert result.exit_code == 2
    assert problem in result.stderr


def test_a_model_that_takes_no_tools(llmcli: Llmcli, talker: Path, tools: Path) -> None:
    result = llmcli("chat", talker, "--tools", tools, "--message", "Hi")
    assert result.exit_code == 2
    assert "takes no tools; use a model that was trained to call tools" in result.stderr
