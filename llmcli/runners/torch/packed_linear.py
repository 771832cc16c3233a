"""Linear layers over int8 and int4 weights that stay packed in memory.

In float32 the weights are widened a block of rows at a time, which need only be right: it is the reference for other
runners. In bfloat16 our own C++ multiplies them (`codes_product.py`). If it cannot be compiled, or does not take a
group size, torch's packed operators do. Those compute in float32: where the processor multiplies bfloat16, many tokens
are multiplied by widened blocks.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.runners.host.llama import Linear
from llmcli.runners.torch import int4_tiles
from llmcli.runners.torch.codes_product import CodesProduct
from llmcli.runners.torch.operators import by_part
from llmcli.runners.torch.precision import multiplies_bfloat16
from llmcli.runners.torch.weights import PackedWeight

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


class WideningProduct:
    """Any weight, in the given precision: widens a block of rows, multiplies it, takes the next."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype):
        self._weight = weight
        self._dtype = dtype
        self._rows = max(1, BLOCK_ELEMENTS // weight.shape[1])

    def __call__(self, x: Tensor, sizes: Sequence[int] = ()) -> Tensor:
        """See `Linear`."""
        return by_part(self.multiply, x, sizes)

    def multiply(self, x: Tensor) -> Tensor:
        """Apply to one part."""
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

    def __call__(self, x: Tensor, sizes: Sequence[int] = ()) -> Tensor:
        """See `Linear`."""
        return by_part(self._multiply_part, x, sizes)

    def _multiply_part(self, x: Tensor) -> Tensor:
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

    def __call__(self, x: Tensor, sizes: Sequence[int] = ()) -> Tensor:
        """See `Linear`; weights are widened once for all long parts."""
        x = x.to(torch.bfloat16)
        xs = [x] if len(sizes) < 2 else [part.clone() for part in torch.split(x, list(sizes))]
        long = [part for part in xs if self._is_long(part)]
        of_long = iter(int4_tiles.multiply(long, self._packed, self._scales, self._group_size, self._num_bits))
        ys = [next(of_long) if self._is_long(part) else self._multiply_short(part) for part in xs]
        return ys[0] if len(ys) == 1 else torch.cat(ys)

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
    """y = x @ weight.T + bias for a packed weight. Where its columns are in another order, so are the inputs."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype):
        self._product = choose_product(weight, dtype)
        self._order = weight.input_order
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor, sizes: Sequence[int] = ()) -> Tensor:
        """See `Linear`."""
        y: Tensor = self._product(x if self._order is None else x.index_select(1, self._order), sizes)
        return y if self._bias is None else y + self._bias


class JoinedLinear:
    """Packed layers of one form with the same input: rows of one matrix, each with the bits of its own matrix."""

    def __init__(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]):
        self._sizes = [weight.shape[0] for weight in weights]
        self._linear = PackedLinear(_joined(weights), None, torch.bfloat16)
        self._biases = [None if bias is None else bias.float() for bias in biases]

    def __call__(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The result of each layer."""
        of_layers = torch.split(self._linear(x, sizes), self._sizes, dim=1)
        return [y if bias is None else y + bias for y, bias in zip(of_layers, self._biases, strict=True)]

    @staticmethod
    def takes(weights: Sequence[PackedWeight], dtype: torch.dtype) -> bool:
        """Whether the weights have one form and our own product, which sums each row by itself."""
        first = weights[0]
        forms = {
            (weight.scheme, weight.shape[1], weight.scales.dtype, weight.zero_points is None) for weight in weights
        }
        is_ordered = any(weight.input_order is not None for weight in weights)
        return len(forms) == 1 and not is_ordered and dtype == torch.bfloat16 and CodesProduct.takes(first)


def choose_product(weight: PackedWeight, dtype: torch.dtype) -> Linear:
    """The fastest form that computes in `dtype`."""
    if dtype == torch.bfloat16 and CodesProduct.takes(weight):
        return CodesProduct(weight)
    if dtype == torch.bfloat16 and math.prod(weight.shape) <= MAX_OPERATOR_WEIGHTS:
        if ChannelInt8Product.takes(weight):
            return ChannelInt8Product(weight)
        if Int4Product.takes(weight):
            return Int4Product(weight)
    return WideningProduct(weight, dtype)


def _joined(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Their rows, one after the other."""
    first = weights[0]
    zero_points = [weight.zero_points for weight in weights if weight.zero_points is not None]
    return PackedWeight(
        first.scheme,
        (sum(weight.shape[0] for weight in weights), first.shape[1]),
        torch.cat([weight.codes for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        torch.cat(zero_points) if zero_points else None,
    )
