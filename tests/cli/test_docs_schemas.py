"""docs/schemas: the JSON of commands has exactly the keys of these files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from docs_schemas import FOLDER, check_docs_schema
from results import Result
from tiny_models import write_tiny_llama

SHORT = ("--seed", 1, "--max-new-tokens", 3)
GENERATE = ("generate", "Once upon a time", *SHORT)
HELD = ("--regex", "[0-9]{9}")


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
    check_docs_schema(name, json.loads(llmcli(*arguments).stdout))


def test_presets(llmcli: Callable[..., Result]) -> None:
    presets = json.loads(llmcli("presets", "--json").stdout)
    check_docs_schema("presets", presets)
    with pytest.raises(jsonschema.ValidationError):
        check_docs_schema("presets", {"story": {**presets["story"], "path": 3}})


@pytest.mark.parametrize("more", [(), ("--logprobs", 1, "-n", 2), HELD])
def test_lines_of_generate(llmcli: Callable[..., Result], more: tuple[object, ...]) -> None:
    lines = [json.loads(line) for line in llmcli(*GENERATE, "--jsonl", *more).stdout.splitlines()]
    assert {line["type"] for line in lines} == {"run", "token", "finished"}
    for line in lines:
        check_docs_schema("generate-lines", line)


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
        check_docs_schema("batch-line", json.loads(line))
    check_docs_schema("batch-line", {"id": 1, "error": {"message": "no room"}})


def test_a_receipt_and_its_replay(llmcli: Callable[..., Result], tmp_path: Path) -> None:
    for number, more in enumerate(((), HELD, ("--logit-bias", "5=-inf", "-n", 2))):
        path = tmp_path / f"{number}.json"
        assert llmcli(*GENERATE, "--receipt", path, *more).exit_code == 0
        check_docs_schema("receipt", json.loads(path.read_text()))
        check_docs_schema("replay", json.loads(llmcli("replay", path, "--json").stdout))


def test_what_a_model_is(llmcli: Callable[..., Result], tiny_llama: Path, tmp_path: Path) -> None:
    quantized = tmp_path / "quantized"
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    assert llmcli("quantize", tiny_llama, quantized, "--group-size", 32, "--eval", tmp_path / "text.txt").exit_code == 0
    for name in ("storyteller", tiny_llama, quantized):
        facts = json.loads(llmcli("info", name, "--json").stdout)
        check_docs_schema("info", facts)
        assert (facts["quality_card"] is None) == (name == tiny_llama)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("Llama-3.1-8B", "--memory", 48, "--bandwidth", 960, "--rows", 4),
        ("Llama-3.1-8B", "--memory", 48, "--bandwidth", 960, "--draft", "Llama-3.2-1B"),
    ],
)
def test_a_plan(llmcli: Callable[..., Result], arguments: tuple[object, ...]) -> None:
    check_docs_schema("plan", json.loads(llmcli("plan", *arguments, "--json").stdout))


def test_two_models(llmcli: Callable[..., Result], tiny_llama: Path, tmp_path: Path) -> None:
    other, text = write_tiny_llama(tmp_path / "other", dtype=torch.bfloat16, seed=5), tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. ")
    for more in ((), ("--against", other)):
        told = json.loads(llmcli("eval", tiny_llama, *more, "-f", text, "--context", 32, "--json").stdout)
        check_docs_schema("eval", told)
    for second in (tiny_llama, other):
        told = json.loads(llmcli("diff", tiny_llama, second, "Hi", "--max-new-tokens", 8, "--json").stdout)
        check_docs_schema("diff", told)
        assert (told["divergent_probability"] is None) == (second == tiny_llama)


def test_kernels_that_are_compiled(llmcli: Callable[..., Result], nvrtc: None) -> None:
    told = llmcli("kernels", "list", "-m", "storyteller", "--arch", "sm_90", "--json").stdout
    check_docs_schema("kernels-list", json.loads(told))
    told = llmcli("kernels", "compare", "launch", "--arch", "sm_90", "--json").stdout
    check_docs_schema("kernels-compare", json.loads(told))


def test_studies_that_were_measured() -> None:
    paths = [*(FOLDER.parent / "studies" / "measured").glob("*/*.json")]
    assert len(paths) > 20
    for path in paths:
        check_docs_schema("kernels-compare", json.loads(path.read_text(encoding="utf-8")))


def test_all_files_are_held_against_output() -> None:
    """Here, or in a test that replaces a card, a hub or a conversation."""
    text = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    for path in FOLDER.glob("*.json"):
        assert f'"{path.name.removesuffix(".schema.json")}"' in text, path.name
