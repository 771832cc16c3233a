"""docs/schemas: what commands write as JSON is what these files say, no key more and none less."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from results import Result

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"
SHORT = ("--seed", 1, "--max-new-tokens", 3)
GENERATE = ("generate", "Once upon a time", *SHORT)
HELD = ("--regex", "[0-9]{9}")


def check(name: str, value: Any) -> None:
    schema = json.loads((FOLDER / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(value, schema)
    if isinstance(value, dict):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**value, "another key": 1}, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({}, schema)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("generate", (*GENERATE, "--json")),
        ("generate", (*GENERATE, "--json", "--logprobs", 2, *HELD)),
        ("generate", (*GENERATE, "--json", "-n", 2, *HELD)),
        ("generate", (*GENERATE, "--json", "--stats=start")),
        ("chat", ("chat", "--message", "Hi", "--message", "And?", "--json", *SHORT)),
        ("chat", ("chat", "--message", "Hi", "--json", *SHORT, *HELD)),
        ("tokenize", ("tokenize", "hello", "--json")),
        ("doctor", ("doctor", "--json")),
    ],
)
def test_an_object(llmcli: Callable[..., Result], name: str, arguments: tuple[object, ...]) -> None:
    check(name, json.loads(llmcli(*arguments).stdout))


def test_presets(llmcli: Callable[..., Result]) -> None:
    schema = json.loads((FOLDER / "presets.schema.json").read_text(encoding="utf-8"))
    presets = json.loads(llmcli("presets", "--json").stdout)
    jsonschema.validate(presets, schema)
    assert presets
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"story": {**presets["story"], "path": 3}}, schema)


@pytest.mark.parametrize("more", [(), ("--logprobs", 1, "-n", 2), HELD])
def test_lines_of_generate(llmcli: Callable[..., Result], more: tuple[object, ...]) -> None:
    lines = [json.loads(line) for line in llmcli(*GENERATE, "--jsonl", *more).stdout.splitlines()]
    assert {line["type"] for line in lines} == {"run", "token", "finished"}
    for line in lines:
        check("generate-lines", line)


def test_lines_of_a_batch(llmcli: Callable[..., Result], tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    of_openai = [("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "Hi"})]
    lines: list[dict[str, Any]] = [{"prompt": "Hi"}, {"prompt": "Hi", "id": 2.5, "regex": "[0-9]{9}"}]
    lines += [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in of_openai]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    result = llmcli("batch", tmp_path / "in.jsonl", "-", *SHORT)
    written = result.stdout.splitlines()
    assert len(written) == 4
    for line in written:
        check("batch-line", json.loads(line))
    check("batch-line", {"id": 1, "error": {"message": "no room"}})


def test_a_receipt_and_its_replay(llmcli: Callable[..., Result], tmp_path: Path) -> None:
    for number, more in enumerate(((), HELD, ("--logit-bias", "5=-inf", "-n", 2))):
        path = tmp_path / f"{number}.json"
        assert llmcli(*GENERATE, "--receipt", path, *more).exit_code == 0
        check("receipt", json.loads(path.read_text()))
        check("replay", json.loads(llmcli("replay", path, "--json").stdout))


def test_all_files_are_held_against_output() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    for path in FOLDER.glob("*.json"):
        assert f'"{path.name.removesuffix(".schema.json")}' in text
