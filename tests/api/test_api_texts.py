"""`llmcli.load`'s texts are those of the commands, and their log-probabilities those of transformers."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cli.html_tree import Parser

import llmcli

Command = Callable[..., Any]
PROMPT = "Once upon a time"
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
SCHEMA |= {"additionalProperties": False}
CASES: list[dict[str, Any]] = [
    {"max_new_tokens": 24},
    {"temperature": 0, "max_new_tokens": 9, "stop": ["lived"]},
    {"temperature": 1.5, "top_k": 7, "min_p": 0.01, "repetition_penalty": 1.2, "max_new_tokens": 12},
    {"schema": SCHEMA, "max_new_tokens": 30},
    {"choice": [" dog", " cat"]},
]


def flags_of(options: dict[str, Any]) -> Iterator[object]:
    """The same options for a command."""
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            yield from (f"--{name.replace('_', '-')}", json.dumps(one) if isinstance(one, dict) else one)


def check_same(text: llmcli.GeneratedText, told: dict[str, Any]) -> None:
    """The same as the command's JSON."""
    assert (text.text, list(text.token_ids)) == (told["text"], told["token_ids"])
    assert (text.finish_reason, text.is_complete) == (told["finish_reason"], told.get("is_complete"))
    assert text.timings.decode_tokens == told["timings"]["decode_tokens"]


@pytest.mark.parametrize("options", CASES)
def test_the_text_of_generate(model: llmcli.Model, command: Command, options: dict[str, Any]) -> None:
    (told,) = command("generate", PROMPT, "--seed", 3, "-n", 2, "--json", "--logprobs", 0, *flags_of(options))
    texts = model.generate(PROMPT, seed=3, n=2, **options)
    for text, sample in zip(texts, told["samples"], strict=True):
        check_same(text, sample)
        assert list(text.logprobs) == [one["logprob"] for one in sample["logprobs"]]
        assert (list(text.prompt_token_ids), text.seed) == (told["prompt_token_ids"], told["seed"])
        assert text.timings.decode_seconds > 0
    assert [text.sample for text in texts] == [0, 1]
    alone = model.generate(PROMPT, seed=3, **options)
    assert alone == texts[0]
    assert str(alone) == alone.text
    plain = model.generate(PROMPT, seed=3, logprobs=False, **options)
    assert (plain.token_ids, plain.logprobs) == (alone.token_ids, ())


def test_without_a_seed_each_call_draws_one(model: llmcli.Model) -> None:
    first, second = (model.generate(PROMPT, max_new_tokens=8) for _ in range(2))
    assert first.seed != second.seed
    assert model.generate(PROMPT, seed=first.seed, max_new_tokens=8) == first


def test_a_stream_is_the_text_in_pieces(model: llmcli.Model) -> None:
    whole = model.generate(PROMPT, seed=1, max_new_tokens=20, stop="happily")
    *pieces, last = model.stream(PROMPT, seed=1, max_new_tokens=20, stop="happily")
    assert last.result == whole
    assert "".join(map(str, [*pieces, last])) == whole.text
    assert tuple(piece.token_id for piece in pieces) == whole.token_ids
    assert tuple(piece.logprob for piece in pieces) == whole.logprobs
    assert last.token_id is None


def test_streams_are_read_in_turn_and_left_early(model: llmcli.Model) -> None:
    prompts = (PROMPT, "The little dog")
    expected = [model.generate(prompt, seed=2, max_new_tokens=12).token_ids for prompt in prompts]
    for _ in model.stream(PROMPT, seed=5):
        break
    streams = [model.stream(prompt, seed=2, max_new_tokens=12) for prompt in prompts]
    read = [[pieces[0].token_id, pieces[1].token_id] for pieces in zip(*streams, strict=True)]
    assert list(zip(*read[:-1], strict=True)) == expected
    assert model.generate(PROMPT, seed=2, max_new_tokens=12).token_ids == expected[0]


def test_chat_is_that_of_llmcli_chat(
    model: llmcli.Model, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path))
    messages: list[dict[str, str]] = []
    asked = ["Tell me of a snail.", "And a dog?"]
    flags = [part for message in asked for part in ("--message", message)]
    (told,) = command("chat", "--seed", 1, "--max-new-tokens", 12, "--json", *flags)
    for message, turn in zip(asked, told["turns"], strict=True):
        messages.append({"role": "user", "content": message})
        answer = model.chat(messages, seed=1, max_new_tokens=12)
        assert answer.text == turn["answer"]
        assert list(answer.prompt_token_ids) == turn["prompt_token_ids"]
        assert answer.finish_reason == turn["finish_reason"]
        messages.append({"role": "assistant", "content": answer.text})
    assert "".join(map(str, model.stream(messages[:3], seed=1, max_new_tokens=12))) == answer.text
    (alone,) = command("generate", asked[0], "--chat", "--seed", 4, "--max-new-tokens", 12, "--json")
    check_same(model.chat(asked[0], seed=4, max_new_tokens=12, n=1)[0], alone)


