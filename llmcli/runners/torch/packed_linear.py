"""Linear layers over int8 and int4 weights that stay packed in memory.

In float32 the weights are widened a block of rows at a time, which need only be right: it is the reference for other
runners. In bfloat16 our own C++ multiplies them (`codes_product.py`). If it cannot be compiled, or does not take a
group size, torch's packed operators do. Those compute in float32: where the processor multiplies bfloat16, many tokens
are multiplied by widened blocks.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.runners.torch import int4_tiles
from llmcli.runners.torch.codes_product import CodesProduct
from llmcli.runners.torch.packed_weight import PackedWeight
from llmcli.runners.torch.precision import multiplies_bfloat16

# Weights widened at a time: a block stays in the cache while it is used.
BLOCK_ELEMENTS = 2**18

# What torch's int8 operator for CPUs takes, without a check: it reads inputs by the 16, or by the 8 without AVX-512,
# beyond the end of a row that is not a multiple. Source: ATen/native/cpu/int8mm_kernel.cpp
INT8_INPUT_MULTIPLE = 16

# What torch's int4 operator for CPUs takes: these groups, and rows by the 16. Source: ATen/native/cpu/int4mm_kernel.cpp
INT4_GROUP_SIZES = (256, 128, 64, 32)
INT4_ROW_MULTIPLE = 16
INT4_OFFSET = 8

# From this many tokens on a product with widened weights is faster: of int8 codes, which bfloat16 holds exactly, so
# only the type changes; of codes of 4 and of 8 bits with groups. One core of an AVX-512 server with bfloat16.
WIDENED_INT8_TOKENS = 12
WIDENED_INT4_TOKENS = {4: 56, 8: 20}
WIDENED_INT8_ELEMENTS = 2**20

# Both operators count the weights of a matrix in 32 bits.
MAX_OPERATOR_WEIGHTS = 2**31 - 1


class Product(Protocol):
    """x @ weight.T for one packed weight, in any form."""

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to x [num_tokens, input_size] float32; result [num_tokens, output_size] float32."""


class WideningProduct:
    """Any weight, in the given precision: widens a block of rows, multiplies it, takes the next."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype):
        self._weight = weight
        self._dtype = dtype
        self._rows = max(1, BLOCK_ELEMENTS // weight.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to x [num_tokens, input_size] float32; result [num_tokens, output_size] float32."""
        x = x.to(self._dtype)
        blocks = (slice(begin, begin + self._rows) for begin in range(0, self._weight.shape[0], self._rows))
        parts = [F.linear(x, self._weight.widened(rows).to(self._dtype)).float() for rows in blocks]
        return torch.cat(parts, dim=1)


