"""Flags about single choices: logprobs, JSON lines, logit bias, banned ends."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from results import Result

EOS_ID = 257


@pytest.fixture
def generate(llmcli: Callable[..., Result], tiny_llama: Path) -> Callable[..., Result]:
    return lambda *arguments: llmcli("generate", "Hi", "-m", tiny_llama, "--max-new-tokens", 9, "--seed", 3, *arguments)


def test_logprobs_are_the_models_own(generate: Callable[..., Result]) -> None:
    """Temperature and filters change the draw, not the log-probabilities."""
    answer = json.loads(generate("--json", "--logprobs", 3, "--temperature", 2, "--top-k", 50).stdout)
    entries = answer["logprobs"]
    assert [entry["token_id"] for entry in entries] == answer["token_ids"]
    for entry in entries:
        top = [item["logprob"] for item in entry["top_logprobs"]]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert entry["logprob"] <= top[0] <= 0
        assert sum(map(math.exp, top)) <= 1
    greedy = json.loads(generate("--json", "--logprobs", 3, "--temperature", 0).stdout)["logprobs"]
    assert [entry["token_id"] for entry in greedy] == [entry["top_logprobs"][0]["token_id"] for entry in greedy]
    assert entries[0]["top_logprobs"] == greedy[0]["top_logprobs"]  # both after the same prompt


def test_looking_at_choices_does_not_change_them(generate: Callable[..., Result]) -> None:
    plain = json.loads(generate("--json", "-n", 2).stdout)
    watched = json.loads(generate("--json", "-n", 2, "--logprobs", 2).stdout)
    assert [sample["token_ids"] for sample in watched["samples"]] == [s["token_ids"] for s in plain["samples"]]
    assert all(len(sample["logprobs"]) == len(sample["token_ids"]) for sample in watched["samples"])


def test_json_lines(generate: Callable[..., Result]) -> None:
    answer = json.loads(generate("--json", "-n", 2).stdout)
    lines = [json.loads(line) for line in generate("--jsonl", "-n", 2, "--logprobs", 1).stdout.splitlines()]
    run, *rest = lines
    assert (run["type"], run["seed"], run["prompt_token_ids"]) == ("run", 3, [256, *b"Hi"])
    for sample in answer["samples"]:
        mine = [line for line in rest if line["sample"] == sample["sample"]]
        assert [line["type"] for line in mine] == ["token"] * len(sample["token_ids"]) + ["finished"]
        assert [line["token_id"] for line in mine[:-1]] == sample["token_ids"]
        assert "".join(line["text"] for line in mine) == sample["text"]
        assert mine[-1]["finish_reason"] == sample["finish_reason"]
        assert all(len(line["top_logprobs"]) == 1 for line in mine[:-1])


def test_logit_bias_bans_and_forces(generate: Callable[..., Result]) -> None:
    first = json.loads(generate("--json", "--temperature", 0).stdout)["token_ids"][0]
    banned = json.loads(generate("--json", "--temperature", 0, "--logit-bias", f"{first}=-inf").stdout)
    assert first not in banned["token_ids"]
    forced = json.loads(generate("--json", "--logit-bias", "65=100").stdout)
    assert forced["text"] == "A" * 9


def test_min_new_tokens_and_ignore_eos(generate: Callable[..., Result]) -> None:
    """The bias makes the end certain unless it is banned."""
    force = ("--logit-bias", f"{EOS_ID}=1000", "--json")
    assert json.loads(generate(*force).stdout)["token_ids"] == [EOS_ID]
    later = json.loads(generate(*force, "--min-new-tokens", 4).stdout)
    assert later["token_ids"][4:] == [EOS_ID]
    assert EOS_ID not in later["token_ids"][:4]
    never = json.loads(generate(*force, "--ignore-eos").stdout)
    assert (never["finish_reason"], EOS_ID in never["token_ids"]) == ("length", False)


def test_dry_breaks_up_repetitions(generate: Callable[..., Result]) -> None:
    """A bias that makes AB AB AB likely; DRY makes the text leave it."""
    loop = ("--json", "--temperature", 0, "--logit-bias", "65=30")
    assert json.loads(generate(*loop).stdout)["text"] == "A" * 9
    assert json.loads(generate(*loop, "--dry-multiplier", 8).stdout)["text"] != "A" * 9


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--json", "--jsonl"), ("--json and --jsonl cannot be combined",)),
        (("--logprobs", "3"), ("--logprobs needs --json or --jsonl", "--why")),
        (("--json", "--logprobs", "101"), ("--logprobs: expected at most 100",)),
        (("--logit-bias", "12"), ("--logit-bias is '12', expected a token id, =, and a number",)),
        (("--logit-bias", "a=1"), ("--logit-bias is 'a=1'",)),
        (("--logit-bias", "12=lots"), ("--logit-bias is '12=lots'",)),
        (("--logit-bias", "288=1"), ("names token 288", "has tokens 0 to 287")),
        (("--logit-bias", "-1=1"), ("the logit bias of token -1",)),
        (("--logit-bias", "12=inf"), ("the logit bias of token 12 is inf",)),
        (("--color", "rainbow"), ("--color is 'rainbow', expected prob",)),
        (("--color", "prob", "--json"), ("--color cannot be combined with --json or --jsonl",)),
    ],
)
def test_flags_that_make_no_sense(generate: Callable[..., Result], flags: tuple[str, ...], parts: tuple[str]) -> None:
    generate(*flags).expect_error(2, *parts)
