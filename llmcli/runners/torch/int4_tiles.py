"""Products of many tokens with weights in the form that torch's int4 operator wants, widened to bfloat16.

The operator computes in float32. From some tens of tokens on it is faster to widen a few tiles at a time and to
multiply in bfloat16.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

# Weights widened at a time: 1 MiB in bfloat16, 2 in float32. Half as many take longer, twice as many as long.
BLOCK_ELEMENTS = 2**19

Plane = tuple[Tensor, Tensor]  # packed codes uint8 [output_size, input_size / 2], scales [groups, output_size, 2]


def pack(codes: Tensor) -> Tensor:
    """Codes in the operator's form. Shapes: codes int32 [output_size, input_size], 0 to 15; result as `Plane`"""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.contiguous(), 1)
    return packed


@cache
def tile_rows() -> int | None:
    """Rows of a tile on this processor, None if torch packs otherwise here.

    A tile has a byte for each input and each row of its first half: that row's code in the low bits, and in the high
    bits the code of the row half a tile below. Nothing documents it, so it is compared with what torch packs.
    """
    codes = torch.randint(0, 16, (128, 8), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    packed = pack(codes).flatten()
    for rows in (64, 32):
        halves = codes.view(-1, 2, rows // 2, codes.shape[1]).transpose(2, 3)  # [tiles, 2, input_size, rows / 2]
        if torch.equal((halves[:, 0] | halves[:, 1] << 4).flatten().to(torch.uint8), packed):
            return rows
    return None


def multiply(x: Tensor, planes: Sequence[Plane], group_size: int, rows: int) -> Tensor:
    """x @ weight.T by way of widened tiles of `rows` rows; weight = (code - 8) * scale + zero, summed over the planes.

    Two planes are the high and the low halves of 8-bit codes: the scale of the first is 16 times that of the second.
    Shapes: x [num_tokens, input_size] bfloat16; result [num_tokens, output_size] float32
    """
    num_tokens, input_size = x.shape
    output_size = planes[0][0].shape[0]
    y = torch.empty(num_tokens, output_size // rows, 2, rows // 2)
    at_once = max(BLOCK_ELEMENTS // (input_size * rows), 1)
    for first in range(0, output_size // rows, at_once):
        tiles = slice(first, first + at_once)
        weight = _widen(planes, group_size, rows, tiles)
        part = (x @ weight).view(num_tokens, 2, -1, rows // 2)
        y[:, tiles] = part.transpose(1, 2)
    return y.view(num_tokens, output_size)


def _widen(planes: Sequence[Plane], group_size: int, rows: int, tiles: slice) -> Tensor:
    """Weights of some tiles. Shapes: result bfloat16 [input_size, 2 * tiles * rows / 2], first all first halves"""
    packed = [_by_input(codes, rows, tiles) for codes, _ in planes]  # [input_size, tiles * rows / 2]
    codes = torch.empty(packed[0].shape[0], 2, packed[0].shape[1], dtype=torch.uint8)
    low, high = codes[:, 0], codes[:, 1]
    scales, shifts = _by_group(planes[-1][1], rows, tiles)
    if len(planes) == 1:
        torch.bitwise_and(packed[0], 15, out=low)
        torch.bitwise_right_shift(packed[0], 4, out=high)
        shifts = shifts - 8 * scales
    else:
        of_high, of_low = packed
        torch.bitwise_left_shift(of_high, 4, out=low).bitwise_or_(of_low & 15)
        torch.bitwise_right_shift(of_low, 4, out=high).bitwise_or_(of_high & 0xF0)
        # (high - 8) * 16 * scale + its zero, and (low - 8) * scale + its zero
        shifts = shifts + _by_group(planes[0][1], rows, tiles)[1] - (16 * 8 + 8) * scales
    weight = codes.view(-1, group_size, 2 * packed[0].shape[1]).float()  # [groups, group_size, ...]
    torch.addcmul(shifts, weight, scales, out=weight)
    return weight.flatten(0, 1).to(torch.bfloat16)


def _by_input(packed: Tensor, rows: int, tiles: slice) -> Tensor:
    """Bytes of some tiles side by side: eight at a time, as single ones take twice as long."""
    input_size = 2 * packed.shape[1]
    return packed.view(torch.int64).view(-1, input_size, rows // 16)[tiles].transpose(0, 1).flatten(1).view(torch.uint8)


def _by_group(scales: Tensor, rows: int, tiles: slice) -> tuple[Tensor, Tensor]:
    """Scales and zeros in the order of `_widen`. Shapes: results float32 [groups, 1, 2 * tiles * rows / 2]"""
    of_tiles = scales.view(len(scales), -1, 2, rows // 2, 2)[:, tiles].transpose(1, 2).float()
    of_rows = of_tiles.flatten(1, 3).unsqueeze(1)  # [groups, 1, rows, 2]
    return of_rows[..., 0].contiguous(), of_rows[..., 1].contiguous()
