"""The KV cache of 8 bits: its rounding against numpy, its memory, and logits against transformers with the same one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import VARIANTS
from row_steps import PROMPT, logits_of, relative_error
from tiny_models import write_tiny_llama

transformers = pytest.importorskip("transformers")

from llmcli.checkpoint.model import open_model  # noqa: E402
from llmcli.runners.host.memory import cache_bytes, plan_memory  # noqa: E402
from llmcli.runners.torch.load import load  # noqa: E402
from llmcli.runners.torch.operators import empty_cache, quantize  # noqa: E402


def rounded(x: np.ndarray) -> np.ndarray:
    """Head vectors in 8 bits: each step of the rule in float32, one operation at a time."""
    cut = np.clip(x.astype(np.float32), np.float32(-65504), np.float32(65504))
    scale = np.abs(cut).max(-1, keepdims=True) / np.float32(127)
    codes = np.clip(np.rint(cut / np.where(scale == 0, np.float32(1), scale)), -127, 127)
    return codes * scale


class RoundingCache(transformers.DynamicCache):
    """Keys and values as 8 bits hold them."""

    def update(self, key_states: Any, value_states: Any, *arguments: Any, **options: Any) -> Any:
        key, value = (torch.from_numpy(rounded(states.numpy())) for states in (key_states, value_states))
        return super().update(key, value, *arguments, **options)


def vectors(kind: str) -> np.ndarray:
    generator = np.random.default_rng(3)
    x = generator.normal(size=(50, 4, 24)).astype(np.float32)
    if kind == "zeros":
        x[::2] = 0.0
    elif kind == "outliers":
        x[..., 7] = 1e4
    elif kind == "beyond float16":
        x *= 1e6
    elif kind == "tiny":
        x *= np.float32(1e-41)
    elif kind == "constant":
        x[:] = -0.3
    elif kind == "ties":
        x = generator.integers(-254, 255, x.shape).astype(np.float32) / 2
        x[..., 0] = 127.0
    return x


@pytest.mark.parametrize("kind", ["normal", "zeros", "outliers", "beyond float16", "tiny", "constant", "ties"])
def test_codes_and_scales_are_those_of_the_rule(kind: str) -> None:
    x = vectors(kind)
    codes, scales = quantize(torch.from_numpy(x))
    assert codes.dtype == torch.int8
    assert scales.dtype == torch.float32
    stood_for = (codes * scales[..., None]).numpy()
    np.testing.assert_array_equal(stood_for, rounded(x))
    cut = np.clip(x.astype(np.float64), -65504, 65504)
    step = np.abs(cut).max(-1, keepdims=True) / 127
    assert (np.abs(stood_for - cut) <= step / 2 * (1 + 1e-5) + 1e-40).all()
    assert int(codes.min()) >= -127


def test_nan_is_not_hidden() -> None:
    x = torch.ones(2, 1, 8)
    x[0, 0, 3] = float("nan")
    codes, scales = quantize(x)
    assert scales.isnan().tolist() == [[True], [False]]
    assert (codes * scales[..., None])[0].isnan().all()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers_with_a_rounding_cache(name: str, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, **VARIANTS[name])
    token_ids = PROMPT[:100]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids]), past_key_values=RoundingCache()).logits[0].numpy()
        plain = model(torch.tensor([token_ids])).logits[0].numpy()
    runner = load(open_model(folder), max_seq_len=200, kv_cache="int8")
    for length in (1, 2, 33, 100):
        cost = relative_error(plain[length - 1], expected[length - 1])
        error = relative_error(logits_of(runner, token_ids[:length]), expected[length - 1])
        print(f"{name}, {length}: {error:.1e} from the reference, which is {cost:.1e} from a float cache")
        assert error < 2e-4  # one element that is rounded to the next code takes 1e-4
        assert cost > 5 * error


def test_a_row_holds_as_many_bytes_as_planned(tmp_path: Path) -> None:
    model = open_model(write_tiny_llama(tmp_path / "model", with_tokenizer=False))
    config = model.config
    for cache_type in ("float32", "bfloat16", "int8"):
        cache = empty_cache(config, 3, cache_type)
        held = sum(array.numel() * array.element_size() for array in cache.arrays)
        for num_tokens in (33, 48):  # whole pages of 16
            assert held == cache_bytes(config, num_tokens, cache_type)
    heads = 2 * config.num_hidden_layers * config.num_key_value_heads
    assert cache_bytes(config, 33, "int8") == heads * 48 * (config.head_dim + 4)
    wide = plan_memory(model, max_seq_len=1000, num_rows=3, dtype="bfloat16")
    narrow = plan_memory(model, max_seq_len=1000, num_rows=3, dtype="bfloat16", kv_cache="int8")
    assert wide.cache_bytes - narrow.cache_bytes == 3 * 1008 * heads * (config.head_dim - 4)


def test_bfloat16_runs_attend_in_float32(tmp_path: Path) -> None:
    """Rounding decoded values to bfloat16 would add half of their own error again."""
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16)
    cache = empty_cache(open_model(folder).config, 1, "int8")
    keys, values = cache.row([0]).seen(0, 0, 5)
    assert keys.dtype == values.dtype == torch.float32
    runner = load(open_model(folder), max_seq_len=200, dtype="bfloat16", kv_cache="int8")
    assert "bfloat16, KV cache int8" in runner.description
    exact = load(open_model(folder), max_seq_len=200)
    assert relative_error(logits_of(runner, PROMPT[:60]), logits_of(exact, PROMPT[:60])) < 0.05
