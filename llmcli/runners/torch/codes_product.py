"""Products with int8 and int4 weights by our own C++, `kernels/cpu/codes_product.cpp`, for any number of tokens.

A token's bits depend on that token alone, and are the same on every processor. Activations have 16 bits.
"""

import ctypes
import platform
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.kernels.cache import OnCompile, say_nothing
from llmcli.kernels.cpp_library import open_library
from llmcli.runners.torch.weights import PackedWeight, empty_weight

STEM = "codes_product"

# What a processor must have for each of `INSTRUCTIONS` of `kernels/cpp_library.py`, best first, in torch's names.
CAPABILITIES = {
    "avx512vnni": ("avx512_vnni", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_cd"),
    "avx512": ("avx512_bw", "avx512_vl", "avx512_dq", "avx512_cd"),
    "avx2": ("avx2", "fma3", "bmi2", "f16c"),
}

# The layout of the source.
TILE_ROWS = 16
STRIP_ROWS = 64
CHUNK_SIZES = (128, 64, 32, 16)


class _Matrix(ctypes.Structure):
    """`CodesMatrix` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zero_points")),
        *((name, ctypes.c_int32) for name in ("num_bits", "num_rows", "num_inputs")),
        *((name, ctypes.c_int32) for name in ("chunk_inputs", "num_chunks", "group_chunks", "num_groups")),
    )


def is_available(on_compile: OnCompile = say_nothing) -> bool:
    """Whether products of this form can run here; compiles them if needed."""
    return library(on_compile) is not None


def instructions() -> str | None:
    """The best set of instructions that this processor has.

    None where nothing was measured: on processors that are not x86, and on those with AMX, which multiply bfloat16 at
    several times the rate of these products.
    """
    has = torch.cpu.get_capabilities()
    if platform.machine() not in ("x86_64", "AMD64") or has.get("amx_bf16", False):
        return None
    return next((name for name, needed in CAPABILITIES.items() if all(has.get(one, False) for one in needed)), None)


class CodesProduct:
    """x @ weight.T for a weight that stays packed; its rows are padded with zeros to whole strips."""

    def __init__(self, weight: PackedWeight):
        functions = library()
        assert functions is not None
        self._multiply = functions.multiply_codes
        self._output_size, self._input_size = weight.shape
        chunk_inputs = _chunk_inputs(weight)
        num_chunks = -(-self._input_size // chunk_inputs)
        num_bits = weight.scheme.num_bits
        row_bytes = num_chunks * chunk_inputs * num_bits // 8
        # Two bytes of a row, then those of the next row of its tile.
        codes = _padded(weight.codes[:, :row_bytes], row_bytes)
        if num_bits == 8:
            codes = codes ^ 128  # around 0, as signed bytes; codes of 4 bits are widened around 8
        tiles = codes.view(torch.int16).view(-1, TILE_ROWS, row_bytes // 2)
        tiles = tiles.transpose(1, 2)
        self._codes = empty_weight(tiles.shape, tiles.dtype).copy_(tiles)  # [tiles, units, TILE_ROWS]
        self._scales = _of_tiles(weight.scales.float())
        self._zero_points = None
        if weight.zero_points is not None:
            self._zero_points = _of_tiles((weight.zero_points.int() - weight.scheme.offset).to(torch.int8))
        self._matrix = _Matrix(
            self._codes.data_ptr(),
            self._scales.data_ptr(),
            None if self._zero_points is None else self._zero_points.data_ptr(),
            num_bits,
            len(self._codes) * TILE_ROWS,
            self._input_size,
            chunk_inputs,
            num_chunks,
            weight.group_size // chunk_inputs if weight.scheme.group_size else num_chunks,
            self._scales.shape[1],
        )

    def __call__(self, x: Tensor, sizes: Sequence[int] = ()) -> Tensor:
        """See `Linear`. All parts are multiplied together, which reads the weights once and changes no bit."""
        x = x.float().contiguous()
        y = torch.empty(len(x), self._matrix.num_rows)
        self._multiply(self._matrix, x.data_ptr(), len(x), y.data_ptr(), torch.get_num_threads())
        return y[:, : self._output_size]

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether the source takes such groups, and can run here."""
        return _chunk_inputs(weight) > 0 and is_available()


_opened: dict[str, ctypes.CDLL | None] = {}  # by set of instructions


def library(on_compile: OnCompile = say_nothing) -> Any:
    """The functions of all sources, for this processor; None if they cannot run here. Compiles them if needed."""
    wanted = instructions()
    if wanted is None:
        return None
    if wanted not in _opened:
        _opened[wanted] = opened = open_library(wanted, on_compile)
        if opened is not None:
            pointer, number = ctypes.c_void_p, ctypes.c_int
            opened.multiply_codes.argtypes = (ctypes.POINTER(_Matrix), pointer, number, pointer, number)
            opened.multiply_codes.restype = None
    return _opened[wanted]


def _chunk_inputs(weight: PackedWeight) -> int:
    """Inputs that share a scale of activations: the largest number that divides a group, 0 if there is none."""
    group_size = weight.scheme.group_size
    return next((size for size in CHUNK_SIZES if group_size is None or group_size % size == 0), 0)


def _padded(rows: Tensor, width: int) -> Tensor:
    """Rows padded to whole strips, and each to `width`. Shapes: rows [n, at most width]"""
    return F.pad(rows, (0, width - rows.shape[1], 0, -len(rows) % STRIP_ROWS)).contiguous()


def _of_tiles(values: Tensor) -> Tensor:
    """Scales or zero points, tile by tile. Shapes: values [output_size, groups]; result [tiles, groups, TILE_ROWS]"""
    groups = values.shape[1]
    return _padded(values, groups).view(-1, TILE_ROWS, groups).transpose(1, 2).contiguous()
