"""`--draft`: the same text with every choice, a model that fits, and the message for one that does not."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from results import Llmcli, Result
from tiny_models import write_broken_llama, write_tiny_llama

from llmcli.errors import InsufficientMemoryError
from llmcli.runners.base import Limits
from llmcli.runners.numpy import load as numpy_load

# The tiny model has logits for more tokens than its tokenizer has, and guesses them.
HELD = ("--regex", "[a-z ]{30}", "--temperature", 1.5)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the tiny one's vocabulary, with half of its layers and half of its context."""
    folder = tmp_path_factory.mktemp("drafter") / "smaller"
    return write_tiny_llama(folder, num_hidden_layers=1, max_position_embeddings=256)


@pytest.fixture
def generate(llmcli: Llmcli, tiny_llama: Path) -> Llmcli:
    arguments = ("generate", "abc abc abc", "-m", tiny_llama, "--seed", 3, "--max-new-tokens", 40)
    return lambda *more: llmcli(*arguments, *more)


@pytest.mark.parametrize("flags", [("-n", 3), HELD], ids=str)
def test_the_text_is_the_same_with_every_choice(
    generate: Llmcli, tiny_llama: Path, drafter: Path, flags: tuple[Any, ...]
) -> None:
    results = [
        generate("--jsonl", *flags, *(("--draft", choice) if choice else ()))
        for choice in ("off", None, "ngram", drafter)
    ]
    assert {result.exit_code for result in results} == {0}
    lines = [[json.loads(line) for line in result.stdout.splitlines()] for result in results]
    samples = [
        sorted((line["sample"], line["token_id"]) for line in of_run if line["type"] == "token") for of_run in lines
    ]
    ends = [
        sorted((line["sample"], line["text"], line["finish_reason"]) for line in of_run if "timings" in line)
        for of_run in lines
    ]
    assert all(found == samples[0] for found in samples)
    assert all(found == ends[0] for found in ends)


def test_stats_say_what_drafts_brought(generate: Llmcli, tiny_llama: Path) -> None:
    stderr = generate("--draft", tiny_llama, "--stats").stderr
    assert re.search(r"^Drafts by [^:]+: CPU", stderr, re.M)
    drafted, kept, percent, steps, tokens = re.search(  # type: ignore[union-attr]
        r"^drafts +(\d+) drafted, (\d+) kept \((\d+)%\); (\d+) steps, ([\d.]+) tokens a step$", stderr, re.M
    ).groups()
    assert float(tokens) == pytest.approx(1 + int(kept) / int(steps), abs=0.006)
    assert drafted == kept != "0"  # the model itself is always right
    assert percent == "100"
    assert 1 < float(tokens) <= 8
    assert re.search(r"^step +[\d.]+ ms with drafts, [\d.]+ ms without$", stderr, re.M)
    assert re.search(r"^gain of drafts +[\d.]+ times as fast$", stderr, re.M)
    assert "draft" not in generate("--draft", "off", "--stats").stderr


def test_chat_and_batch_take_it(llmcli: Llmcli, tiny_llama: Path, drafter: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "abc abc"}\n{"prompt": "xyz"}\n')
    settings = ("--seed", 3, "--max-new-tokens", 30)
    found = set()
    for choice in ("off", "ngram", drafter):
        chat = ("chat", "-m", tiny_llama, "--chat-template", "plain", "--message", "abc", "--message", "abc abc")
        answers = llmcli(*chat, *settings, "--draft", choice)
        batch = ("batch", tmp_path / "in.jsonl", "-", "-m", tiny_llama, "--ordered", "--rows", 2, "--stats")
        results = llmcli(*batch, *settings, "--draft", choice)
        assert (answers.exit_code, results.exit_code) == (0, 0)
        assert ("\ndrafts " in results.stderr) == (choice != "off")
        texts = [json.loads(line)["text"] for line in results.stdout.splitlines()]
        found.add((answers.stdout, *texts))
    assert len(found) == 1


