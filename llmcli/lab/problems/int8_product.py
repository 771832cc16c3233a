"""Tokens times a matrix of int8 codes with a scale and a zero point for each row."""

from functools import partial

import numpy as np

from llmcli.kernels.dequantize import dequantize
from llmcli.kernels.device import Device
from llmcli.kernels.gemm_packed import gemm_packed
from llmcli.kernels.spec import KernelCost
from llmcli.kernels.tiles import TILE_ROWS, TiledMatrix, TileLayout, tile_layout
from llmcli.lab.matrices import tile_rows
from llmcli.lab.notes import matmul
from llmcli.lab.problem import Arrays, Expected, Output, Problem, ProblemKind
from llmcli.lab.problems.matmul import expected_product


def make(num_tokens: int, num_rows: int, num_inputs: int) -> Problem:
    """out = x @ ((codes - zeros) * scales).T; num_inputs is a multiple of 8.

    x has values of halves and scales are powers of two, so a weight is exact in float16 too, and one bound serves all.
    Shapes: x float32 and x_half float16 [num_tokens, num_inputs]; codes uint8 [num_rows, num_inputs]; scales float32
            and zeros uint8 [num_rows]; out float32 [num_tokens, num_rows]; tiles, tile_scales, tile_zeros: the same
            weights as the engine has them; widened float16, scratch
    """
    generator = np.random.default_rng([num_tokens, num_rows, num_inputs])
    x_half = generator.standard_normal((num_tokens, num_inputs), dtype=np.float32).astype(np.float16)
    codes = generator.integers(0, 256, (num_rows, num_inputs), dtype=np.uint8)
    zeros = generator.integers(100, 156, num_rows, dtype=np.uint8)
    scales = np.ldexp(np.float32(1), generator.integers(-9, -5, num_rows)).astype(np.float32)
    layout = tile_layout("int8", num_rows, num_inputs, None, "float32", is_symmetric=False)

    def reference() -> dict[str, Expected]:
        weights = (codes.astype(np.float64) - zeros[:, None]) * scales[:, None]
        return {"out": expected_product(x_half.astype(np.float64), weights.T)}

    return Problem(
        "int8_product",
        {"num_tokens": num_tokens, "num_rows": num_rows, "num_inputs": num_inputs},
        inputs={
            "x": x_half.astype(np.float32),
            "x_half": x_half,
            "codes": codes,
            "zeros": zeros,
            "scales": scales,
            "tiles": tile_rows(layout, codes),
            "tile_scales": _by_tile(layout, scales),
            "tile_zeros": _by_tile(layout, zeros),
        },
        outputs={"out": Output((num_tokens, num_rows))},
        reference=reference,
        cost=KernelCost(
            read_bytes=num_rows * (num_inputs + 5) + 2 * num_tokens * num_inputs,
            written_bytes=4 * num_tokens * num_rows,
            flops=2 * num_tokens * num_rows * num_inputs,
        ),
        scratch={"widened": Output((layout.padded_rows, num_inputs), np.float16)},
        solvers={"llmcli_packed": partial(_solve_packed, layout), "llmcli_widened": partial(_solve_widened, layout)},
    )


def _by_tile(layout: TileLayout, values: np.ndarray) -> np.ndarray:
    padded = np.zeros(layout.padded_rows, values.dtype)
    padded[: values.size] = values
    return padded.reshape(layout.num_tiles, 1, TILE_ROWS)


def _matrix(layout: TileLayout, arrays: Arrays) -> TiledMatrix:
    return TiledMatrix(layout, arrays["tiles"], arrays["tile_scales"], arrays["tile_zeros"])


def _solve_packed(layout: TileLayout, device: Device, arrays: Arrays) -> None:
    gemm_packed(device, matrix=_matrix(layout, arrays), x=arrays["x_half"], out=arrays["out"])


def _solve_widened(layout: TileLayout, device: Device, arrays: Arrays) -> None:
    widened = arrays["widened"]
    dequantize(device, matrix=_matrix(layout, arrays), first_tile=0, num_tiles=layout.num_tiles, out=widened)
    matmul(device, x=arrays["x_half"], weight=widened[: layout.num_rows], out=arrays["out"])


INT8_PRODUCT = ProblemKind("int8_product", "tokens times a matrix of int8 codes", make)
