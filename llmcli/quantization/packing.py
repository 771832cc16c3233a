"""The bit layout of compressed-tensors `pack-quantized`: codes in int32, the first code in the lowest bits.

Converts AWQ and GPTQ layouts to it, code for code.
Source: compressed_tensors.compressors.pack_quantized.helpers; awq.utils.packing_utils; gptqmodel's qlinear. The tests
compare with all three.
"""

import numpy as np

from llmcli.quantization.floats import Array
from llmcli.quantization.schemes import packed_size

_WORD = np.dtype("<i4")

# The shift in an AWQ word of each of eight neighbouring columns; from low to high they are 0, 2, 4, 6, 1, 3, 5, 7.
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)

# A block stays in a core's cache: inputs of AWQ, and words along the inputs, which fill a cache line.
_BLOCK_INPUTS = 256
_BLOCK_WORDS = 16


def pack_rows(codes: Array, num_bits: int) -> Array:
    """Pack codes along each row; a row's last int32 is padded with zero bits.

    Shapes: codes [rows, size] uint8; the result [rows, packed_size(size, num_bits)] int32, little-endian.
    """
    num_rows, size = codes.shape
    codes_per_word = 32 // num_bits
    width = packed_size(size, num_bits) * codes_per_word
    if width != size:
        codes = np.pad(codes, ((0, 0), (0, width - size)))
    codes = np.ascontiguousarray(codes)
    if num_bits == 4:
        pairs = codes.view("<u2")  # the first code of two in the lower byte
        codes = (pairs | (pairs >> 4)).astype(np.uint8)  # keeps that byte: both codes side by side
    return codes.view(_WORD)


def unpack_rows(packed: Array, num_bits: int, size: int) -> Array:
    """The codes of `pack_rows`. Shapes: packed [rows, words] int32; the result [rows, size] uint8."""
    codes = np.ascontiguousarray(packed, dtype=_WORD).view(np.uint8)
    if num_bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(len(codes), -1)
    return codes[:, :size]


def pack_zero_points(zero_points: Array, num_bits: int) -> Array:
    """Pack zero points along the rows of the weight, as the format does.

    Shapes: zero_points [rows, groups] uint8; the result [packed_size(rows, num_bits), groups] int32.
    """
    return np.ascontiguousarray(pack_rows(zero_points.T, num_bits).T)


def unpack_zero_points(packed: Array, num_bits: int, num_rows: int) -> Array:
    """The zero points of `pack_zero_points`. Shapes: packed [words, groups] int32; the result [num_rows, groups]."""
    return unpack_rows(packed.T, num_bits, num_rows).T


def unpack_awq_columns(packed: Array) -> Array:
    """Codes of 4 bits that AWQ (gemm) packs along the columns, as rows.

    Shapes: packed [num_rows, columns / 8] int32; the result [columns, num_rows] uint8
    """
    words = np.ascontiguousarray(np.asarray(packed, dtype=_WORD).T).view(np.uint32)  # [columns / 8, num_rows]
    codes = np.empty((len(words), len(_AWQ_SHIFTS), words.shape[1]), np.uint8)
    for column, shift in enumerate(_AWQ_SHIFTS):
        codes[:, column] = (words >> np.uint32(shift)) & np.uint32(15)
    return codes.reshape(-1, words.shape[1])


def rows_of_awq(packed: Array) -> Array:
    """AWQ's (gemm) words, packed along the outputs of a weight [input_size, output_size], in our order.

    Eight words of eight inputs are a square of codes, which is transposed in three steps: swap halves of words, then
    halves of halves, then single codes. Code by code it takes ten times as long.
    Shapes: packed [input_size, output_size / 8] int32; the result [output_size, ceil(input_size / 8)] int32
    """
    num_rows, words = packed.shape
    rows = np.empty((words, 8, -(-num_rows // 8)), np.uint32)
    for begin in range(0, num_rows, _BLOCK_INPUTS):
        block = np.asarray(packed[begin : begin + _BLOCK_INPUTS], dtype=_WORD)
        padded = np.pad(block, ((0, -len(block) % 8), (0, 0)))
        squares = padded.view(np.uint32).reshape(-1, 8, words)  # [input words, inputs, output words]
        _turn(squares)
        # Word p of a square has eight inputs of the column that AWQ keeps at place p.
        first = begin // 8
        for column, shift in enumerate(_AWQ_SHIFTS):
            rows[:, column, first : first + len(squares)] = squares[:, shift // 4].T
    return rows.reshape(-1, rows.shape[2]).view(_WORD)


def _turn(squares: Array) -> None:
    """Transpose squares of 8 x 8 codes of 4 bits in place. Shapes: squares uint32 [.., 8, ..], eight codes a word"""
    changed = np.empty_like(squares[:, 0])
    for shift, mask in ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F)):
        distance = shift // 4
        for first in range(8):
            if first & distance == 0:
                low, high = squares[:, first], squares[:, first + distance]
                np.right_shift(low, np.uint32(shift), out=changed)
                changed ^= high
                changed &= np.uint32(mask)
                high ^= changed
                changed <<= np.uint32(shift)
                low ^= changed


def rows_of_columns(packed: Array) -> Array:
    """GPTQ's words, packed along the inputs of a weight [input_size, output_size]: the same words, in our order.

    Shapes: packed [words, output_size] int32; the result [output_size, words] int32
    """
    rows = np.empty(packed.shape[::-1], _WORD)
    for begin in range(0, len(packed), _BLOCK_WORDS):
        rows[:, begin : begin + _BLOCK_WORDS] = packed[begin : begin + _BLOCK_WORDS].T
    return rows


def reorder_rows(packed: Array, num_bits: int, order: Array) -> Array:
    """Rows of `pack_rows` reordered: code i is the old code order[i].

    Shapes: packed [rows, words] int32; order [size] int; the result as packed
    """
    # One column of codes at a time: numpy picks single bytes out of a row ten times as slowly.
    columns = rows_of_columns(packed).view(np.uint32)  # [words, rows]
    codes_per_word, mask = 32 // num_bits, np.uint32((1 << num_bits) - 1)
    reordered = np.zeros_like(columns)
    for place, source in enumerate(order.tolist()):
        code = columns[source // codes_per_word] >> np.uint32(num_bits * (source % codes_per_word))
        reordered[place // codes_per_word] |= (code & mask) << np.uint32(num_bits * (place % codes_per_word))
    return rows_of_columns(reordered.view(_WORD))
