"""The kernels of the CUDA runner, by numpy in float32, on arrays in host memory."""

import ctypes
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from llmcli.kernels.gemm_codes import takes as takes_codes  # noqa: E402
from llmcli.kernels.gemm_halves import takes as takes_halves  # noqa: E402
from llmcli.kernels.repack import row_bytes  # noqa: E402
from llmcli.kernels.tiles import HALF_ROWS, TILE_ROWS, TiledMatrix, TileLayout  # noqa: E402
from llmcli.lab.rows import Digits, Halves, digits_of, halves_of  # noqa: E402  # noqa: E402
from llmcli.quantization.rounding import (  # noqa: E402
    E4M3_VALUES,
    unpack_zero_points,  # noqa: E402
    widen,
)


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
    # With old content: nothing may rely on zeros.
    memory = np.full(num_bytes + 256, 0xA5, np.uint8)
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
    return (codes - (zeros if matrix.zero_points is None else spread(matrix.zero_points))) * spread(matrix.scales)


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
    _spread_groups(on_host(source), group_size, segment, matrix, on_host(matrix.scales))


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


def dequantize(device: Any, *, matrix: TiledMatrix, first_tile: int, num_tiles: int, out: Any) -> None:
    assert out.shape == (num_tiles * TILE_ROWS, matrix.layout.num_inputs)
    store(out, weights_of(matrix)[first_tile * TILE_ROWS :][: len(out)])


# Operations


def _scale_of(out: Any, values: np.ndarray) -> np.ndarray:
    if out.dtype != np.float16:
        return np.ones(len(values), np.float32)
    largest = np.abs(values).max(axis=-1)
    return np.where(largest > 2**15, 2.0 ** np.ceil(np.log2(np.maximum(largest, 1) / 2**15)), 1.0).astype(np.float32)


def _store_scaled(out: Any, row_scale: Any, values: np.ndarray) -> None:
    assert out.shape == values.shape
    scale = _scale_of(out, values)
    store(row_scale, scale)
    store(out, values / scale[:, None])


def normed(x: np.ndarray, weight: Any, eps: float) -> np.ndarray:
    return floats(weight) * x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(eps))


