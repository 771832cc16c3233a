"""The kernels of the CUDA runner, by numpy in float32, on arrays in host memory."""

import ctypes
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from llmcli.kernels.chunks import num_chunks  # noqa: E402
from llmcli.kernels.gemv import GATED_SCALE, NextRows, RowNorm  # noqa: E402
from llmcli.kernels.repack import NOT_HALF, row_bytes  # noqa: E402
from llmcli.kernels.tiles import HALF_ROWS, TILE_ROWS, TiledMatrix, lifted  # noqa: E402
from llmcli.quantization.rounding import E4M3_VALUES, unpack_zero_points, widen  # noqa: E402

LARGEST_UNSCALED = 2.0**15


def on_host(array: Any) -> np.ndarray:
    """The memory of a cupy array on host memory."""
    itemsize = array.dtype.itemsize
    span = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)) + itemsize
    buffer = (ctypes.c_char * span).from_address(array.data.ptr)
    return np.ndarray(array.shape, array.dtype, buffer, strides=array.strides)


def floats(array: Any) -> np.ndarray:
    return floats_of(on_host(array))


def floats_of(values: np.ndarray) -> np.ndarray:
    return widen(values, "BF16") if values.dtype == np.uint16 else values.astype(np.float32)


def store(target: Any, values: np.ndarray) -> None:
    out = on_host(target)
    if out.dtype == np.uint16:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        out[:] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to nearest even
    else:
        out[:] = values


def allocate(num_bytes: int) -> Any:
    # With old content, here NaN: nothing may rely on zeros.
    memory = np.full(num_bytes + 256, 0xFF, np.uint8)
    shift = -memory.ctypes.data % 256
    unowned = cupy.cuda.UnownedMemory(memory.ctypes.data, len(memory), memory, 0)
    return cupy.cuda.MemoryPointer(unowned, shift)


def tile_bytes(rows: np.ndarray, num_units: int) -> np.ndarray:
    """Rows of bytes [num_rows, width], padded by the caller to whole tiles and units, in the order of tile.cuh."""
    tiles = len(rows) // TILE_ROWS
    cut = rows.reshape(tiles, 2, 8, num_units, 4, 16)  # tile, v, g, unit, t, byte
    return cut.transpose(0, 3, 1, 2, 4, 5).reshape(tiles, num_units, 1024)


def row_bytes_of(tiles: np.ndarray) -> np.ndarray:
    """The inverse. Shapes: tiles uint8 [num_tiles, num_units, 1024]; result [16 * num_tiles, 64 * num_units]."""
    num_tiles, num_units, _ = tiles.shape
    cut = tiles.reshape(num_tiles, num_units, 2, 8, 4, 16).transpose(0, 2, 3, 1, 4, 5)
    return cut.reshape(num_tiles * TILE_ROWS, num_units * 64)


