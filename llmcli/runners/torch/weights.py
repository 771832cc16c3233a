"""Weights as torch holds them: plain ones in the type of the run, each checked for NaN, and codes as stored."""

import math
import mmap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcli.checkpoint.formats import PackedLayer, StoredLayer
from llmcli.checkpoint.reader import TensorReader, not_finite
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.quantization.schemes import WeightScheme

STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Elements read and converted at a time: the buffer stays in the cache and touches few pages that are not kept.
CONVERSION_ELEMENTS = 2**20

HUGE_PAGE_BYTES = 2 * 2**20


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight as stored: weight = (code - zero_point) * scale.

    `input_order` has the input that column i belongs to; None if that is input i.
    Shapes: codes uint8 [output_size, input_size] for 8 bits; for 4 bits two codes a byte, the first in the low half;
            a row may be padded. scales [output_size, groups] in their stored type; zero_points uint8
            [output_size, groups], or None for a symmetric scheme; input_order int64 [input_size], or None
    """

    scheme: WeightScheme
    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None
    input_order: Tensor | None = None

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.scheme.group_size or self.shape[1]

    def unpacked(self, rows: slice) -> Tensor:
        """Codes of some rows. Shapes: result uint8 [rows, input_size]."""
        codes = self.codes[rows]
        if self.scheme.num_bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        return codes[:, : self.shape[1]]

    def widened(self, rows: slice) -> Tensor:
        """Weights of some rows. Shapes: result float32 [rows, input_size]."""
        codes = self.unpacked(rows)
        zeros: Tensor | int = self.scheme.offset
        if self.zero_points is not None:
            zeros = self.zero_points[rows].float().unsqueeze(-1)  # [rows, groups, 1]
        grouped = codes.reshape(len(codes), -1, self.group_size).float()
        # In place: with a new block for each step a decoded token takes a sixth longer.
        return grouped.sub_(zeros).mul_(self.scales[rows].float().unsqueeze(-1)).flatten(1)


class TorchWeights:
    """The `WeightForms` of a run in `dtype`."""

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype

    def plain(self, info: TensorInfo, reader: TensorReader) -> Tensor:
        """See `WeightForms.plain`."""
        weight = _read_tensor(reader, info, self._dtype)
        smallest, largest = torch.aminmax(weight)  # one pass, no temporary; NaN wins over every number
        if not (torch.isfinite(smallest) and torch.isfinite(largest)):
            raise not_finite(info)
        return weight

    def joined(self, shape: tuple[int, int], pieces: Iterator[tuple[int, Any]]) -> Tensor:
        """See `WeightForms.joined`."""
        weight = empty_weight(shape, self._dtype)
        for begin, rows in pieces:
            weight[begin : begin + len(rows)] = torch.from_numpy(rows)
        return weight

    def packed(self, layer: PackedLayer, stored: StoredLayer) -> PackedWeight:
        """The same memory as tensors. Scales keep their type: their rounding is part of the quantization."""
        scales = stored.scales.view(np.int16) if stored.scale_dtype == "BF16" else stored.scales
        return PackedWeight(
            layer.scheme,
            layer.shape,
            torch.from_numpy(stored.packed.view(np.uint8)),
            torch.from_numpy(scales).view(STORED_DTYPES[stored.scale_dtype]),
            None if stored.zero_points is None else torch.from_numpy(stored.zero_points),
            None if stored.input_order is None else torch.from_numpy(stored.input_order),
        )


def empty_weight(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Like `torch.empty`, in memory of its own. Where Linux lets programs ask for pages of 2 MiB, this does.

    A decoded token reads all weights, page after page.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _read_tensor(reader: TensorReader, info: TensorInfo, dtype: torch.dtype) -> Tensor:
    """Read straight into the tensor that is kept; where the type differs, piece by piece through a small buffer."""
    weight = empty_weight(info.shape, dtype)
    stored_dtype = STORED_DTYPES[info.dtype]
    if stored_dtype == dtype:
        reader.read_tensor_into(info, _bytes_of(weight))
        return weight
    flat = weight.view(-1)
    piece = torch.empty(min(CONVERSION_ELEMENTS, flat.numel()), dtype=stored_dtype)
    for begin in range(0, flat.numel(), CONVERSION_ELEMENTS):
        part = piece[: min(CONVERSION_ELEMENTS, flat.numel() - begin)]
        reader.read_range_into(info, begin * part.itemsize, _bytes_of(part))
        flat[begin : begin + part.numel()] = part
    return weight


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, as bytes, since numpy has no bfloat16."""
    return tensor.view(-1).view(torch.uint8).numpy().data
