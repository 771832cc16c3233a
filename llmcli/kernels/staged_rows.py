"""Shared by launchers that first stage rows, as digits or as pairs, and then multiply them with a tiled matrix."""

import ctypes
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.arguments import check
from llmcli.kernels.gemv import EPILOGUES, Epilogue
from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost
from llmcli.kernels.tiles import HALF_ROWS, TILE_ROWS, TileLayout

STAGE_BLOCK_SIZE = 512


class StageShape(ctypes.Structure):
    """The struct of the same name in stage_digits.cu and stage_halves.cu."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("x_stride", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class ProductShape(ctypes.Structure):
    """CodesShape of gemm_codes.cu and HalvesShape of gemm_halves.cu."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("out_stride", ctypes.c_int32),
        ("epilogue", ctypes.c_int32),
    )


def stage_rows(
    device: Launcher,
    kernel: str,
    name: str,
    *,
    layout: TileLayout,
    x: Any,
    image: Any,
    image_bytes: int,
    factors: Any,
    norm_weight: Any | None,
    eps: float,
    input_bytes: int,
) -> None:
    """Start `name` of `kernel`; its image takes `image_bytes`, with `input_bytes` an input. Otherwise as stage_digits.

    Raises: ValueError
    """
    num_rows = x.shape[0]
    check(kernel, "x", x, dtype=np.float32, shape=(None, layout.num_inputs), row_stride=True, aligned=4)
    check(kernel, "factors", factors, dtype=np.float32, shape=(num_rows,), aligned=4)
    _check_image(kernel, image, image_bytes)
    if norm_weight is not None:
        check(kernel, "norm_weight", norm_weight, dtype=np.float32, shape=(layout.num_inputs,))
    shape = StageShape(num_rows=num_rows, num_inputs=layout.num_inputs, x_stride=x.strides[0] // 4, eps=eps)
    device.launch(
        kernel,
        name,
        grid=(num_rows,),
        block=STAGE_BLOCK_SIZE,
        arguments=(x, norm_weight, image, factors, shape),
        overlaps=True,
        cost=partial(stage_cost, layout, num_rows, input_bytes=input_bytes, has_norm=norm_weight is not None),
    )


def stage_cost(layout: TileLayout, num_rows: int, *, input_bytes: int, has_norm: bool) -> KernelCost:
    """What staging `num_rows` rows moves."""
    return KernelCost(
        read_bytes=4 * layout.num_inputs * (num_rows + has_norm),
        written_bytes=input_bytes * layout.num_inputs * num_rows,
        flops=4 * layout.num_inputs * num_rows,
        stored_bytes=4 * layout.num_inputs * has_norm,
    )


def check_product(
    kernel: str,
    device: Launcher,
    layout: TileLayout,
    *,
    is_taken: bool,
    image: Any,
    image_bytes: int,
    factors: Any,
    out: Any,
    bias: Any | None,
    epilogue: Epilogue,
) -> ProductShape:
    """Check the arrays of a product of staged rows, and return its shape.

    Raises: ValueError, also for a matrix that the kernel does not take, and on a card without wgmma
    """
    if not is_taken:
        raise ValueError(f"{kernel}: does not take {layout}")
    if not device.can_wgmma:  # compiled for it, the kernel would multiply nothing
        raise ValueError(f"{kernel}: the card has no wgmma; only those of compute capability 9.0 have")
    num_rows = out.shape[0]
    tile_outputs = HALF_ROWS if epilogue == "swiglu" else TILE_ROWS
    check(kernel, "factors", factors, dtype=np.float32, shape=(num_rows,), aligned=4)
    check(kernel, "out", out, dtype=np.float32, shape=(num_rows, None), row_stride=True, aligned=4)
    num_outputs = out.shape[1]
    if -(-num_outputs // tile_outputs) != layout.num_tiles:
        raise ValueError(
            f"{kernel}: out has {num_outputs} columns, expected {layout.num_tiles} tiles of {tile_outputs}"
        )
    _check_image(kernel, image, image_bytes)
    if bias is not None:
        check(kernel, "bias", bias, dtype=np.float32, shape=(layout.padded_rows,), aligned=4)
    return ProductShape(
        num_rows=num_rows,
        num_inputs=layout.num_inputs,
        num_outputs=num_outputs,
        out_stride=out.strides[0] // 4,
        epilogue=EPILOGUES.index(epilogue),
    )


def _check_image(kernel: str, image: Any, num_bytes: int) -> None:
    if image.nbytes < num_bytes:
        raise ValueError(f"{kernel}: image has {image.nbytes} bytes, expected {num_bytes}")
