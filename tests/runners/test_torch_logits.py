"""Logits and tokens of the torch runner against transformers' LlamaForCausalLM in float32."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import LLAMA3, VARIANTS
from tiny_models import CONFIG, write_tiny_llama

transformers = pytest.importorskip("transformers")

from llmcli.checkpoint.model import open_model  # noqa: E402
from llmcli.runners.torch.load import load  # noqa: E402
from llmcli.runners.torch.runner import TorchRunner  # noqa: E402
from llmcli.sampling.chain import Sampler  # noqa: E402
from llmcli.sampling.params import SamplingParams  # noqa: E402


@pytest.fixture(params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model", **VARIANTS[request.param])


def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def reference_logits(model: Any, token_ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].numpy()  # [num_tokens, vocab_size]


def relative_error(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(ours - expected).max() / np.abs(expected).max())


def random_ids(length: int, vocab_size: int = CONFIG["vocab_size"], seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def drain(runner: TorchRunner, token_ids: list[int], row: int = 0) -> int:
    return list(runner.prefill(row, token_ids))[-1]


@pytest.fixture
def loaded() -> Callable[..., TorchRunner]:
    return lambda folder, **options: load(open_model(folder), **{"max_seq_len": 512, **options})


def test_prefill_logits_equal_transformers(folder: Path, loaded: Callable[..., TorchRunner]) -> None:
    token_ids = random_ids(100)
    expected = reference_logits(reference(folder), token_ids)
    runner = loaded(folder)
    for length in (1, 2, 33, 100):
        drain(runner, token_ids[:length])
        assert relative_error(runner.logits(0), expected[length - 1]) < 1e-5


def test_token_by_token_logits_equal_transformers(folder: Path, loaded: Callable[..., TorchRunner]) -> None:
    token_ids = random_ids(40)
    expected = reference_logits(reference(folder), token_ids)
    runner = loaded(folder)
    for length in range(1, len(token_ids) + 1):
        assert drain(runner, token_ids[:length]) == 1  # one new token each time: the prefix is kept
        assert relative_error(runner.logits(0), expected[length - 1]) < 1e-5


def test_greedy_tokens_equal_transformers(folder: Path, loaded: Callable[..., TorchRunner]) -> None:
    prompt = random_ids(20)
    model = reference(folder)
    inputs = torch.tensor([prompt])
    expected = model.generate(inputs, max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=-1)
    runner = loaded(folder)
    drain(runner, prompt)
    steps = runner.decode([0], [Sampler(SamplingParams(temperature=0.0), seed=0)])
    ours = [next(steps)[0] for _ in range(64)]
    assert ours == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_agrees_with_prefill_at_once(
    folder: Path, loaded: Callable[..., TorchRunner], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = random_ids(100)
    runner = loaded(folder)
    drain(runner, token_ids)
    at_once = runner.logits(0)
    monkeypatch.setattr("llmcli.runners.torch.runner.PREFILL_CHUNK", chunk)
    other = loaded(folder)
    assert list(other.prefill(0, token_ids)) == [0, *range(chunk, 100, chunk), 100]
    assert relative_error(other.logits(0), at_once) < 1e-5


def test_logits_beyond_the_original_context(tmp_path: Path, loaded: Callable[..., TorchRunner]) -> None:
    """llama3 scaling matters most where the original context of 64 tokens is long past."""
    folder = write_tiny_llama(tmp_path / "model", rope_theta=500000.0, rope_scaling=LLAMA3)
    token_ids = random_ids(500)
    expected = reference_logits(reference(folder), token_ids)[-1]
    runner = loaded(folder)
    drain(runner, token_ids)
    assert relative_error(runner.logits(0), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_checkpoints_are_computed_in_float32(
    dtype: torch.dtype, tmp_path: Path, loaded: Callable[..., TorchRunner]
) -> None:
    folder = write_tiny_llama(tmp_path / "model", dtype=dtype)
    token_ids = random_ids(50)
    runner = loaded(folder)
    drain(runner, token_ids)
    assert relative_error(runner.logits(0), reference_logits(reference(folder), token_ids)[-1]) < 1e-5


def test_bfloat16_stays_close_to_float32(tmp_path: Path, loaded: Callable[..., TorchRunner]) -> None:
    folder = write_tiny_llama(tmp_path / "model", dtype=torch.bfloat16)
    token_ids = random_ids(50)
    runner = loaded(folder, dtype="bfloat16")
    drain(runner, token_ids)
    error = relative_error(runner.logits(0), reference_logits(reference(folder), token_ids)[-1])
    assert 1e-5 < error < 0.05  # it does compute in bfloat16, and does not fall apart


def test_an_untied_head_in_a_tied_config_is_used(tmp_path: Path, loaded: Callable[..., TorchRunner]) -> None:
    """As transformers: two different stored matrices are not tied, whatever the config says."""
    folder = write_tiny_llama(tmp_path / "model", tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    token_ids = random_ids(10)
    runner = loaded(folder)
    drain(runner, token_ids)
    assert relative_error(runner.logits(0), reference_logits(reference(folder), token_ids)[-1]) < 1e-5


def test_published_greedy_text_of_stories260k(stories260k: Path, loaded: Callable[..., TorchRunner]) -> None:
    expected = json.loads((stories260k / "expected_greedy.json").read_text())["token_ids"]
    runner = loaded(stories260k)
    drain(runner, expected[:1])
    steps = runner.decode([0], [Sampler(SamplingParams(temperature=0.0), seed=0)])
    assert [next(steps)[0] for _ in expected[1:]] == expected[1:]
