"""Weights in the form of torch's int4 operator, and products of many tokens with them, widened to bfloat16.

The operator computes in float32. From some ten tokens on it is faster to widen a few tiles at a time and to multiply in
bfloat16.
"""

from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

# Weights widened at a time: 1 MiB in bfloat16, 2 in float32. Half as many are slower, twice as many no faster.
BLOCK_ELEMENTS = 2**19

# Where torch packs in an unknown way, codes are never widened, and any even number of rows is allowed.
_UNKNOWN_TILE_ROWS = 32

_LOW_BITS = 0x0F0F0F0F0F0F0F0F


def pack(codes: Tensor) -> Tensor:
    """Codes in the operator's form.

    Shapes: codes int32 [output_size, input_size], 0 to 15; result uint8 [output_size, input_size / 2]
    """
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.contiguous(), 1)
    return packed


@cache
def tile_rows() -> int | None:
    """Rows of a tile on this processor, None if torch packs differently here.

    A tile has a byte for each input and each row of its first half: that row's code in the low bits, and in the high
    bits the code of the row half a tile below. No document describes this, so it is compared with what torch packs.
    """
    codes = torch.randint(0, 16, (128, 8), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    packed = pack(codes).flatten()
    for rows in (64, 32):
        halves = codes.view(-1, 2, rows // 2, codes.shape[1]).transpose(2, 3)  # [tiles, 2, input_size, rows / 2]
        if torch.equal((halves[:, 0] | halves[:, 1] << 4).flatten().to(torch.uint8), packed):
            return rows
    return None


def paired_rows(low: Tensor, high: Tensor) -> Tensor:
    """Two rows of a matrix for each row of int8 codes, one of low bits and one of high bits: a tile's byte is the code.

    Shapes: low, high [output_size, n], codes of 4 bits or scales; result [2 * output_size, n]; see `paired_sums`
    """
    rows = _rows_together(len(low))
    return torch.stack((low.view(-1, rows, low.shape[1]), high.view(-1, rows, low.shape[1])), dim=1).flatten(0, 2)


def paired_sums(y: Tensor) -> Tensor:
    """Sums of the results of paired rows. Shapes: y [num_tokens, 2 * output_size]; result float32, half as wide"""
    output_size = y.shape[1] // 2
    low, high = y.view(len(y), -1, 2, _rows_together(output_size)).float().unbind(2)
    return (high + low).view(len(y), output_size)


def _rows_together(output_size: int) -> int:
    """How many rows of low bits come before those of high bits: half a tile, or less without a whole one."""
    half = (tile_rows() or _UNKNOWN_TILE_ROWS) // 2
    return half if output_size % half == 0 else 16


def has_whole_tiles(packed: Tensor) -> bool:
    """Whether `multiply` can widen these codes."""
    rows = tile_rows()
    return rows is not None and packed.shape[0] % rows == 0


def multiply(xs: Sequence[Tensor], packed: Tensor, scales: Tensor, group_size: int, num_bits: int) -> list[Tensor]:
    """x @ weight.T for each x, with widened tiles; weight = (code - 8) * scale + zero.

    A byte of a tile holds the codes of two rows. For 8 bits they are `paired_rows`, whose weights are added.
    Shapes: xs [num_tokens, input_size] bfloat16; packed as `pack` makes it; scales bfloat16
            [groups, rows of packed, 2], a scale and a zero each; results [num_tokens, output_size] float32
    """
    if not xs:
        return []
    rows = tile_rows()
    assert rows is not None
    input_size = xs[0].shape[1]
    tiles = packed.view(-1, input_size, rows // 2)
    of_tiles = scales.view(torch.int32).view(len(scales), -1, 2, rows // 2)
    codes_a_byte = 8 // num_bits
    widen = _widen_int8 if num_bits == 8 else _widen_int4
    ys = [torch.empty(len(x), len(tiles), codes_a_byte, rows // 2) for x in xs]
    at_once = max(BLOCK_ELEMENTS // (input_size * codes_a_byte * rows // 2), 1)
    for first in range(0, len(tiles), at_once):
        some = slice(first, first + at_once)
        weight = widen(_side_by_side(tiles[some]), of_tiles[:, some], group_size)
        for x, y in zip(xs, ys, strict=True):
            y[:, some] = (x @ weight).view(len(x), codes_a_byte, -1, rows // 2).transpose(1, 2)
    return [y.flatten(1) for y in ys]


def _side_by_side(tiles: Tensor) -> Tensor:
    """Bytes of some tiles, input by input. Shapes: tiles [tiles, input_size, n]; result [input_size, tiles * n]

    Copying the transposed view takes two to five times as long: its steps are powers of two, which share a few lines of
    the cache.
    """
    num_tiles, input_size, num_bytes = tiles.shape
    pieces = tiles.view(torch.int64).view(-1, num_bytes // 8)
    return pieces.index_select(0, _order(num_tiles, input_size)).view(torch.uint8).view(input_size, -1)


@lru_cache(maxsize=8)  # two sizes of inputs, and the rest of a matrix
def _order(num_tiles: int, input_size: int) -> Tensor:
    return (torch.arange(num_tiles) * input_size + torch.arange(input_size)[:, None]).flatten()


def _widen_int8(codes: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """Weights of bytes that are codes. Shapes: as `_scaled`"""
    step, zero = _first_of_pair(scales[:, :, 0]), _second_of_pair(scales[:, :, 1])
    # (high - 8) * 16 * scale + zero; the zero of the low bits is 8 * scale, which cancels theirs.
    return _scaled(codes, step, zero - 16 * 8 * step, group_size)


def _widen_int4(codes: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """Weights of bytes that are two codes each. Shapes: as `_scaled`, all low bits before all high ones"""
    of_halves = scales.transpose(1, 2)  # [groups, 2, tiles, rows / 2]
    step, zero = _first_of_pair(of_halves), _second_of_pair(of_halves)
    shift = zero - 8 * step
    # The high bits are not shifted: they are 16 times their code. Eight bytes at a time take half as long as single.
    step[:, :, step.shape[2] // 2 :] /= 16
    bytes_of_8 = codes.view(torch.int64)
    both = torch.stack((bytes_of_8 & _LOW_BITS, bytes_of_8 & ~_LOW_BITS), dim=1).view(torch.uint8)
    return _scaled(both.flatten(1), step, shift, group_size)


def _first_of_pair(pairs: Tensor) -> Tensor:
    """The first bfloat16 of each pair. Shapes: pairs int32 [groups, ...]; result float32 [groups, 1, columns]"""
    return (pairs << 16).view(torch.float32).flatten(1).unsqueeze(1)


def _second_of_pair(pairs: Tensor) -> Tensor:
    """The second one. A copy of every second bfloat16 takes several times as long."""
    return (pairs & ~0xFFFF).view(torch.float32).flatten(1).unsqueeze(1)


def _scaled(codes: Tensor, scale: Tensor, shift: Tensor, group_size: int) -> Tensor:
    """code * scale + shift.

    Shapes: codes uint8 [input_size, columns]; scale, shift float32 [groups, 1, columns]; result as codes, bfloat16
    """
    weight = codes.view(-1, group_size, codes.shape[1]).float()  # [groups, group_size, columns]
    torch.addcmul(shift, weight, scale, out=weight)
    return weight.flatten(0, 1).to(torch.bfloat16)