def product(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """x @ weights.T one row at a time: a row's bits must not depend on the number of rows."""
    return np.stack([weights @ row for row in x])


def embedding(device: Any, *, table: Any, token_ids: Any, rows: Any = None, out: Any) -> None:
    ids = on_host(token_ids)
    if rows is None:
        store(out, floats(table)[ids])
        return
    lanes = on_host(rows)
    is_used = lanes >= 0
    store(out, np.where(is_used[:, None], floats(table)[np.where(is_used, ids[lanes], 0)], np.float32(0)))


def rms_norm(device: Any, *, x: Any, weight: Any, eps: float, out: Any, row_scale: Any) -> None:
    _store_scaled(out, row_scale, normed(floats(x), weight, eps))


def head_norm(device: Any, *, x: Any, weight: Any, eps: float) -> None:
    values = floats(x)
    heads = values.reshape(len(values), -1, len(weight))
    store(x, normed(heads, weight, eps).reshape(values.shape))


def round_rows(device: Any, *, x: Any, out: Any, row_scale: Any) -> None:
    _store_scaled(out, row_scale, floats(x))


def gather_columns(device: Any, *, x: Any, order: Any, out: Any) -> None:
    assert np.array_equal(np.sort(on_host(order)), np.arange(x.shape[1]))
    store(out, floats(x)[:, on_host(order)])


def scale_bias(device: Any, *, x: Any, row_scale: Any, bias: Any) -> None:
    store(x, floats(x) * floats(row_scale)[:, None] + (0 if bias is None else floats(bias)))


def residual_add(device: Any, *, x: Any, row_scale: Any, bias: Any, hidden: Any) -> None:
    width = hidden.shape[1]
    scale = 1 if row_scale is None else floats(row_scale)[:, None]
    product = floats(x)[:, :width] * scale + (0 if bias is None else floats(bias))
    store(hidden, floats(hidden) + product)


def _gated(gate_up: np.ndarray, width: int) -> np.ndarray:
    pairs = gate_up.reshape(len(gate_up), -1, 2, HALF_ROWS)
    gate, up = (pairs[:, :, part].reshape(len(gate_up), -1)[:, :width] for part in (0, 1))
    return gate / (1 + np.exp(-gate)) * up


def swiglu(device: Any, *, gate_up: Any, row_scale: Any, out: Any, out_scale: Any) -> None:
    _store_scaled(out, out_scale, _gated(floats(gate_up) * floats(row_scale)[:, None], out.shape[1]))


def gemv(
    device: Any,
    *,
    matrix: TiledMatrix,
    x: Any,
    out: Any,
    norm_weight: Any = None,
    eps: float = 0.0,
    bias: Any = None,
    epilogue: str = "store",
) -> None:
    layout = matrix.layout
    if layout.has_codes:
        digits, factors = _as_digits(layout, x, norm_weight, eps)
        _multiply_staged(matrix, digits.values, factors, out, bias, epilogue)
        return
    if takes_halves(layout):
        halves, factors = _as_halves(layout, x, norm_weight, eps)
        _multiply_staged(matrix, halves.values, factors, out, bias, epilogue)
        return
    values = floats(x) if norm_weight is None else normed(floats(x), norm_weight, eps)
    _finish(product(values, weights_of(matrix)), out, bias, epilogue)


def stage_digits(
    device: Any, *, layout: TileLayout, x: Any, image: Any, factors: Any, norm_weight: Any = None, eps: float = 0.0
) -> None:
    digits, norm_factors = _as_digits(layout, x, norm_weight, eps)
    staged = digits.image(unused=0xFF)  # of rows that do not exist: scales that are NaN
    on_host(image)[: len(staged)] = staged
    store(factors, norm_factors)


def gemm_codes(
    device: Any,
    *,
    matrix: TiledMatrix,
    image: Any,
    factors: Any,
    out: Any,
    bias: Any = None,
    epilogue: str = "store",
) -> None:
    assert takes_codes(matrix.layout)
    assert factors.shape == (len(out),)
    values = values_of_image(matrix.layout, on_host(image), len(out))
    _multiply_staged(matrix, values, floats(factors), out, bias, epilogue)


def values_of_image(layout: TileLayout, image: np.ndarray, num_rows: int) -> np.ndarray:
    """The integers in the bytes of digits, in the order of digit_image.cuh. Shapes: [num_rows, num_inputs]"""
    most = 64 if layout.is_symmetric else 32
    tokens = next((count for count in (16, 32) if num_rows <= count), most)
    width = layout.span_inputs
    span_bytes = tokens * (2 * width + (4 if layout.is_symmetric else 8))
    values = np.empty((num_rows, layout.num_spans, width))
    for row in range(num_rows):
        first = row // tokens * layout.num_spans * span_bytes
        spans = image[first : first + layout.num_spans * span_bytes].reshape(layout.num_spans, span_bytes)
        digits = spans[:, : 2 * width * tokens].reshape(layout.num_spans, 2, width // 16, tokens, 16)
        # [span, digit, piece, t, byte]
        own = digits[..., row % tokens, :].view(np.int8).astype(np.int64).reshape(layout.num_spans, 2, -1, 4, 4)
        integers = 256 * own[:, 0] + own[:, 1]
        if layout.weight_type == "int8":
            of_units = integers.reshape(layout.num_spans, 2, 4, 4, 4)  # span, unit, piece, t, byte
            ordered = of_units.transpose(0, 1, 3, 2, 4)  # a lane's 16 inputs: piece by piece
        else:  # pieces are [pair of eighths][even, odd inputs][eighth]
            pairs = integers.reshape(layout.num_spans, 2, 2, 2, 4, 4)  # span, pair, half, eighth, t, byte
            ordered = pairs.transpose(0, 4, 1, 3, 5, 2)
        begin = 2 * width * tokens + 4 * (row % tokens)
        scales = np.ascontiguousarray(spans[:, begin : begin + 4]).view(np.float32)
        values[row] = ordered.reshape(layout.num_spans, width) * scales.astype(np.float64)
    code_unit = 16 if layout.weight_type == "int4" and layout.is_symmetric else 1
    return code_unit * values.reshape(num_rows, -1)[:, : layout.num_inputs]


def stage_halves(
    device: Any, *, layout: TileLayout, x: Any, image: Any, factors: Any, norm_weight: Any = None, eps: float = 0.0
) -> None:
    halves, norm_factors = _as_halves(layout, x, norm_weight, eps)
    staged = halves.image(unused=0xFF)  # of rows that do not exist: NaN
    on_host(image)[: len(staged)] = staged
    store(factors, norm_factors)


def gemm_halves(
    device: Any,
    *,
    matrix: TiledMatrix,
    image: Any,
    factors: Any,
    out: Any,
    bias: Any = None,
    epilogue: str = "store",
) -> None:
    assert takes_halves(matrix.layout)
    assert factors.shape == (len(out),)
    values = values_of_pairs(matrix.layout, on_host(image), len(out))
    _multiply_staged(matrix, values, floats(factors), out, bias, epilogue)


def values_of_pairs(layout: TileLayout, image: np.ndarray, num_rows: int) -> np.ndarray:
    """The numbers in the bytes of pairs, in the order of half_image.cuh. Shapes: [num_rows, num_inputs]"""
    tokens = next((count for count in (16, 32, 64) if num_rows <= count), 64 if layout.weight_type == "fp8" else 128)
    has_scales, width = layout.weight_type != "bfloat16", layout.unit_inputs
    unit_bytes = tokens * (4 * width + 4 * has_scales)
    values = np.empty((num_rows, layout.num_units, width))
    for row in range(num_rows):
        first = row // tokens * layout.num_units * unit_bytes
        units = image[first : first + layout.num_units * unit_bytes].reshape(layout.num_units, unit_bytes)
        pairs = np.ascontiguousarray(units[:, : 4 * width * tokens]).view(np.float16 if has_scales else np.uint16)
        # [unit, piece of all parts, half, t, 2]
        own = pairs.reshape(layout.num_units, width // 8, tokens, 2, 4, 2)[:, :, row % tokens]
        both = floats_of(own).sum(axis=2, dtype=np.float64)
        values[row] = both.transpose(0, 2, 1, 3).reshape(layout.num_units, width)
        if has_scales:
            begin = 4 * width * tokens + 4 * (row % tokens)
            values[row] *= np.ascontiguousarray(units[:, begin : begin + 4]).view(np.float32)
    return values.reshape(num_rows, -1)[:, : layout.num_inputs]


def _as_halves(layout: TileLayout, x: Any, norm_weight: Any, eps: float) -> tuple[Halves, np.ndarray]:
    """Rows times the norm's weights, and the factors that follow the product."""
    values = floats(x)
    if norm_weight is None:
        return halves_of(layout, values), np.ones(len(values), np.float32)
    factors = 1 / np.sqrt(np.square(values).mean(-1) + np.float32(eps))
    return halves_of(layout, values * floats(norm_weight)), factors.astype(np.float32)


def _as_digits(layout: TileLayout, x: Any, norm_weight: Any, eps: float) -> tuple[Digits, np.ndarray]:
    """Rows times the norm's weights, and the factors that follow the product."""
    values = floats(x)
    if norm_weight is None:
        return digits_of(layout, values), np.ones(len(values), np.float32)
    factors = 1 / np.sqrt(np.square(values).mean(-1) + np.float32(eps))
    return digits_of(layout, values * floats(norm_weight)), factors.astype(np.float32)


def _multiply_staged(
    matrix: TiledMatrix, values: np.ndarray, factors: np.ndarray, out: Any, bias: Any, epilogue: str
) -> None:
    y = product(values.astype(np.float32), weights_of(matrix)) * factors[:, None]
    _finish(y, out, bias, epilogue)


def _finish(y: np.ndarray, out: Any, bias: Any, epilogue: str) -> None:
    y = y + (0 if bias is None else floats(bias))
    if epilogue == "swiglu":
        store(out, _gated(y, out.shape[1]))
    else:
        y = y[:, : out.shape[1]]
        store(out, floats(out) + y if epilogue == "add" else y)


def gemm_packed(device: Any, *, matrix: TiledMatrix, x: Any, out: Any) -> None:
    store(out, product(floats(x), weights_of(matrix)[: out.shape[1]]))
