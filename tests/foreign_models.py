"""Tiny models as AWQ, GPTQ and compressed-tensors store them, written without any code of ours.

The packers are plain loops, after autoawq's and gptqmodel's own, with which tests/quantization/test_foreign_packers.py
compares them where those libraries are installed.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Codes:
    """A weight as integers. Shapes: codes, groups' zeros and scales as [output_size, ...]; group_of [input_size]"""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    group_of: np.ndarray

    @property
    def weight(self) -> torch.Tensor:
        codes, zeros = self.codes.astype(np.float64), self.zeros.astype(np.float64)
        exact = (codes - zeros[:, self.group_of]) * self.scales.astype(np.float64)[:, self.group_of]
        return torch.from_numpy(exact)


def quantize(weight: torch.Tensor, bits: int, group_size: int, symmetric: bool, group_of: np.ndarray) -> Codes:
    """Round a weight to integers of any quality. Some groups of an asymmetric one have 0 or the largest zero point."""
    values, top = weight.double().numpy(), 2**bits - 1
    num_groups = group_of.max() + 1
    zeros = np.full((len(values), num_groups), (top + 1) // 2)
    scales = np.empty((len(values), num_groups))
    for group in range(num_groups):
        part = values[:, group_of == group]
        if symmetric:
            scales[:, group] = np.abs(part).max(1) / (top // 2)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, group] = (high - low) / top
            zeros[:, group] = np.round(-low / scales[:, group])
            zeros[group::8, group] = 0
            zeros[group + 1 :: 16, group] = top
    scales = scales.astype(np.float16)
    wide = scales.astype(np.float64)[:, group_of]
    codes = np.clip(np.round(values / wide + zeros[:, group_of]), 0, top).astype(np.int64)
    return Codes(codes, zeros, scales, group_of)


def pack(values: np.ndarray, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Along the last dimension, low bits first. Shapes: values [rows, size]; result int32 [rows, ceil(size / per)]"""
    per = 32 // bits
    order = order or list(range(per))
    words = np.zeros((len(values), -(-values.shape[1] // per)), np.uint32)
    for word in range(words.shape[1]):
        for place, column in enumerate(order):
            if word * per + column < values.shape[1]:
                words[:, word] |= (values[:, word * per + column] << (bits * place)).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32))


def awq_tensors(codes: Codes) -> dict[str, torch.Tensor]:
    return {
        "qweight": pack(codes.codes.T, 4, AWQ_ORDER),
        "qzeros": pack(codes.zeros.T, 4, AWQ_ORDER),
        "scales": torch.from_numpy(codes.scales.T.copy()),
    }


def gptq_tensors(codes: Codes, bits: int, version: int) -> dict[str, torch.Tensor]:
    """Version 1 subtracts 1 from each zero point by one subtraction from the whole word, as gptqmodel does."""
    zeros = pack(codes.zeros.T, bits)
    if version == 1:
        zeros = zeros - int(sum(1 << shift for shift in range(0, 32, bits)))
    return {
        "qweight": pack(codes.codes, bits).T.contiguous(),
        "qzeros": zeros,
        "scales": torch.from_numpy(codes.scales.T.copy()),
        "g_idx": torch.from_numpy(codes.group_of.astype(np.int32)),
    }


def packed_tensors(codes: Codes, bits: int, symmetric: bool) -> dict[str, torch.Tensor]:
    """compressed-tensors `pack-quantized`, with the group of each input."""
    tensors = {
        "weight_packed": pack(codes.codes, bits),
        "weight_scale": torch.from_numpy(codes.scales.copy()),
        "weight_shape": torch.tensor(codes.codes.shape),
        "weight_g_idx": torch.from_numpy(codes.group_of.astype(np.int32)),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(codes.zeros.T, bits).T.contiguous()
    return tensors


def write_foreign(
    source: Path,
    folder: Path,
    config: dict[str, Any],
    quantized: Callable[[str, torch.Tensor], Codes | None],
    tensors_of: Callable[[Codes], dict[str, torch.Tensor]],
) -> Path:
    """A copy of a float model with linear layers in another format; `exact(folder)` has the weights they encode."""
    for copy in (folder, exact(folder)):
        shutil.copytree(source, copy)
    tensors = load_file(source / "model.safetensors")
    floats = {name: tensor.float() for name, tensor in tensors.items()}
    kept: dict[str, np.ndarray] = {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        codes = quantized(name, tensors[name])
        if codes is None:
            continue
        floats[name] = codes.weight.float()
        kept |= {f"{name} {part}": values for part, values in vars(codes).items()}
        del tensors[name]
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": tensor for part, tensor in tensors_of(codes).items()}
    save_file(tensors, folder / "model.safetensors")
    save_file(floats, exact(folder) / "model.safetensors")
    np.savez(exact(folder) / "codes.npz", **kept)
    config_json = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config_json, "quantization_config": config}))
    return folder


def codes_of(folder: Path) -> dict[str, Codes]:
    """The weights that `write_foreign` wrote, by the names of the weights."""
    kept = np.load(exact(folder) / "codes.npz")
    names = {key.partition(" ")[0] for key in kept}
    return {name: Codes(**{part: kept[f"{name} {part}"] for part in Codes.__annotations__}) for name in names}


def exact(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-exact")


def write_awq(source: Path, folder: Path, *, group_size: int = 64, keep: str = "\0", **config: Any) -> Path:
    """Layers with `keep` in their names stay as they are."""

    def quantized(name: str, weight: torch.Tensor) -> Codes | None:
        size = weight.shape[1] if group_size == -1 else group_size
        return None if keep in name else quantize(weight, 4, size, False, np.arange(weight.shape[1]) // size)

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
    } | config
    return write_foreign(source, folder, config, quantized, awq_tensors)


def write_gptq(
    source: Path,
    folder: Path,
    *,
    bits: int = 4,
    group_size: int = 64,
    sym: bool = True,
    version: int = 1,
    desc_act: bool = False,
    shares_order: bool = True,
    **config: Any,
) -> Path:
    """Layers of the same inputs have one order, as in gptqmodel, or each has its own."""
    generator = np.random.default_rng(0)
    orders: dict[str, np.ndarray] = {}

    def quantized(name: str, weight: torch.Tensor) -> Codes:
        size = weight.shape[1] if group_size == -1 else group_size
        group_of = np.arange(weight.shape[1]) // size
        if desc_act:
            inputs = re.sub("[qkv]_proj|gate_proj|up_proj", "inputs", name) if shares_order else name
            group_of = orders.setdefault(inputs, generator.permutation(group_of))
        return quantize(weight, bits, size, sym, group_of)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": sym,
        "desc_act": desc_act,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    } | config
    return write_foreign(source, folder, config, quantized, lambda codes: gptq_tensors(codes, bits, version))


def write_fp8(
    source: Path,
    folder: Path,
    *,
    block: tuple[int, int] | None = (128, 128),
    suffix: str = "scale_inv",
    keep: str = "\0",
    **config: Any,
) -> Path:
    """8-bit floats, rounded by torch, as DeepSeek and Qwen publish them. Layers with `keep` in their names stay."""
    for copy in (folder, exact(folder)):
        shutil.copytree(source, copy)
    tensors = load_file(source / "model.safetensors")
    floats = {name: tensor.float() for name, tensor in tensors.items()}
    for name in [name for name in tensors if name.endswith("_proj.weight") and keep not in name]:
        weight = tensors[name].double()
        rows, inputs = (min(size, most) for size, most in zip(block or weight.shape, weight.shape, strict=True))
        scales = torch.stack([
            torch.stack([part.abs().max() / 448 for part in some.split(inputs, 1)]) for some in weight.split(rows, 0)
        ]).float()  # fmt: skip
        spread = scales.double().repeat_interleave(rows, 0).repeat_interleave(inputs, 1)
        spread = spread[: weight.shape[0], : weight.shape[1]]
        tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
        tensors[f"{name}_{suffix}"] = scales if block else scales.view(())
        floats[name] = (tensors[name].double() * spread).float()
    save_file(tensors, folder / "model.safetensors")
    save_file(floats, exact(folder) / "model.safetensors")
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block} | config
    config_json = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config_json, "quantization_config": config}))
    return folder


def write_packed(source: Path, folder: Path, *, bits: int, group_size: int, sym: bool) -> Path:
    """compressed-tensors `pack-quantized` with ordered inputs, as llm-compressor writes it for `actorder: group`."""
    generator = np.random.default_rng(0)

    def quantized(name: str, weight: torch.Tensor) -> Codes:
        group_of = generator.permutation(np.arange(weight.shape[1]) // group_size)
        return quantize(weight, bits, group_size, sym, group_of)

    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": "group", "group_size": group_size}
    group = {"targets": ["Linear"], "weights": weights | {"dynamic": False, "actorder": "group"}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    config |= {"config_groups": {"group_0": group}}
    return write_foreign(source, folder, config, quantized, lambda codes: packed_tensors(codes, bits, sym))


def write_w8a8(source: Path, folder: Path) -> Path:
    """compressed-tensors `int-quantized`."""

    def tensors(codes: Codes) -> dict[str, torch.Tensor]:
        values = torch.from_numpy((codes.codes - 128).astype(np.int8))
        return {"weight": values, "weight_scale": torch.from_numpy(codes.scales.copy())}

    group: dict[str, Any] = {"targets": ["Linear"], "input_activations": {"num_bits": 8, "dynamic": True}}
    group["weights"] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}
    config |= {"config_groups": {"group_0": group}}

    def rows(name: str, weight: torch.Tensor) -> Codes:
        return quantize(weight, 8, weight.shape[1], True, np.zeros(weight.shape[1], int))

    return write_foreign(source, folder, config, rows, tensors)
