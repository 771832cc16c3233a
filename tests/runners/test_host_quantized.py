"""Quantized models on the CPU: both runners against transformers in float32, bfloat16 against our own float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import write_tiny_llama

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from compressed_tensors.quantization import QuantizationArgs  # noqa: E402
from quantized import SCHEMES, SIZES, export  # noqa: E402
from row_steps import PROMPT, logits_of, relative_error  # noqa: E402

from llmcli.checkpoint.model import open_model  # noqa: E402
from llmcli.quantization.schemes import ExportOptions, WeightScheme  # noqa: E402
from llmcli.runners.numpy.load import load as load_on_numpy  # noqa: E402
from llmcli.runners.torch.load import load  # noqa: E402


def reference_logits(folder: Path, dequantize: bool) -> np.ndarray:
    config = transformers.CompressedTensorsConfig(dequantize=True) if dequantize else None
    extra = {"quantization_config": config} if config else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **extra)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT[:60]])).logits[0, -1].float().numpy()


def our_logits(folder: Path, dtype: str = "float32") -> np.ndarray:
    """The torch runner's; in float32 the numpy runner has the same."""
    model = open_model(folder)
    logits = logits_of(load(model, max_seq_len=128, dtype=dtype), PROMPT[:60])
    if dtype == "float32":
        assert relative_error(logits_of(load_on_numpy(model, max_seq_len=128), PROMPT[:60]), logits) < 1e-5
    return logits


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "model"
    return write_tiny_llama(folder, dtype=torch.bfloat16, with_tokenizer=False, **SIZES)


@pytest.fixture(scope="module")
def original_float32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For asymmetric schemes: transformers rounds the weights it widens from them to the type of their scales."""
    folder = tmp_path_factory.mktemp("original32") / "model"
    return write_tiny_llama(folder, with_tokenizer=False, **SIZES)


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_equal_transformers(name: str, original: Path, original_float32: Path, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    original = original if scheme.is_symmetric else original_float32
    folder = export(original, tmp_path / "export", ExportOptions(scheme))
    expected = reference_logits(folder, dequantize=not scheme.is_symmetric)
    assert relative_error(our_logits(folder), expected) < 1e-3
    assert relative_error(our_logits(original), expected) > 1e-3  # it is the quantized model that is compared


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_int8_head_equals_transformers(is_tied: bool, tmp_path: Path) -> None:
    sizes = {**SIZES, "tie_word_embeddings": is_tied}
    source = write_tiny_llama(tmp_path / "source", dtype=torch.float16, with_tokenizer=False, **sizes)
    folder = export(source, tmp_path / "export", ExportOptions(WeightScheme(8, 128), head_bits=8))
    assert relative_error(our_logits(folder), reference_logits(folder, dequantize=False)) < 1e-3


def test_channel_fall_back_and_skipped_layers_equal_transformers(tmp_path: Path) -> None:
    sizes = {**SIZES, "intermediate_size": 176, "attention_bias": True}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **sizes)
    options = ExportOptions(WeightScheme(8, 128), skip=(r"layers\.1\..*q_proj", "up_proj"))
    folder = export(source, tmp_path / "export", options)
    assert open_model(folder).tensors.packed["model.layers.0.mlp.down_proj"].scheme.group_size is None
    assert relative_error(our_logits(folder), reference_logits(folder, dequantize=False)) < 1e-3


def write_by_another_hand(
    source: Path,
    folder: Path,
    arguments: QuantizationArgs,
    ignore: list[str],
    form: str = "pack-quantized",
    input_activations: QuantizationArgs | None = None,
) -> Path:
    """A model quantized and saved by compressed-tensors itself, as llm-compressor saves it."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    targets = [r"re:.*self_attn.*_proj$", r"re:.*mlp.*"]
    scheme = QuantizationScheme(targets=targets, weights=arguments, input_activations=input_activations)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignore, format=form)
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        weight = module.weight.float()
        if arguments.type == "float":
            blocks = module.weight_scale.shape if module.weight_scale.ndim == 2 else (1, 1)
            parts = weight.view(blocks[0], weight.shape[0] // blocks[0], blocks[1], weight.shape[1] // blocks[1])
            module.weight_scale.data.copy_((parts.abs().amax((1, 3)) / 448).view(module.weight_scale.shape))
            continue
        grouped = weight.view(len(weight), -1, arguments.group_size or weight.shape[1])
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        steps = 2**arguments.num_bits - 1
        scale = torch.maximum(high, -low) * 2 / steps if arguments.symmetric else (high - low) / steps
        module.weight_scale.data.copy_(scale)
        if not arguments.symmetric:
            zero = torch.round(-low / scale) - 2 ** (arguments.num_bits - 1)
            module.weight_zero_point.data.copy_(zero.clamp(-(2 ** (arguments.num_bits - 1)), steps // 2))
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=form)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_bits": 8, "strategy": "channel", "symmetric": True},
        {"num_bits": 8, "strategy": "group", "group_size": 64, "symmetric": True},
        {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True},
        {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False},
        {"num_bits": 8, "strategy": "group", "group_size": 128, "symmetric": False},
    ],
    ids=str,
)
def test_models_by_others(arguments: dict[str, Any], original: Path, original_float32: Path, tmp_path: Path) -> None:
    original = original if arguments["symmetric"] else original_float32
    ignore = ["lm_head", r"re:.*layers\.0\.mlp.*"]
    folder = write_by_another_hand(original, tmp_path / "other", QuantizationArgs(**arguments), ignore)
    model = open_model(folder)
    assert "model.layers.0.mlp.up_proj" not in model.tensors.packed
    assert model.tensors.packed["model.layers.1.mlp.up_proj"].scheme.num_bits == arguments["num_bits"]
    expected = reference_logits(folder, dequantize=not arguments["symmetric"])
    assert relative_error(our_logits(folder), expected) < 1e-3
    assert relative_error(our_logits(folder, "bfloat16"), expected) < 0.1


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_w8a8_models_by_others(
    symmetric: bool, dynamic: bool, original: Path, original_float32: Path, tmp_path: Path
) -> None:
    """Activations stay unquantized, so the reference is the model with its weights widened."""
    arguments = QuantizationArgs(num_bits=8, strategy="channel", symmetric=symmetric)
    activations = QuantizationArgs(num_bits=8, strategy="token" if dynamic else "tensor", dynamic=dynamic)
    source = original if symmetric else original_float32
    folder = tmp_path / "w8a8"
    write_by_another_hand(source, folder, arguments, ["lm_head"], "int-quantized", activations)
    model = open_model(folder)
    assert model.tensors.unused == ()
    assert model.notes == (
        "made for 8-bit activations; llmcli uses its 8-bit weights and does not round activations to 8 bits",
    )
    assert {layer.format.name for layer in model.tensors.packed.values()} == {"compressed-tensors int-quantized"}
    expected = widened_logits(folder, source)
    assert relative_error(our_logits(folder), expected) < 1e-5
    assert relative_error(our_logits(folder, "bfloat16"), expected) < 0.1


