"""The bit layout of compressed-tensors `pack-quantized`: codes in int32, the first code in the lowest bits.

Source: compressed_tensors.compressors.pack_quantized.helpers, against which the tests check it.
"""

import numpy as np

from llmcli.quantization.floats import Array
from llmcli.quantization.schemes import packed_size

_WORD = np.dtype("<i4")


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