def test_a_draft_model_with_another_vocabulary(generate: Llmcli, drafter: Path, tmp_path: Path) -> None:
    """Refused before its weights are read; the text still comes."""
    for name, change in (
        ("other", lambda tokens: {**tokens, "x": tokens["y"], "y": tokens["x"]}),
        ("fewer", lambda tokens: {token: number for token, number in tokens.items() if number < 255}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for file in drafter.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        document = json.loads((folder / "tokenizer.json").read_text())
        document["model"]["vocab"] = change(document["model"]["vocab"])
        (folder / "tokenizer.json").write_text(json.dumps(document))
        result = generate("--draft", folder)
        assert result.exit_code == 0
        assert result.stdout == generate("--draft", "off").stdout
        assert f"warning: --draft: {name} has another vocabulary than" in result.stderr
        assert {"other": "token 120 is b'y', not b'x'", "fewer": "tokens, not 258"}[name] in result.stderr
        assert "Drafts by" not in result.stderr


def test_a_draft_model_that_has_no_room(generate: Llmcli, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = numpy_load.load

    def load_one(model: Any, **options: Any) -> Any:
        if model.config.num_hidden_layers == 1:
            raise InsufficientMemoryError("the model needs more than there is")
        return load(model, **options)

    expected = generate("--draft", "off").stdout
    monkeypatch.setattr(numpy_load, "load", load_one)
    result = generate("--draft", drafter)
    assert (result.exit_code, result.stdout) == (0, expected)
    assert "warning: --draft: the model needs more than there is; the run continues without drafts" in result.stderr


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return write_broken_llama(tmp_path / "broken")


FAULT = r"warning: --draft: .*NaN.*; the run continues without drafts"


@pytest.mark.parametrize("command", ["generate", "samples", "chat", "batch"])
def test_a_fault_of_a_draft_model_is_said_once_and_costs_no_text(
    llmcli: Llmcli, tiny_llama: Path, broken: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "abc abc"}\n{"prompt": "xyz"}\n{"prompt": "abc"}\n')
    arguments = {
        "generate": ("generate", "abc abc abc"),
        "samples": ("generate", "abc abc abc", "-n", 3),
        "chat": ("chat", "--chat-template", "plain", "--message", "abc", "--message", "abc abc"),
        "batch": ("batch", tmp_path / "in.jsonl", "-", "--ordered", "--rows", 2),
    }[command]
    settings = ("-m", tiny_llama, "--seed", 3, "--max-new-tokens", 30)
    without, found = (llmcli(*arguments, *settings, "--draft", choice) for choice in ("off", broken))
    assert (found.exit_code, texts(found)) == (0, texts(without))
    assert len(re.findall(FAULT, found.stderr)) == 1
    assert found.stderr.count("--draft") == 1


def texts(result: Result) -> str:
    """Its output, without times."""
    return re.sub(r'"timings": {.*?}', "", result.stdout)


def test_a_runner_that_verifies_no_drafts(generate: Llmcli, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = numpy_load.load

    def load_one(model: Any, **options: Any) -> Any:
        runner = load(model, **options)
        runner.limits = replace(runner.limits, max_drafts=0)
        return runner

    expected = generate("--draft", "off").stdout
    monkeypatch.setattr(numpy_load, "load", load_one)
    assert Limits(1, 1, 1, works_ahead=True).max_drafts == 0  # by default a device verifies no drafts
    for choice in ("ngram", drafter):
        result = generate("--draft", choice)
        assert (result.exit_code, result.stdout) == (0, expected)
        assert f"warning: --draft {choice} has no effect" in result.stderr
    assert "--draft" not in generate().stderr


def test_names_of_models_that_are_not_there(generate: Llmcli) -> None:
    result = generate("--draft", "")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--draft is empty, expected off, auto, ngram or a model" in result.stderr
    result = generate("--draft", "missing")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "model folder missing does not exist" in result.stderr