@pytest.mark.parametrize(
    "arguments",
    [
        {"strategy": "tensor"},
        {"strategy": "channel"},
        {"strategy": "block", "block_structure": [64, 128]},
    ],
    ids=lambda arguments: arguments["strategy"],
)
def test_fp8_models_by_others(arguments: dict[str, Any], original: Path, tmp_path: Path) -> None:
    weights = QuantizationArgs(num_bits=8, type="float", symmetric=True, **arguments)
    activations = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
    folder = tmp_path / "fp8"
    write_by_another_hand(original, folder, weights, ["lm_head"], "float-quantized", activations)
    model = open_model(folder)
    assert (model.tensors.unused, len(model.tensors.scaled), len(model.notes)) == ((), 7 * 3, 1)
    expected = widened_logits(folder, original)
    assert relative_error(our_logits(folder), expected) < 1e-5
    assert relative_error(our_logits(folder, "bfloat16"), expected) < 0.1
    assert relative_error(our_logits(original), expected) > 1e-3


def widened_logits(folder: Path, source: Path) -> np.ndarray:
    """transformers' logits of a model's 8-bit weights alone, (q - zero) * scale in float64, by plain torch."""
    tensors = load_file(folder / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    widened = 0
    for name, parameter in model.named_parameters():
        if f"{name}_scale" in tensors:
            zero = tensors.get(f"{name}_zero_point", torch.tensor(0))
            scale = tensors[f"{name}_scale"].double()
            if scale.ndim == 2:  # of blocks, rows or all; compressed-tensors has blocks of 64 x 128 here
                rows, inputs = (
                    size if count == 1 else -(-size // count)
                    for size, count in zip(parameter.shape, scale.shape, strict=True)
                )
                scale = scale.repeat_interleave(rows, 0).repeat_interleave(inputs, 1)
            parameter.data = ((tensors[name].double() - zero.double()) * scale).float()
            widened += 1
    assert widened == 7 * model.config.num_hidden_layers
    with torch.inference_mode():
        return model(torch.tensor([PROMPT[:60]])).logits[0, -1].numpy()
