"""A schema in `batch`, `chat`, a receipt and its replay: the text of `generate`, and the same message if it is cut."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from results import Result

SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 30}, "hero": {"enum": ["Tom", "Lily"]}},
    "required": ["title", "hero"],
    "additionalProperties": False,
}
PROMPT = "Once upon a time"


@pytest.fixture
def batch(llmcli: Callable[..., Result], tmp_path: Path) -> Callable[..., Result]:
    """Lines through the built-in model, to standard output."""

    def call(lines: list[dict[str, Any]], *options: object) -> Result:
        (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return llmcli("batch", tmp_path / "in.jsonl", "-", "--ordered", "--seed", 1, *options)

    return call


def test_a_line_says_what_generate_says(llmcli: Callable[..., Result], batch: Callable[..., Result]) -> None:
    grammar = 'start: "a" | "b" start'
    held = [{"schema": SCHEMA}, {"regex": "[a-c]{3}"}, {"choice": ["yes", "no"]}, {"json_output": True}]
    lines = [{"prompt": PROMPT, "seed": 1, **one} for one in [*held, {"grammar": grammar}, {}]]
    result = batch(lines, "--rows", 3, "--max-new-tokens", 60)
    assert result.exit_code == 0
    texts = [json.loads(line) for line in result.stdout.splitlines()]
    options = ("--schema", json.dumps(SCHEMA)), ("--regex", "[a-c]{3}"), ("--choice", "yes", "--choice", "no")
    for text, flags in zip(texts, (*options, ("--json-output",)), strict=False):
        alone = llmcli("generate", PROMPT, "--seed", 1, "--max-new-tokens", 60, "--json", *flags)
        assert text["token_ids"] == json.loads(alone.stdout)["token_ids"]
        assert text["is_complete"] == json.loads(alone.stdout)["is_complete"]
    jsonschema.validate(json.loads(texts[0]["text"]), SCHEMA)
    assert set(texts[4]["text"]) <= set("ab")
    assert "is_complete" not in texts[5]


def test_a_line_goes_before_the_option(batch: Callable[..., Result]) -> None:
    lines = [{"prompt": PROMPT}, {"prompt": PROMPT, "regex": "[0-9]{4}"}]
    texts = [json.loads(line)["text"] for line in batch(lines, "--choice", "yes").stdout.splitlines()]
    assert texts[0] == "yes"
    assert texts[1].isdecimal()


def test_openai_s_response_format(batch: Callable[..., Result]) -> None:
    named = {"name": "story", "strict": True, "schema": SCHEMA}
    formats = [{"type": "json_schema", "json_schema": named}, {"type": "json_object"}, {"type": "text"}]
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": PROMPT, "max_tokens": 90, "response_format": one},
        }
        for number, one in enumerate(formats)
    ]
    result = batch(lines)
    first, second, third = (json.loads(line)["response"]["body"]["choices"][0] for line in result.stdout.splitlines())
    jsonschema.validate(json.loads(first["text"]), SCHEMA)
    assert first["finish_reason"] == "stop"
    assert second["text"].startswith("{")
    assert not third["text"].startswith("{")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"schema": {"uniqueItems": True}}, "schema: 'uniqueItems' at # cannot be held exactly"),
        ({"schema": "a"}, "schema is 'a', expected a JSON Schema, an object"),
        ({"choice": "yes"}, "choice is 'yes', expected a list of strings"),
        ({"choice": [""]}, "choice is empty"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice cannot be combined"),
        ({"regex": "(?=a)"}, "regex: look-around"),
        ({"regex": "a", "min_new_tokens": 4}, "min_new_tokens is 4, and regex says where a text may end"),
        ({"json_output": 1}, "json_output is 1, expected true or false"),
    ],
)
def test_lines_that_are_refused(batch: Callable[..., Result], line: dict[str, Any], problem: str) -> None:
    result = batch([{"prompt": PROMPT, **line}])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"in.jsonl line 1: {problem}" in result.stderr


def test_lines_that_are_cut(batch: Callable[..., Result]) -> None:
    lines = [{"prompt": PROMPT, "regex": "[0-9]{40}", "max_new_tokens": 3}, {"prompt": PROMPT, "choice": ["yes"]}]
    result = batch(lines)
    assert result.exit_code == 0
    assert "1 of 2 texts are unfinished (length): what the schema asks for is not complete" in result.stderr
    assert batch(lines, "--choice", "a", "--require-complete").exit_code == 7


def test_texts_that_an_earlier_run_cut(llmcli: Callable[..., Result], tmp_path: Path) -> None:
    """They count when the batch resumes, and when nothing is left to do; in OpenAI's form too."""
    held = {"max_tokens": 3, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    lines = [
        {"id": "cut", "prompt": PROMPT, "regex": "[0-9]{40}", "max_new_tokens": 3},
        {"id": "whole", "prompt": PROMPT},
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": PROMPT, **held}},
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    out = tmp_path / "out.jsonl"
    command = ("batch", tmp_path / "in.jsonl", out, "--ordered", "--choice", "yes", "--require-complete")
    said = "2 of 3 texts are unfinished (length)", "error: 2 texts are unfinished; give more room with --max-new-tokens"
    for kept in (None, 3, 2, 1):  # lines that are left of the output
        if kept is not None:
            out.write_text("".join(out.read_text().splitlines(keepends=True)[:kept]))
        result = llmcli(*command)
        assert result.exit_code == 7
        assert all(one in result.stderr for one in said), result.stderr
    assert llmcli(*command[:-1]).exit_code == 0


def test_a_text_that_a_stop_string_cuts_needs_no_room(llmcli: Callable[..., Result]) -> None:
    cut = llmcli("generate", PROMPT, "--regex", "abc", "--stop", "b", "--require-complete")
    assert cut.exit_code == 7
    assert "error: a text is unfinished; leave out --stop" in cut.stderr
    cut = llmcli("chat", "--message", "Hi", "--regex", "abc", "--stop", "b", "--require-complete")
    assert "error: an answer is unfinished; leave out --stop" in cut.stderr


def test_another_schema_is_another_batch(llmcli: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": PROMPT}))
    command = ("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--choice")
    assert llmcli(*command, "yes").exit_code == 0
    assert llmcli(*command, "yes").exit_code == 0
    refused = llmcli(*command, "no")
    assert refused.exit_code == 2
    assert "was made with schema" in refused.stderr


def test_chat_answers_fit(llmcli: Callable[..., Result]) -> None:
    told = llmcli("chat", "--message", "Hi", "--message", "And?", "--schema", json.dumps(SCHEMA), "--json", "--seed", 3)
    turns = json.loads(told.stdout)["turns"]
    assert len(turns) == 2
    for turn in turns:
        jsonschema.validate(json.loads(turn["answer"]), SCHEMA)
        assert turn["is_complete"] is True
    cut = llmcli("chat", "--message", "Hi", "--regex", "[0-9]{9}", "--max-new-tokens", 2, "--require-complete")
    assert cut.exit_code == 7
    assert "stopped at --max-new-tokens; what the schema asks for is not complete" in cut.stderr


def test_a_receipt_holds_the_schema(llmcli: Callable[..., Result], tmp_path: Path) -> None:
    receipt = tmp_path / "receipt.json"
    held = ("--schema", json.dumps(SCHEMA), "--max-new-tokens", 40)
    told = llmcli("generate", PROMPT, "--seed", 2, *held, "-n", 2, "--receipt", receipt)
    content = json.loads(receipt.read_text())
    assert (told.exit_code, content["schema"]["name"]) == (0, "--schema")
    assert "llguidance" in content["program"]
    again = llmcli("replay", receipt)
    assert (again.exit_code, again.stdout) == (0, told.stdout)
    assert "Same 2 texts" in again.stderr
    content["schema"] = None
    receipt.write_text(json.dumps(content))
    assert llmcli("replay", receipt).exit_code == 6
