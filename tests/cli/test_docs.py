"""Pages for scripts: the JSON of commands has exactly the keys of docs/schemas, and examples run as written."""

import importlib
import json
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import typer
from docs_schemas import FOLDER, check_docs_schema
from results import Llmcli
from tiny_models import write_tiny_llama

from llmcli.batch.input import BODY_KEYS
from llmcli.cli.command import add_command
from llmcli.cli.main import COMMANDS
from llmcli.errors import DifferentTextError
from llmcli.receipt.receipt import Receipt, RunnerFacts
from llmcli.sampling.params import DEFAULT_ORDER

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
def test_an_object(llmcli: Llmcli, name: str, arguments: tuple[object, ...]) -> None:
    check_docs_schema(name, json.loads(llmcli(*arguments).stdout))


def test_presets(llmcli: Llmcli) -> None:
    presets = json.loads(llmcli("presets", "--json").stdout)
    check_docs_schema("presets", presets)
    with pytest.raises(jsonschema.ValidationError):
        check_docs_schema("presets", {"story": {**presets["story"], "path": 3}})


@pytest.mark.parametrize("more", [(), ("--logprobs", 1, "-n", 2), HELD])
def test_lines_of_generate(llmcli: Llmcli, more: tuple[object, ...]) -> None:
    lines = [json.loads(line) for line in llmcli(*GENERATE, "--jsonl", *more).stdout.splitlines()]
    assert {line["type"] for line in lines} == {"run", "token", "finished"}
    for line in lines:
        check_docs_schema("generate-lines", line)


def test_lines_of_a_batch(llmcli: Llmcli, tmp_path: Path) -> None:
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


def test_a_receipt_and_its_replay(llmcli: Llmcli, tmp_path: Path) -> None:
    for number, more in enumerate(((), HELD, ("--logit-bias", "5=-inf", "-n", 2))):
        path = tmp_path / f"{number}.json"
        assert llmcli(*GENERATE, "--receipt", path, *more).exit_code == 0
        check_docs_schema("receipt", json.loads(path.read_text()))
        check_docs_schema("replay", json.loads(llmcli("replay", path, "--json").stdout))


def test_what_a_model_is(llmcli: Llmcli, tiny_llama: Path, tmp_path: Path) -> None:
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
def test_a_plan(llmcli: Llmcli, arguments: tuple[object, ...]) -> None:
    check_docs_schema("plan", json.loads(llmcli("plan", *arguments, "--json").stdout))


def test_two_models(llmcli: Llmcli, tiny_llama: Path, tmp_path: Path) -> None:
    other, text = write_tiny_llama(tmp_path / "other", dtype=torch.bfloat16, seed=5), tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. ")
    for more in ((), ("--against", other)):
        told = json.loads(llmcli("eval", tiny_llama, *more, "-f", text, "--context", 32, "--json").stdout)
        check_docs_schema("eval", told)
    for second in (tiny_llama, other):
        told = json.loads(llmcli("diff", tiny_llama, second, "Hi", "--max-new-tokens", 8, "--json").stdout)
        check_docs_schema("diff", told)
        assert (told["divergent_probability"] is None) == (second == tiny_llama)


def test_kernels_that_are_compiled(llmcli: Llmcli, nvrtc: None) -> None:
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


# docs/guide/batch.md: its example runs as written, its tables name every key, its jq recipe reads the results.


BATCH_PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "batch.md").read_text(encoding="utf-8")


def command_lines(first_word: str) -> list[str]:
    joined = BATCH_PAGE.replace("\\\n", "")
    return re.findall(rf"^    ({first_word} .+)$", joined, re.MULTILINE)


