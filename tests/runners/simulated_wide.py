"""The kernels of many tokens on Hopper, by numpy; images are written and read as in wide_image.cuh."""

from typing import Any

import numpy as np
from simulated_kernels import as_gated, chunks_of, floats, on_host, staged, store

from llmcli.kernels.gemm_wide import takes
from llmcli.kernels.stage_wide import ImageRows, image_bytes
from llmcli.kernels.tiles import TiledMatrix, TileLayout


def places(token: int, num_inputs: int, unit_inputs: int) -> np.ndarray:
    """Where each input of a token lies, in elements of 16 bits."""
    column = np.arange(num_inputs)
    run, piece = column // 16, column % 16 // 2
    step, lane = (run // 8 * 2 + run % 2, run % 8 // 2) if unit_inputs == 128 else (run // 4, run % 4)
    if unit_inputs == 32:
        lane, piece = column % 32 // 8, column % 64 // 32 * 4 + column % 8 // 2
    row = (token // 128 * (-(-num_inputs // 128) * 2) + step) * 128 + token % 128
    return np.asarray(64 * row + 8 * (piece ^ token % 8) + 2 * lane + column % 2)


def write_image(image: Any, values: np.ndarray, unit_inputs: int) -> None:
    """Write rows. Unread places become NaN."""
    halves = on_host(image)[: image_bytes(values.shape[1], len(values))].view(np.float16)
    halves[:] = np.nan
    padded = np.zeros((len(values), -(-values.shape[1] // 128) * 128), np.float16)
    padded[:, : values.shape[1]] = values
    for token, row in enumerate(padded):
        halves[places(token, len(row), unit_inputs)] = row


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
    out: Any,
    row_scales: Any,
    norm_weight: Any = None,
    eps: float = 0.0,
    parts: Any = None,
) -> None:
    for part in () if parts is None else floats(parts):
        store(x, floats(x) + part)
    rounded, scales = staged(floats(x), norm_weight, eps)
    store(row_scales, scales)
    if unit_inputs:
        write_image(out, rounded, unit_inputs)
        return
    on_host(out)[:] = 0
    on_host(out)[:, : rounded.shape[1]] = rounded


def gather_image(device: Any, *, image: Any, order: Any, unit_inputs: int, rows: int, out: Any) -> None:
    assert np.array_equal(np.sort(on_host(order)), np.arange(len(order)))
    write_image(out, read_image(image, rows, len(order), unit_inputs)[:, on_host(order)], unit_inputs)


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
    y, *rest = _products(matrix, image, row_scales, bias, 1 if others is None else 1 + len(others))
    store(out, floats(out) + y[:, : out.shape[1]] if epilogue == "add" else y[:, : out.shape[1]])
    for part, sums in enumerate(rest):
        store(others[part], sums[:, : out.shape[1]])


def gemm_wide_swiglu(
    device: Any,
    *,
    matrix: TiledMatrix,
    image: Any,
    row_scales: Any,
    down: TileLayout,
    out: Any,
    bias: Any = None,
) -> None:
    (pairs,) = _products(matrix, image, row_scales, bias, 1)
    write_image(out, as_gated(pairs, down.num_inputs), down.unit_inputs)


def _products(matrix: TiledMatrix, image: Any, row_scales: Any, bias: Any, num_parts: int) -> list[np.ndarray]:
    layout = matrix.layout
    assert takes(layout)
    values = read_image(image, len(row_scales), layout.num_inputs, layout.unit_inputs)
    return chunks_of(matrix, values, floats(row_scales), bias, num_parts)


def add_parts(device: Any, *, parts: Any, out: Any) -> None:
    for part in on_host(parts):
        store(out, on_host(out) + part)
