"""The bit layout of compressed-tensors `pack-quantized`: codes in int32, the first code in the lowest bits.

What AWQ and GPTQ store becomes that layout here, code for code.
Source: compressed_tensors.compressors.pack_quantized.helpers; awq.utils.packing_utils; gptqmodel's qlinear. The tests
compare with all three.
"""

import numpy as np

from llmcli.quantization.floats import Array
from llmcli.quantization.schemes import packed_size

_WORD = np.dtype("<i4")

# Where an AWQ word has each of eight neighbouring columns: from low to high they are 0, 2, 4, 6, 1, 3, 5, 7.
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)


def pack_rows(codes: Array, num_bits: int) -> Array:
    """Pack codes along each row; a row's last int32 is filled up with zero bits.

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


def rows_of_columns(packed: Array) -> Array:
    """What GPTQ packs along the inputs of a weight [input_size, output_size]: the same words, in our order.

    Shapes: packed [words, output_size] int32; the result [output_size, words] int32
    """
    return np.ascontiguousarray(np.asarray(packed, dtype=_WORD).T)


def reorder_rows(packed: Array, num_bits: int, order: Array) -> Array:
    """Rows of `pack_rows` whose code i is the one that stood at order[i].

    Shapes: packed [rows, words] int32; order [size] int; the result as packed
    """
    return pack_rows(unpack_rows(packed, num_bits, len(order))[:, order], num_bits)