def weights_of(matrix: TiledMatrix) -> np.ndarray:
    """Shapes: result float32 [padded rows, num_inputs]."""
    layout = matrix.layout
    rows = np.ascontiguousarray(row_bytes_of(on_host(matrix.tiles)))
    if layout.weight_type == "float32":
        return rows.view(np.float32)[:, : layout.num_inputs]
    if layout.weight_type == "float16":
        return rows.view(np.float16)[:, : layout.num_inputs].astype(np.float32)
    if layout.weight_type == "bfloat16":
        return widen(rows.view(np.uint16), "BF16")[:, : layout.num_inputs]
    codes = rows
    if layout.weight_type == "int4":
        codes = np.stack((rows & 15, rows >> 4), axis=-1).reshape(len(rows), -1)
    codes = codes[:, : layout.num_inputs]
    codes = E4M3_VALUES[codes] if layout.weight_type == "fp8" else codes.astype(np.float32)
    group_of = np.arange(layout.num_inputs) // (layout.group_size or layout.num_inputs)

    def spread(array: Any) -> np.ndarray:  # [tile, group, 16] or [tile, group, 2] -> [rows, num_inputs]
        values = floats(array).transpose(0, 2, 1).reshape(-1, array.shape[1])
        return values.repeat(len(rows) // len(values), axis=0)[:, group_of]

    zeros = {"int8": 128, "int4": 8, "fp8": 0}[layout.weight_type]
    scales = matrix.scales
    if matrix.widening == "lifted":
        pairs = on_host(scales).view(np.float16).reshape(*scales.shape[:2], HALF_ROWS, 2).swapaxes(2, 3)
        own = (pairs.astype(np.float32) * np.float32(matrix.unlift)).reshape(scales.shape)
        of_rows = own.transpose(0, 2, 1).reshape(len(rows), -1)[:, group_of]
    else:
        of_rows = spread(scales)
    return (codes - (zeros if matrix.zero_points is None else spread(matrix.zero_points))) * of_rows


def _target_halves(segment: Any) -> list[int]:
    return [segment.first_half + index * segment.half_step for index in range(segment.num_halves)]


def repack(device: Any, *, source: Any, source_type: str, segment: Any, matrix: TiledMatrix, flags: Any = None) -> None:
    layout = matrix.layout
    raw = on_host(source).reshape(segment.num_rows, row_bytes(source_type, layout.num_inputs))
    fill = 0
    if layout.has_codes:
        fill = 128 if layout.weight_type == "int8" else 0x88
        rows = raw
    elif layout.weight_type == "fp8":
        rows = raw
        if flags is not None and (rows & 0x7F == 0x7F).any():
            on_host(flags)[0] |= 1
    else:
        stored = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
        typed = raw.view(stored[source_type])
        values = widen(typed, "BF16") if source_type == "bfloat16" else typed.astype(np.float32)
        if flags is not None and not np.isfinite(values).all():
            on_host(flags)[0] |= 1
        converted = cupy_like(values.shape, stored[layout.weight_type])
        store(converted, values)
        rows = on_host(converted).view(np.uint8)
    padded = np.full((segment.num_halves * HALF_ROWS, layout.num_units * 64), fill, np.uint8)
    width = min(rows.shape[1], padded.shape[1])
    padded[: len(rows), :width] = rows[:, :width]
    tiles = on_host(matrix.tiles)
    halves = tiles.reshape(-1, layout.num_units, 2, 512).swapaxes(1, 2)  # a view: tile, half, unit, bytes
    for half, eight_rows in zip(_target_halves(segment), padded.reshape(-1, HALF_ROWS, padded.shape[1]), strict=True):
        cut = eight_rows.reshape(HALF_ROWS, layout.num_units, 64).swapaxes(0, 1)
        halves[half // 2, half % 2] = cut.reshape(layout.num_units, 512)


def cupy_like(shape: tuple[int, ...], dtype: Any) -> Any:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return cupy.ndarray(shape, dtype, allocate(max(size, 1)))


def repack_scales(
    device: Any, *, source: Any, group_size: int | None, segment: Any, matrix: TiledMatrix, flags: Any = None
) -> None:
    if flags is not None and not np.isfinite(floats(source)).all():
        on_host(flags)[0] |= 1
    if flags is not None:
        sizes = np.abs(floats(source))
        found, is_outside = on_host(flags), ((sizes < 2.0**-17) | (sizes > 65504)) & (sizes > 0)
        found[0] |= NOT_HALF * int(source.dtype != np.float16 and is_outside.any())
        found[1] = max(found[1], sizes.max().view(np.int32))
    _spread_groups(on_host(source), group_size, segment, matrix, on_host(matrix.scales))


def lift_scales(device: Any, *, matrix: TiledMatrix) -> None:
    assert matrix.widening == "lifted"
    scales = lifted(floats(matrix.scales).astype(np.float64), matrix.power)
    on_host(matrix.scales)[:] = scales.view(matrix.scales.dtype)


def repack_zero_points(device: Any, *, source: Any, group_size: int | None, segment: Any, matrix: TiledMatrix) -> None:
    bits = 8 if matrix.layout.weight_type == "int8" else 4
    zeros = unpack_zero_points(on_host(source), bits, segment.num_rows)
    _spread_groups(zeros, group_size, segment, matrix, on_host(matrix.zero_points))


def _spread_groups(
    values: np.ndarray, group_size: int | None, segment: Any, matrix: TiledMatrix, out: np.ndarray
) -> None:
    layout = matrix.layout
    in_half = out.shape[2] // 2  # values of a half tile
    assert values.shape[0] == -(-segment.num_rows * in_half // HALF_ROWS)
    stored = layout.group_size or layout.num_inputs
    begins = np.arange(layout.num_groups) * stored // (group_size or max(layout.num_inputs, stored))
    wide = values[:, np.minimum(begins, values.shape[1] - 1)]
    padded = np.zeros((segment.num_halves * in_half, layout.num_groups), values.dtype)
    padded[: len(wide)] = wide
    for half, its_rows in zip(_target_halves(segment), padded.reshape(-1, in_half, layout.num_groups), strict=True):
        begin = half % 2 * in_half
        out[half // 2, :, begin : begin + in_half] = its_rows.T


# Operations


def normed(x: np.ndarray, weight: Any, eps: float) -> np.ndarray:
    return floats(weight) * x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(eps))


def product(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """x @ weights.T one row at a time: a row's bits must not depend on the number of rows."""
    return np.stack([weights @ row for row in x])


def embedding(device: Any, *, table: TiledMatrix, token_ids: Any, rows: Any = None, out: Any) -> None:
    values, ids = weights_of(table), on_host(token_ids)
    if rows is None:
        store(out, values[ids])
        return
    lanes = on_host(rows)
    is_used = lanes >= 0
    store(out, np.where(is_used[:, None], values[np.where(is_used, ids[lanes], 0)], np.float32(0)))


def gather_columns(device: Any, *, x: Any, order: Any, out: Any) -> None:
    assert np.array_equal(np.sort(on_host(order)), np.arange(x.shape[1]))
    store(out, floats(x)[:, on_host(order)])


def _gated(gate_up: np.ndarray, width: int) -> np.ndarray:
    pairs = gate_up.reshape(len(gate_up), -1, 2, HALF_ROWS)
    gate, up = (pairs[:, :, part].reshape(len(gate_up), -1)[:, :width] for part in (0, 1))
    return gate / (1 + np.exp(-gate)) * up


def staged(x: np.ndarray, norm_weight: Any = None, eps: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Rows rounded to fp16, times a norm's weights or not, over the power of two of each; and the rows' scales."""
    values = x if norm_weight is None else x * floats(norm_weight)
    largest = np.abs(values).max(axis=1)
    is_extreme = (largest > LARGEST_UNSCALED) | ((largest > 0) & (largest < 2.0**-8))
    powers = np.where(is_extreme, np.ldexp(1.0, np.frexp(largest)[1] - 15), 1.0).astype(np.float32)
    factors = 1.0 if norm_weight is None else 1 / np.sqrt(np.mean(x * x, axis=1) + np.float32(eps))
    return (values / powers[:, None]).astype(np.float16).astype(np.float32), (powers * factors).astype(np.float32)


def as_gated(gate_up: np.ndarray, width: int) -> np.ndarray:
    """silu(gate) * up of tiles, as it is stored in fp16. Shapes: gate_up [n, 16 * num_tiles]; result [n, width]"""
    return np.clip(_gated(gate_up, width) / GATED_SCALE, -65504, 65504)


def chunks_of(matrix: TiledMatrix, values: np.ndarray, scales: np.ndarray, bias: Any, num_chunks: int) -> list[Any]:
    """The sums of each chunk of the inputs, times the rows' scales; the first with the bias."""
    layout, weights = matrix.layout, weights_of(matrix)
    num_spans = -(-layout.num_inputs // 128)
    ends = [num_spans * chunk // num_chunks * 128 for chunk in range(num_chunks + 1)]
    sums = []
    for begin, end in pairwise(ends):
        sums.append(product(values[:, begin:end], weights[:, begin:end]) * scales[:, None])
    if bias is not None:
        sums[0] = sums[0] + floats(bias)
    return sums


def gemv(
    device: Any,
    *,
    matrix: TiledMatrix,
    x: Any,
    out: Any,
    row_scales: Any = None,
    norm: RowNorm | None = None,
    bias: Any = None,
    epilogue: str = "store",
    next_rows: NextRows | None = None,
) -> None:
    values = floats(x)
    scales = np.ones(len(values), np.float32) if row_scales is None else floats(row_scales)
    if norm is not None:
        rounded, scales = staged(floats(norm.hidden), norm.weight, norm.eps)
        assert (rounded == values).all()  # of rows that need no power of two
        assert (floats(norm.sums) == tile_sums(floats(norm.hidden), norm.weight)).all()
    first, *others = chunks_of(matrix, values, scales, bias, num_chunks(matrix.layout, is_gated=epilogue == "swiglu"))
    width = out.shape[1]
    if epilogue == "swiglu":
        store(out, as_gated(first, width))
        return
    y = first[:, :width] + (floats(out) if epilogue == "add" else 0)
    for other in others:
        y = y + other[:, :width]
    store(out, y)
    if next_rows is not None:
        store(next_rows.x, staged(floats(out), next_rows.weight)[0])
        store(next_rows.sums, tile_sums(floats(out), next_rows.weight))


def tile_sums(hidden: np.ndarray, weight: Any) -> np.ndarray:
    """The sums of squares and largest magnitudes of tiles of 16 inputs."""
    padding = ((0, 0), (0, -hidden.shape[1] % 32))
    tiles = np.pad(hidden, padding).reshape(len(hidden), -1, 16)
    rounded = np.pad(hidden * floats(weight), padding).reshape(tiles.shape)
    return np.stack([(tiles * tiles).sum(axis=2), np.abs(rounded).max(axis=2)], axis=2).reshape(len(hidden), -1)


def gemv_float(
    device: Any,
    *,
    matrix: TiledMatrix,
    x: Any,
    out: Any,
    row_scales: Any = None,
    norm_weight: Any = None,
    eps: float = 0.0,
    bias: Any = None,
    epilogue: str = "store",
) -> None:
    values = floats(x) if norm_weight is None else normed(floats(x), norm_weight, eps)
    scales = np.ones(len(values), np.float32) if row_scales is None else floats(row_scales)
    (y,) = chunks_of(matrix, values, scales, bias, 1)
    width = out.shape[1]
    store(out, _gated(y, width) if epilogue == "swiglu" else y[:, :width] + (floats(out) if epilogue == "add" else 0))
