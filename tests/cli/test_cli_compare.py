"""`llmcli eval` and `llmcli diff` as a user runs them."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from results import Result
from tiny_models import write_tiny_llama

from llmcli.cli.diff import marked
from llmcli.cli.terminal import visible
from llmcli.cli.units import divergence

TEXT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def coarse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in bf16 numbers."""
    return write_tiny_llama(tmp_path_factory.mktemp("coarse") / "coarse", dtype=torch.bfloat16)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_eval_of_one_model(llmcli: Callable[..., Result], tiny_llama: Path, text_file: Path) -> None:
    result = llmcli("eval", tiny_llama, "--file", text_file, "--context", 64)
    first, second = result.stdout.splitlines()
    assert first.startswith("tiny-llama: perplexity ")
    assert second == f"{len(TEXT)} tokens scored, windows of 64, stride 32"
    answer = json.loads(llmcli("eval", tiny_llama, "--file", text_file, "--context", 64, "--json").stdout)
    (model,) = answer["models"]
    assert first == f"tiny-llama: perplexity {model['perplexity']:.4f}"
    assert "mean_kl" not in answer


def test_eval_against_another(llmcli: Callable[..., Result], tiny_llama: Path, coarse: Path, text_file: Path) -> None:
    arguments = ("eval", tiny_llama, "--against", coarse, "-f", text_file, "--stride", 20, "--context", 64)
    answer = json.loads(llmcli(*arguments, "--json").stdout)
    assert [model["model"] for model in answer["models"]] == ["tiny-llama", "coarse"]
    assert 0 < answer["mean_kl"] < 0.01
    assert 0.9 < answer["top1_agreement"] <= 1
    text = llmcli(*arguments).stdout
    assert f"mean KL divergence {divergence(answer['mean_kl'])} nats per token" in text
    before, after = (model["perplexity"] for model in answer["models"])
    direction = "higher (worse)" if after > before else "lower (better)"
    assert f"coarse: perplexity {after:.4f}, {abs(after / before - 1):.3%} {direction}\n" in text
    back = llmcli("eval", coarse, "--against", tiny_llama, *arguments[4:]).stdout
    assert ("lower (better)" if after > before else "higher (worse)") in back
    same = llmcli("eval", coarse, "--against", coarse, *arguments[4:]).stdout
    assert f"coarse: perplexity {after:.4f}, the same\n" in same
    assert f"top-1 agreement {answer['top1_agreement']:.2%}" in text


def test_eval_of_an_int8_cache(llmcli: Callable[..., Result], tiny_llama: Path, coarse: Path, text_file: Path) -> None:
    """One model is compared with itself; with two, the second has the requested cache."""
    common = ("-f", text_file, "--context", 64)
    usual = json.loads(llmcli("eval", tiny_llama, *common, "--json").stdout)["models"][0]
    arguments = ("eval", tiny_llama, "--kv-cache", "int8", *common)
    answer = json.loads(llmcli(*arguments, "--json").stdout)
    assert [(model["model"], model["kv_cache"]) for model in answer["models"]] == [
        ("tiny-llama", "auto"),
        ("tiny-llama", "int8"),
    ]
    assert answer["models"][0] == usual
    assert answer["models"][1]["perplexity"] != usual["perplexity"]
    assert 0 < answer["mean_kl"] < 1e-3
    lines = llmcli(*arguments).stdout.splitlines()
    assert lines[1].startswith(f"tiny-llama, KV cache int8: perplexity {answer['models'][1]['perplexity']:.4f}, ")
    pair = json.loads(llmcli(*arguments, "--against", coarse, "--json").stdout)
    assert [(model["model"], model["kv_cache"]) for model in pair["models"]] == [
        ("tiny-llama", "auto"),
        ("coarse", "int8"),
    ]
    assert pair["mean_kl"] > answer["mean_kl"]


def test_diff_of_an_int8_cache(llmcli: Callable[..., Result], tiny_llama: Path) -> None:
    arguments = ("diff", tiny_llama, tiny_llama, "Hi", "--max-new-tokens", 5, "--json")
    assert 0 < json.loads(llmcli(*arguments, "--kv-cache", "int8").stdout)["mean_kl"] < 1e-3


def test_diff_marks_divergences(
    llmcli: Callable[..., Result], tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_tiny_llama(tmp_path / "other", seed=5)
    arguments = ("diff", tiny_llama, other, "Hi", "--max-new-tokens", 12)
    answer = json.loads(llmcli(*arguments, "--json").stdout)
    greedy = ("generate", "Hi", "-m", tiny_llama, "--temperature", 0, "--max-new-tokens", 12, "--json")
    assert [token["token_id"] for token in answer["tokens"]] == json.loads(llmcli(*greedy).stdout)["token_ids"]
    assert answer["num_divergences"] > 0
    result = llmcli(*arguments)
    assert result.stdout.count(">") >= answer["num_divergences"]
    same = answer["num_agreeing"]
    begins = f"the first {same} tokens are the same" if same > 1 else "they differ from the first token on"
    assert same != 1
    assert f"{begins}; B would choose another token" in result.stdout
    monkeypatch.setattr("llmcli.cli.diff.has_color", lambda stream: True)
    tinted = llmcli(*arguments).stdout
    assert tinted != result.stdout
    assert re.sub(r"\x1b\[[\d;]*m", "", tinted) == visible(result.stdout)


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [(" cub", "·called", " [cub>called]"), (" M", "B", "[·M>B]"), ("ar", "et", "[ar>et]"), (",", "·is", "[,>·is]")],
)
def test_a_space_that_both_choices_begin_with_stands_before_them(first: str, second: str, shown: str) -> None:
    assert marked(first, second) == shown


def test_diff_of_a_model_with_itself(llmcli: Callable[..., Result], tiny_llama: Path) -> None:
    result = llmcli("diff", tiny_llama, tiny_llama, "Hi", "--max-new-tokens", 5)
    text = json.loads(
        llmcli("generate", "Hi", "-m", tiny_llama, "--temperature", 0, "--max-new-tokens", 5, "--json").stdout
    )["text"]
    assert result.stdout.startswith(text)
    assert "B writes the same text" in result.stdout
    assert "mean KL divergence 0 nats" in result.stdout


def test_other_vocabularies_are_refused(
    llmcli: Callable[..., Result], tiny_llama: Path, tmp_path: Path, text_file: Path
) -> None:
    other = write_tiny_llama(tmp_path / "other", vocab_size=300)
    llmcli("diff", tiny_llama, other, "Hi").expect_error(2, "different vocabularies")
    llmcli("eval", tiny_llama, "--against", other, "-f", text_file).expect_error(2, "different vocabularies")


def test_eval_refuses_what_leaves_no_context(llmcli: Callable[..., Result], tiny_llama: Path, text_file: Path) -> None:
    arguments = ("eval", tiny_llama, "-f", text_file, "--context", 64)
    llmcli(*arguments, "--stride", 63).expect_error(2, "leaves no context in a window of 64; use at most 62")
    llmcli("eval", tiny_llama, "-f", text_file, "--context", 513).expect_error(
        2, "over the context limit of tiny-llama, 512 tokens"
    )
    result = llmcli("diff", tiny_llama, tiny_llama, "Hi", "--max-new-tokens", 600)
    result.expect_error(2, "the context holds 512; use --max-new-tokens 509 or a shorter prompt")
