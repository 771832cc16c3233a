"""transformers with the compressed-tensors package reads our exports: same weights as ours, sensible logits."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import dequantized, export, read_tensors, write_model
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from llmcli.quantization.config import QuantizationConfig
from llmcli.quantization.schemes import WeightScheme

TOKENS = torch.tensor([[256, 72, 101, 108, 108, 111]])

SYMMETRIC = [
    pytest.param({}, WeightScheme(bits, group), {}, id=f"int{bits}-{group}")
    for bits, group in itertools.product((8, 4), (32, 64, 128, None))
] + [
    pytest.param({}, WeightScheme(4, 128), {"skip": ("layers.0.*(q|k|v)_proj", "down")}, id="skipped"),
    pytest.param({"intermediate_size": 176}, WeightScheme(4, 32), {}, id="channel-layers"),
    pytest.param({"intermediate_size": 178}, WeightScheme(4, 32), {"head_bits": 8}, id="odd-size"),
    pytest.param({"hidden_size": 96, "num_attention_heads": 6}, WeightScheme(8, 64), {}, id="only-some-groups"),
    pytest.param({}, WeightScheme(4, 64), {"head_bits": 8}, id="int8-head"),
    pytest.param({}, WeightScheme(8, 128), {"head_bits": 8}, id="int8-head-same-scheme"),
    pytest.param({"tie_word_embeddings": True}, WeightScheme(4, 64), {"head_bits": 8}, id="int8-head-of-tied"),
    pytest.param({"tie_word_embeddings": True}, WeightScheme(4, 64), {}, id="tied"),
    pytest.param({"dtype": "float16"}, WeightScheme(4, 64), {}, id="float16"),
    pytest.param({"dtype": "float32"}, WeightScheme(8, None), {}, id="float32"),
    pytest.param({}, WeightScheme(8, None), {"shard_bytes": 100_000}, id="shards"),
    pytest.param({"attention_bias": True, "mlp_bias": True}, WeightScheme(4, 128), {}, id="biases"),
]
ASYMMETRIC = [
    pytest.param({}, WeightScheme(4, group, is_symmetric=False), {}, id=str(group)) for group in (32, 64, 128, None)
] + [pytest.param({}, WeightScheme(4, 32, is_symmetric=False), {"skip": ("layers.1.mlp",)}, id="skipped")]


def check(tmp_path: Path, model: dict[str, Any], scheme: WeightScheme, options: dict[str, Any], **load: Any) -> None:
    """Every weight that transformers has after loading is ours, dequantized, and it computes with them."""
    dtype = getattr(torch, model.get("dtype", "bfloat16"))
    sizes = {key: value for key, value in model.items() if key != "dtype"}
    source = write_model(tmp_path / "source", dtype, **sizes)
    folder = tmp_path / "export"
    export(source, folder, scheme, **options)
    theirs, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **load)
    assert not any(loading.values()), loading
    assert theirs.dtype == dtype
    with torch.no_grad():
        logits = theirs(TOKENS).logits.float()  # unpacks layers that are still packed
        exact = AutoModelForCausalLM.from_pretrained(source)(TOKENS).logits.float()
    change = (logits - exact).norm() / exact.norm()
    assert change < (0.05 if scheme.num_bits == 8 else 0.5)

    tensors = read_tensors(folder)
    config_json = json.loads((folder / "config.json").read_text())
    config = QuantizationConfig.from_dict(config_json["quantization_config"], "config.json")
    num_quantized = 0
    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear):
            group = config.groups_of([name], "config.json")[name]
            layer_scheme = None if group is None else group.scheme
            assert (layer_scheme is not None) == (f"{name}.weight_packed" in tensors), name
            if layer_scheme is not None:
                expected = dequantized(tensors, name, layer_scheme).to(dtype)
                assert torch.equal(module.weight, expected), name
                num_quantized += 1
    assert num_quantized == sum(name.endswith(".weight_packed") for name in tensors)


@pytest.mark.parametrize(("model", "scheme", "options"), SYMMETRIC)
def test_symmetric_exports_load_as_they_are(
    tmp_path: Path, model: dict[str, Any], scheme: WeightScheme, options: dict[str, Any]
) -> None:
    check(tmp_path, model, scheme, options)


@pytest.mark.parametrize(("model", "scheme", "options"), ASYMMETRIC)
def test_asymmetric_exports_load_dequantized(
    tmp_path: Path, model: dict[str, Any], scheme: WeightScheme, options: dict[str, Any]
) -> None:
    check(tmp_path, model, scheme, options, quantization_config=CompressedTensorsConfig(dequantize=True))


def test_other_tensors_are_the_source_s_own(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", tie_word_embeddings=True)
    export(source, tmp_path / "export", WeightScheme(4, 64), head_bits=8)
    before, after = read_tensors(source), read_tensors(tmp_path / "export")
    kept = [name for name in before if not name.endswith("_proj.weight")]
    assert "model.embed_tokens.weight" in kept
    for name in kept:
        assert torch.equal(before[name], after[name])
    assert {name.rsplit(".", 1)[1] for name in after.keys() - set(kept)} == {
        "weight_packed",
        "weight_scale",
        "weight_shape",
    }
    assert "lm_head.weight_packed" in after
