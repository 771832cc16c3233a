"""Writes exports of tiny models, and reads them back with nothing but the safetensors library."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from dequantize import dequantize_rows
from safetensors import safe_open
from tiny_models import write_tiny_llama

from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.export_plan import plan_export
from llmcli.checkpoint.model import open_model
from llmcli.quantization.rounding import TensorQuality, unpack_rows, unpack_zero_points
from llmcli.quantization.schemes import ExportOptions, WeightScheme

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def write_model(folder: Path, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Path:
    return write_tiny_llama(folder, dtype=dtype, **{**SIZES, **overrides})


def export(
    source: Path, destination: Path, scheme: WeightScheme, *, replace: bool = False, **options: Any
) -> dict[str, TensorQuality]:
    plan = plan_export(open_model(source), ExportOptions(scheme, **options))
    exporter = Exporter(plan, destination, source.name, replace=replace)
    return exporter.run(exporter.prepare(), lambda done, total: None, lambda name, quality: None)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    return tensors


def dequantized(tensors: dict[str, torch.Tensor], module: str, scheme: WeightScheme) -> torch.Tensor:
    """The float32 weight of a module out of an export's tensors, by our own functions."""
    num_rows, input_size = tensors[f"{module}.weight_shape"].tolist()
    codes = unpack_rows(tensors[f"{module}.weight_packed"].numpy(), scheme.num_bits, input_size)
    zero_points = None
    if not scheme.is_symmetric:
        packed = tensors[f"{module}.weight_zero_point"].numpy()
        zero_points = unpack_zero_points(packed, scheme.num_bits, num_rows)
    scales = tensors[f"{module}.weight_scale"].float().numpy()
    return torch.from_numpy(np.ascontiguousarray(dequantize_rows(codes, scales, zero_points, scheme)))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