class ChannelInt8Product:
    """Symmetric int8 with one scale a row, in bfloat16, by torch's int8 operator; its rows are padded with zeros."""

    def __init__(self, weight: PackedWeight):
        output_size, input_size = weight.shape
        self._padding = -input_size % INT8_INPUT_MULTIPLE
        q = torch.zeros(output_size, input_size + self._padding, dtype=torch.uint8)
        # q = code - 128 in one byte: flipping the highest bit.
        torch.bitwise_xor(weight.unpacked(slice(None)), 128, out=q[:, :input_size])
        self._q = q.view(torch.int8)
        self._scales = weight.scales[:, 0].to(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to x [num_tokens, input_size] float32; result [num_tokens, output_size] float32."""
        x = x.to(torch.bfloat16)
        if self._padding:
            x = F.pad(x, (0, self._padding))
        if len(x) >= WIDENED_INT8_TOKENS and multiplies_bfloat16():
            blocks = torch.split(self._q, max(WIDENED_INT8_ELEMENTS // self._q.shape[1], 1))
            parts = [F.linear(x, block.to(torch.bfloat16)) for block in blocks]
            return torch.cat(parts, dim=1) * self._scales.float()
        return torch._weight_int8pack_mm(x, self._q, self._scales).float()

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether the weight is of this form."""
        scheme = weight.scheme
        return scheme.num_bits == 8 and scheme.group_size is None and scheme.is_symmetric


class Int4Product:
    """int4, and int8 with groups, in bfloat16, by torch's int4 operator, which takes groups.

    It computes (code - 8) * scale + zero. An int8 code is 16 * high + low: two rows whose sum is the wanted one, in the
    same number of bytes. Calling the int8 operator group by group is slower by its calls.
    """

    def __init__(self, weight: PackedWeight):
        codes = weight.unpacked(slice(None)).int()
        group_size = next(size for size in INT4_GROUP_SIZES if weight.group_size % size == 0)
        repeats = weight.group_size // group_size  # a scale of a longer group serves several short ones
        scales = weight.scales.float().repeat_interleave(repeats, dim=1)
        zero_points = torch.full_like(scales, weight.scheme.offset)
        if weight.zero_points is not None:
            zero_points = weight.zero_points.float().repeat_interleave(repeats, dim=1)
        if weight.scheme.num_bits == 4:
            zeros = (INT4_OFFSET - zero_points) * scales
        else:
            zeros = int4_tiles.paired_rows(INT4_OFFSET * scales, (16 * INT4_OFFSET - zero_points) * scales)
            scales = int4_tiles.paired_rows(scales, 16 * scales)
            codes = int4_tiles.paired_rows(codes & 15, codes >> 4)
        self._group_size = group_size
        self._num_bits = weight.scheme.num_bits
        self._packed = int4_tiles.pack(codes)
        self._scales = torch.stack((scales.T, zeros.T), dim=-1).to(torch.bfloat16).contiguous()
        self._can_widen = int4_tiles.has_whole_tiles(self._packed)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to x [num_tokens, input_size] float32; result [num_tokens, output_size] float32."""
        return self.each([x])[0]

    def each(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Apply to each part by itself; weights are widened once for all long ones."""
        xs = [x.to(torch.bfloat16) for x in xs]
        long = [x for x in xs if self._is_long(x)]
        of_long = iter(int4_tiles.multiply(long, self._packed, self._scales, self._group_size, self._num_bits))
        return [next(of_long) if self._is_long(x) else self._multiply_short(x) for x in xs]

    def _is_long(self, x: Tensor) -> bool:
        return len(x) >= WIDENED_INT4_TOKENS[self._num_bits] and self._can_widen and multiplies_bfloat16()

    def _multiply_short(self, x: Tensor) -> Tensor:
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, self._group_size, self._scales)
        return int4_tiles.paired_sums(y) if self._num_bits == 8 else y.float()

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether the operator takes such a shape and such groups."""
        is_grouped = any(weight.group_size % size == 0 for size in INT4_GROUP_SIZES)
        num_codes = math.prod(weight.shape) * weight.scheme.num_bits // 4
        return is_grouped and weight.shape[0] % INT4_ROW_MULTIPLE == 0 and num_codes <= MAX_OPERATOR_WEIGHTS


class PackedLinear:
    """y = x @ weight.T + bias for a packed weight."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype):
        self._product = choose_product(weight, dtype)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to x [num_tokens, input_size] float32; result [num_tokens, output_size] float32."""
        return self.each([x])[0]

    def each(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Apply to each part by itself."""
        product = self._product
        ys = product.each(xs) if isinstance(product, Int4Product | CodesProduct) else [product(x) for x in xs]
        return ys if self._bias is None else [y + self._bias for y in ys]


def choose_product(weight: PackedWeight, dtype: torch.dtype) -> Product:
    """The fastest form that computes in `dtype`."""
    if dtype == torch.bfloat16 and CodesProduct.takes(weight):
        return CodesProduct(weight)
    if dtype == torch.bfloat16 and math.prod(weight.shape) <= MAX_OPERATOR_WEIGHTS:
        if ChannelInt8Product.takes(weight):
            return ChannelInt8Product(weight)
        if Int4Product.takes(weight):
            return Int4Product(weight)
    return WideningProduct(weight, dtype)
