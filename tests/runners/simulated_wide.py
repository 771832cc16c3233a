"""The kernels of many tokens on Hopper, by numpy; images are written and read as in wide_image.cuh."""

from typing import Any

import numpy as np
from simulated_kernels import floats, normed, on_host, product, store, weights_of

from llmcli.kernels.gemm_wide import takes
from llmcli.kernels.stage_wide import ImageRows, image_bytes
from llmcli.kernels.tiles import HALF_ROWS, TiledMatrix, TileLayout

LARGEST_UNSCALED = 2.0**15


def places(token: int, num_inputs: int, unit_inputs: int) -> np.ndarray:
    """Where each input of a token lies, in elements of 16 bits."""
    column = np.arange(num_inputs)
    run, piece = column // 16, column % 16 // 2
    step, lane = (run // 8 * 2 + run % 2, run % 8 // 2) if unit_inputs == 128 else (run // 4, run % 4)
    if unit_inputs == 32:
        lane, piece = column % 32 // 8, column % 64 // 32 * 4 + column % 8 // 2
    row = (token // 128 * (-(-num_inputs // 128) * 2) + step) * 128 + token % 128
    return np.asarray(64 * row + 8 * (piece ^ token % 8) + 2 * lane + column % 2)


def write_image(image: Any, values: np.ndarray, unit_inputs: int) -> np.ndarray:
    """Write rows over the power of two of each; result: these powers. Unread places become NaN."""
    largest = np.abs(values).max(axis=1)
    powers = np.where(largest > LARGEST_UNSCALED, np.ldexp(1.0, np.frexp(largest)[1] - 15), 1.0).astype(np.float32)
    halves = on_host(image)[: image_bytes(values.shape[1], len(values))].view(np.float16)
    halves[:] = np.nan
    padded = np.zeros((len(values), -(-values.shape[1] // 128) * 128), np.float16)
    padded[:, : values.shape[1]] = values / powers[:, None]
    for token, row in enumerate(padded):
        halves[places(token, len(row), unit_inputs)] = row
    return powers


def write_image_rows(rows: ImageRows, values: np.ndarray) -> None:
    """Write rows without scales; the image's other rows stay."""
    halves = on_host(rows.image).view(np.float16)
    for token, row in enumerate(values.astype(np.float16), rows.first_token):
        halves[places(token, len(row), rows.unit_inputs)] = row


def read_image(image: Any, num_tokens: int, num_inputs: int, unit_inputs: int) -> np.ndarray:
    halves, width = on_host(image)[: image_bytes(num_inputs, num_tokens)].view(np.float16), -(-num_inputs // 128) * 128
    rows = np.stack([halves[places(token, width, unit_inputs)] for token in range(num_tokens)])
    assert not rows[:, num_inputs:].any()
    return rows[:, :num_inputs].astype(np.float32)


def stage_wide(
    device: Any,
    *,
    x: Any,
    unit_inputs: int,
    image: Any,
    row_scales: Any,
    norm_weight: Any = None,
    eps: float = 0.0,
    largest: Any = None,
    parts: Any = None,
) -> None:
    for part in () if parts is None else floats(parts):
        store(x, floats(x) + part)
    values = floats(x) if norm_weight is None else normed(floats(x), norm_weight, eps)
    store(row_scales, write_image(image, values, unit_inputs))
    if largest is not None:
        on_host(largest)[:] = 0


def gemm_wide(
    device: Any,
    *,
    matrix: TiledMatrix,
    image: Any,
    row_scales: Any,
    out: Any,
    bias: Any = None,
    epilogue: str = "store",
    others: Any = None,
) -> None:
    num_parts, num_spans = 1 if others is None else 1 + len(others), -(-matrix.layout.num_inputs // 128)
    ends = [num_spans * part // num_parts * 128 for part in range(num_parts + 1)]
    y = _products(matrix, image, row_scales, bias, slice(ends[0], ends[1]))
    store(out, floats(out) + y if epilogue == "add" else y)
    for part in range(1, num_parts):
        store(others[part - 1], _products(matrix, image, row_scales, None, slice(ends[part], ends[part + 1])))


def gemm_wide_swiglu(
    device: Any,
    *,
    matrix: TiledMatrix,
    image: Any,
    row_scales: Any,
    down: TileLayout,
    out: Any,
    out_scales: Any,
    largest: Any,
    bias: Any = None,
) -> None:
    assert not on_host(largest).any()
    pairs = _products(matrix, image, row_scales, bias).reshape(len(row_scales), -1, 2, HALF_ROWS)
    gate, up = (pairs[:, :, part].reshape(len(pairs), -1)[:, : down.num_inputs] for part in (0, 1))
    store(out_scales, write_image(out, gate / (1 + np.exp(-gate)) * up, down.unit_inputs))


def _products(matrix: TiledMatrix, image: Any, row_scales: Any, bias: Any, inputs: slice = slice(None)) -> np.ndarray:
    layout = matrix.layout
    assert takes(layout)
    values = read_image(image, len(row_scales), layout.num_inputs, layout.unit_inputs)[:, inputs]
    y = product(values, weights_of(matrix)[: layout.num_rows, inputs]) * floats(row_scales)[:, None]
    return y + (0 if bias is None else floats(bias)[: layout.num_rows])


def add_parts(device: Any, *, parts: Any, out: Any) -> None:
    for part in on_host(parts):
        store(out, on_host(out) + part)
