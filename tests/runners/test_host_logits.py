"""Logits and tokens of the torch and the numpy runner against transformers' LlamaForCausalLM in float32."""

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import LLAMA3, VARIANTS
from row_steps import GREEDY, go_on, logits_of, relative_error, run_prompt, single_steps
from tiny_models import CONFIG, write_tiny_llama

transformers = pytest.importorskip("transformers")

from llmcli.checkpoint.model import open_model  # noqa: E402
from llmcli.runners.base import Span  # noqa: E402
from llmcli.runners.numpy.load import load as load_on_numpy  # noqa: E402
from llmcli.runners.stepping import SteppingRunner  # noqa: E402
from llmcli.runners.torch.load import load as load_on_torch  # noqa: E402


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("variant") / "model", **VARIANTS[request.param])


@lru_cache(1)
def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def reference_logits(model: Any, token_ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].numpy()  # [num_tokens, vocab_size]


@lru_cache(1)
def reference_tokens(folder: Path) -> list[int]:
    """64 greedy tokens after a prompt of 20."""
    inputs = torch.tensor([random_ids(20)])
    how = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "eos_token_id": -1}
    return reference(folder).generate(inputs, **how)[0, 20:].tolist()


def random_ids(length: int, vocab_size: int = CONFIG["vocab_size"], seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(runner: SteppingRunner, prompt: list[int], count: int) -> list[int]:
    row = runner.open(prompt, GREEDY)
    first = int(run_prompt(runner, row, prompt).argmax())
    return [first, *go_on(runner, row, count - 1)]


@pytest.fixture(params=[load_on_torch, load_on_numpy], ids=["torch", "numpy"])
def loaded(request: pytest.FixtureRequest) -> Callable[[Path], SteppingRunner]:
    return lambda folder: request.param(open_model(folder), max_seq_len=512)


def test_prefill_logits_equal_transformers(folder: Path, loaded: Callable[[Path], SteppingRunner]) -> None:
    token_ids = random_ids(100)
    expected = reference_logits(reference(folder), token_ids)
    runner = loaded(folder)
    for length in (1, 2, 33, 100):
        assert relative_error(logits_of(runner, token_ids[:length]), expected[length - 1]) < 1e-5


def test_token_by_token_logits_equal_transformers(folder: Path, loaded: Callable[[Path], SteppingRunner]) -> None:
    token_ids = random_ids(40)
    expected = reference_logits(reference(folder), token_ids)
    runner = loaded(folder)
    row = runner.open(token_ids[:1])
    ours = [run_prompt(runner, row, token_ids[:1], choose="none"), *single_steps(runner, row, token_ids[1:])]
    for logits, their_logits in zip(ours, expected, strict=True):
        assert relative_error(logits, their_logits) < 1e-5


def test_hidden_states_equal_transformers(folder: Path, loaded: Callable[[Path], SteppingRunner]) -> None:
    """For a prompt and the tokens after it; transformers has the last layer's only after the final norm."""
    token_ids = random_ids(40)
    with torch.inference_mode():
        expected = reference(folder)(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    runner = loaded(folder)
    row = runner.open(token_ids[:16])
    ours = [runner.hidden_states(Span(row, tuple(token_ids[:16]), "none"))]
    ours += [runner.hidden_states(Span(row, (token_id,), "none")) for token_id in token_ids[16:]]
    states = np.concatenate(ours, axis=1)
    assert len(states) == len(expected)
    for layer, theirs in zip(states[:-1], expected, strict=False):
        assert relative_error(layer, theirs[0].numpy()) < 1e-5


def test_greedy_tokens_equal_transformers(folder: Path, loaded: Callable[[Path], SteppingRunner]) -> None:
    assert greedy(loaded(folder), random_ids(20), 64) == reference_tokens(folder)


def test_logits_beyond_the_original_context(tmp_path: Path, loaded: Callable[[Path], SteppingRunner]) -> None:
    """llama3 scaling matters most where the original context of 64 tokens is long past."""
    folder = write_tiny_llama(tmp_path / "model", rope_theta=500000.0, rope_scaling=LLAMA3)
    token_ids = random_ids(500)
    expected = reference_logits(reference(folder), token_ids)[-1]
    runner = loaded(folder)
    assert relative_error(logits_of(runner, token_ids), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_checkpoints_are_computed_in_float32(
    dtype: torch.dtype, tmp_path: Path, loaded: Callable[[Path], SteppingRunner]
) -> None:
    folder = write_tiny_llama(tmp_path / "model", dtype=dtype)
    token_ids = random_ids(50)
    runner = loaded(folder)
    assert relative_error(logits_of(runner, token_ids), reference_logits(reference(folder), token_ids)[-1]) < 1e-5


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", dtype=torch.bfloat16)
    token_ids = random_ids(50)
    runner = load_on_torch(open_model(folder), max_seq_len=512, dtype="bfloat16")
    error = relative_error(logits_of(runner, token_ids), reference_logits(reference(folder), token_ids)[-1])
    assert 1e-5 < error < 0.05  # it computes in bfloat16, and stays close


def test_an_untied_head_in_a_tied_config_is_used(tmp_path: Path, loaded: Callable[[Path], SteppingRunner]) -> None:
    """As in transformers: two different stored matrices are not tied, even if the config says so."""
    folder = write_tiny_llama(tmp_path / "model", tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    token_ids = random_ids(10)
    runner = loaded(folder)
    assert relative_error(logits_of(runner, token_ids), reference_logits(reference(folder), token_ids)[-1]) < 1e-5


def test_published_greedy_text_of_stories260k(stories260k: Path, loaded: Callable[[Path], SteppingRunner]) -> None:
    expected = json.loads((stories260k / "expected_greedy.json").read_text())["token_ids"]
    assert greedy(loaded(stories260k), expected[:1], len(expected) - 1) == expected[1:]