def test_a_batch_is_that_of_llmcli_batch_and_each_text_that_of_generate(
    model: llmcli.Model, command: Command, tmp_path: Path
) -> None:
    prompts: list[Any] = [PROMPT, [{"role": "user", "content": "A story, please."}], "The little dog"]
    lines = [{"prompt" if isinstance(one, str) else "messages": one} for one in prompts]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    told = command("batch", source, "-", "--ordered", "--seed", 6, "--max-new-tokens", 10)
    texts = model.batch(prompts, seed=6, max_new_tokens=10)
    for text, line in zip(texts, told, strict=True):
        check_same(text, line)
        assert text.logprobs == ()
    (third,) = command("generate", prompts[2], "--only", 3, "--seed", 6, "--max-new-tokens", 10, "--json")
    check_same(texts[2], third)
    with llmcli.load(device="cpu", rows=3) as wide:
        beside = wide.batch(prompts, seed=6, max_new_tokens=10, logprobs=True)
        assert [text.token_ids for text in beside] == [text.token_ids for text in texts]
        assert all(len(text.logprobs) == len(text.token_ids) for text in beside)
    assert model.batch([]) == []


def test_an_error_of_one_text_leaves_the_others(model: llmcli.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, options = [PROMPT, "The little dog", "An owl"], {"seed": 6, "max_new_tokens": 10}
    expected = model.batch(prompts, **options, logprobs=True)
    assert [text.error for text in expected] == [None] * 3
    kind = type(model._engine().runner._device._model)
    logits, calls = kind.logits, iter(range(1000))

    def fail(self: Any, hidden: Any) -> Any:
        return logits(self, hidden) * (math.nan if next(calls) in bad else 1)

    monkeypatch.setattr(kind, "logits", fail)
    bad = {26}  # two for each token; rows run one after the other: in the second text
    with pytest.warns(RuntimeWarning, match="1 of 3 texts failed, the first at prompt 2: .*NaN.*; see `error`") as told:
        texts = model.batch(prompts, **options, logprobs=True)
    assert told[0].filename == __file__
    assert (texts[0], texts[2]) == (expected[0], expected[2])
    failed = texts[1]
    assert (failed.finish_reason, failed.is_complete, failed.seed) == ("failed", None, 6)
    assert 0 < len(failed.token_ids) < 10
    assert failed.token_ids == expected[1].token_ids[: len(failed.token_ids)]
    assert failed.logprobs == expected[1].logprobs[: len(failed.token_ids)]
    assert failed.text
    assert expected[1].text.startswith(failed.text)
    assert failed.prompt_token_ids == expected[1].prompt_token_ids
    assert "NaN" in str(failed.error)
    for call in (
        lambda: model.generate(PROMPT, **options),
        lambda: list(model.stream(PROMPT, **options)),
        lambda: model.generate(PROMPT, n=3, **options),
        lambda: model.logprobs(PROMPT),
    ):
        calls, bad = iter(range(1000)), {0}
        with pytest.raises(llmcli.LLMCliError, match="NaN"):
            call()
        assert model._engine().is_idle
    bad = set()
    assert model.batch(prompts, **options, logprobs=True) == expected


def test_log_probabilities_are_those_of_transformers(tiny_llama: Path) -> None:
    theirs = transformers.LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    def expected(text: llmcli.Text) -> np.ndarray:
        token_ids = [*text.prompt_token_ids, *text.token_ids]
        with torch.no_grad():
            logprobs = torch.log_softmax(theirs(torch.tensor([token_ids])).logits[0, :-1].double(), -1).numpy()
        count = len(text.token_ids)
        return logprobs[-count:][np.arange(count), list(text.token_ids)]

    with llmcli.load(tiny_llama, device="cpu", dtype="float32", threads=1) as model:
        given = model.logprobs("The owl was here.")
        assert (given.text, len(given.token_ids)) == ("The owl was here.", 17)
        assert model.tokenizer.encode("The owl was here.") == [*given.prompt_token_ids, *given.token_ids]
        made = model.generate("The owl", seed=1, max_new_tokens=20, top_k=50)
        for text in (given, made):
            np.testing.assert_allclose(text.logprobs, expected(text), atol=1e-3)
        with pytest.raises(llmcli.LLMCliError, match="single token"):
            model.logprobs("")


def test_a_notebook_shows_the_tints(model: llmcli.Model) -> None:
    text = model.generate("He said <b>&", seed=1, max_new_tokens=24)
    for shown in (text, model.logprobs("Once <i>upon</i> a time &amp; there")):
        parser = Parser()
        parser.feed(shown._repr_html_())
        assert [one.text for one in parser.root.all("story")] == [shown.text]
        tokens = parser.root.all("t")
        limits = [0.5, 0.2, 0.05, 0.01]
        levels = {f"l{sum(math.exp(logprob) < limit for limit in limits)}" for logprob in shown.logprobs}
        assert {one.classes[1] for one in tokens} == levels
        style = parser.root.all("style")[0].text
        assert len(set(re.findall(r"\.l(\d)\{background:rgb\((\d+ \d+ \d+)/", style))) == 4
    plain = model.generate(PROMPT, seed=1, max_new_tokens=4, logprobs=False)
    assert f">{plain.text}<" in plain._repr_html_()
