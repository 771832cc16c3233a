"""LoRA adapters on a card: the logits of a model that the test merges."""

from pathlib import Path

import pytest
import torch
from lora_adapters import layer_shapes, write_lora
from quantized import SIZES
from row_steps import PROMPT, logits_of, relative_error
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama

from llmcli.checkpoint.adapter import open_adapter
from llmcli.checkpoint.adapter_merge import merge_adapters
from llmcli.checkpoint.model import open_model

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_adapters_have_the_logits_of_the_merged_model(dtype: torch.dtype, tmp_path: Path) -> None:
    from llmcli.runners.cuda.load.model import load

    sizes = {**SIZES, "num_hidden_layers": 2}
    base = write_tiny_llama(tmp_path / "base", with_tokenizer=False, dtype=dtype, **sizes)
    shapes = layer_shapes(2, sizes["hidden_size"], sizes["intermediate_size"])
    weights = {write_lora(tmp_path / str(seed), shapes, seed=seed, size=0.1): 1.0 - seed / 2 for seed in (0, 1)}
    adapters = [open_adapter(folder, folder.name, weight) for folder, weight in weights.items()]
    merged = write_tiny_llama(tmp_path / "merged", with_tokenizer=False, dtype=dtype, **sizes)
    tensors = load_file(merged / "model.safetensors")
    for module in shapes:
        weight = tensors[f"{module}.weight"].double()
        for folder, count in weights.items():
            factors = load_file(folder / "adapter_model.safetensors")
            a, b = (factors[f"base_model.model.{module}.lora_{name}.weight"].double() for name in "AB")
            weight += b @ a * 2 * count
        tensors[f"{module}.weight"] = weight.to(dtype)
    save_file(tensors, merged / "model.safetensors")
    ours = load(merge_adapters(open_model(base), adapters), max_seq_len=128)
    theirs, plain = (load(open_model(folder), max_seq_len=128) for folder in (merged, base))
    for length in (1, 8, 40, 100):
        expected = logits_of(theirs, PROMPT[:length])
        assert relative_error(logits_of(ours, PROMPT[:length]), expected) < 1e-3
        assert relative_error(logits_of(plain, PROMPT[:length]), expected) > 1e-2
