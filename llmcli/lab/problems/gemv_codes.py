"""A matrix of int8 or int4 codes, with a scale and a zero point a row, times one row of activations."""

from functools import partial

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.gemv import gemv
from llmcli.kernels.spec import KernelCost
from llmcli.kernels.tiles import TILE_ROWS, TiledMatrix, TileLayout, tile_layout
from llmcli.lab.matrices import tile_rows
from llmcli.lab.problem import ENGINE, Arrays, Expected, Output, Problem, ProblemKind
from llmcli.lab.problems.matmul import expected_product

_INPUT_ERROR = 1 / 63000  # of the engine's integer inputs, of the largest in a span: kernels/common/product_codes.cuh


def make(weight_type: str, num_rows: int, num_columns: int) -> Problem:
    """out = ((codes - zeros) * scales) @ x; of int4, num_columns is even.

    `mins` are the smallest weights of the rows: code * scale + min is the same weight. Two codes of int4 share a byte,
    the first one in its high half; tiles have it in the low half.
    Shapes: codes uint8 [num_rows, num_columns], of int4 [num_rows, num_columns / 2], and as `tiles`; scales, mins
            float32 and zeros uint8 [num_rows], and as tile_scales, tile_zeros; x float32 [num_columns]; out float32
            [num_rows]
    """
    generator = np.random.default_rng([num_rows, num_columns])
    is_int4 = weight_type == "int4"
    num_codes = 16 if is_int4 else 256
    codes = generator.integers(0, num_codes, (num_rows, num_columns), dtype=np.uint8)
    zeros = generator.integers(num_codes * 3 // 8, num_codes * 5 // 8, num_rows, dtype=np.uint8)
    scales = np.ldexp(np.float32(1), generator.integers(-9, -5, num_rows)).astype(np.float32)
    x = generator.standard_normal(num_columns, dtype=np.float32)
    layout = tile_layout(weight_type, num_rows, num_columns, None, "float32", is_symmetric=False)
    first, second = codes[:, ::2], codes[:, 1::2]

    def reference() -> dict[str, Expected]:
        weights = (codes.astype(np.float64) - zeros[:, np.newaxis]) * scales[:, np.newaxis]
        expected = expected_product(x[np.newaxis].astype(np.float64), weights.T)
        rounded = sum_error(np.abs(weights), input_error(x, layout))
        return {"out": Expected(expected.values[0], np.asarray(expected.bound)[0] + rounded)}

    return Problem(
        f"gemv_{weight_type}",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={
            "codes": first << 4 | second if is_int4 else codes,
            "zeros": zeros,
            "scales": scales,
            "mins": -zeros.astype(np.float32) * scales,
            "x": x,
            "tiles": tile_rows(layout, codes),
            "tile_scales": by_tile(layout, scales),
            "tile_zeros": by_tile(layout, zeros),
        },
        outputs={"out": Output((num_rows,))},
        reference=reference,
        cost=KernelCost(
            read_bytes=num_rows * (num_columns // (2 if is_int4 else 1) + 5) + 4 * num_columns,
            written_bytes=4 * num_rows,
            flops=2 * num_rows * num_columns,
        ),
        solvers={ENGINE: partial(_solve, layout)},
    )


def input_error(x: np.ndarray, layout: TileLayout) -> np.ndarray:
    """How far the engine's integers may be from the inputs. Shapes: x, result [num_inputs]"""
    padded = np.pad(np.abs(x), (0, -x.size % layout.span_inputs)).reshape(-1, layout.span_inputs)
    largest = np.repeat(padded.max(axis=1).astype(np.float64), layout.span_inputs)
    return np.asarray(_INPUT_ERROR * largest[: x.size])


def sum_error(sizes: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """How far sums of inputs times weights may be off, if each input may be off by its error.

    Errors of inputs are independent, as are their roundings and the weights, so their sum stays below six times the
    root of the sum of their squares: by the same argument a sum of n terms has sqrt(n) roundings.
    Shapes: sizes [num_rows, num_inputs] of the weights; errors [num_inputs]; result [num_rows]
    """
    return np.asarray(np.minimum(sizes @ errors, 6 * np.sqrt(sizes**2 @ errors**2)))


def by_tile(layout: TileLayout, values: np.ndarray) -> np.ndarray:
    """One value a row in tile order, the same for every stored group of a row.

    Shapes: values [num_rows]; result [num_tiles, num_groups, 16]
    """
    padded = np.zeros(layout.padded_rows, values.dtype)
    padded[: values.size] = values
    of_tiles = padded.reshape(layout.num_tiles, 1, TILE_ROWS)
    return np.ascontiguousarray(np.broadcast_to(of_tiles, (layout.num_tiles, layout.num_groups, TILE_ROWS)))


def _solve(layout: TileLayout, device: Device, arrays: Arrays) -> None:
    matrix = TiledMatrix(layout, arrays["tiles"], arrays["tile_scales"], arrays["tile_zeros"])
    gemv(device, matrix=matrix, x=arrays["x"].reshape(1, -1), out=arrays["out"].reshape(1, -1))


GEMV_INT8 = ProblemKind("gemv_int8", "a matrix of int8 codes times one row", partial(make, "int8"))
GEMV_INT4 = ProblemKind("gemv_int4", "a matrix of int4 codes times one row", partial(make, "int4"))