def test_the_example_runs_as_written(llmcli: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (make,) = command_lines("printf")
    subprocess.run(["bash", "-c", make], check=True)
    runs = [line for line in command_lines("llmcli") if "prompts.jsonl" in line]
    assert len(runs) == 2
    first, second = (llmcli(*line.split()[1:]) for line in runs)
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert "Nothing to do: " in second.stderr
    results = {value["id"]: value for value in map(json.loads, Path("results.jsonl").read_text().splitlines())}
    assert results.keys() == {1, "dog", "owl"}
    owl = re.search(r'\{"id": "owl", "text".*?\}\n', BATCH_PAGE, re.DOTALL)
    assert owl is not None
    assert re.findall(r'"(\w+)":', owl[0]) == list(results["owl"])
    assert (results["owl"]["seed"], len(results["owl"]["token_ids"])) == (7, 5)
    if shutil.which("jq"):
        (recipe,) = command_lines("jq")
        told = subprocess.run(["bash", "-c", recipe], check=True, capture_output=True, text=True).stdout
        assert sorted(line.split("\t")[0] for line in told.splitlines()) == ["1", "dog", "owl"]


def test_the_tables_name_every_key() -> None:
    named = set(re.findall(r"`(\w+)`", BATCH_PAGE))
    assert set(BODY_KEYS) <= named
    assert {"prompt", "messages", "id", "seed", "max_new_tokens", "stop", "custom_id", "method", "url", "body"} <= named


# docs/guide/receipts.md: its example runs as written, its tables name every key and flag, its lines are shown.


RECEIPTS_PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "receipts.md").read_text(encoding="utf-8")


def test_the_example_of_a_receipt_runs_as_written(
    llmcli: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = re.findall(r"^    llmcli (.+)$", RECEIPTS_PAGE, re.MULTILINE)
    prompt = re.search(r'"(.+?)"', first)
    assert prompt is not None
    arguments = [word.replace("\0", " ") for word in first.replace(prompt[0], prompt[1].replace(" ", "\0")).split()]
    told = llmcli(*arguments)
    again = llmcli(*second.split())
    assert (told.exit_code, again.exit_code, again.stdout) == (0, 0, told.stdout)
    shown = re.search(r"on stderr:\n\n((?:    .+\n)+)", RECEIPTS_PAGE)
    assert shown is not None
    assert again.stderr == re.sub(r"^    ", "", shown[1], flags=re.MULTILINE)
    content = json.loads(Path("story.json").read_text())
    assert set(content) - {"format", "version"} <= set(re.findall(r"^\| `(\w+)` \|", RECEIPTS_PAGE, re.MULTILINE))


def test_the_tables_name_every_key_and_code() -> None:
    named = set(re.findall(r"`([\w.]+)`", RECEIPTS_PAGE))
    assert {field.name for field in fields(Receipt)} <= named
    assert {field.name for field in fields(RunnerFacts)} - {"description"} <= named
    assert f"| {DifferentTextError.exit_code} | another text |" in RECEIPTS_PAGE


# docs/guide/coming-from-llama.cpp.md: each of our flags that it names exists, and it is right about sampling.


PAGE = Path(__file__).parents[2] / "docs" / "guide" / "coming-from-llama.cpp.md"
LLAMA_CPP_PAGE = PAGE.read_text(encoding="utf-8")


def options_of(command: str) -> set[str]:
    """Every way to write an option of one of our commands."""
    entry = next(entry for entry in COMMANDS if entry.name == command)
    app = typer.Typer()
    add_command(app, command, getattr(importlib.import_module(f"llmcli.cli.{entry.module}"), entry.attribute))
    return {name for parameter in typer.main.get_command(app).params for name in parameter.opts}


def table_rows() -> list[list[str]]:
    lines = [line for line in LLAMA_CPP_PAGE.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_each_example_is_a_command_line_of_ours(llmcli: Llmcli, tiny_llama: Path) -> None:
    """They run, on another model and for a few tokens."""
    examples = re.findall(r'^    llmcli generate "Once upon a time" (.+)$', LLAMA_CPP_PAGE, re.MULTILINE)
    assert len(examples) == 3
    for flags in examples:
        result = llmcli("generate", "Hi", "-m", tiny_llama, "--max-new-tokens", 3, *flags.split())
        assert result.exit_code == 0, result.stderr


def test_the_order_for_llama_cpp_holds_every_step_but_mirostat() -> None:
    order = re.search(r"--sampler-order (\S+temperature)\n", LLAMA_CPP_PAGE)
    assert order is not None
    assert set(order[1].split(",")) == set(DEFAULT_ORDER) - {"mirostat"}
