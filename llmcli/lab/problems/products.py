"""Products of matrices of halves or codes with tokens, with one or with many, in float32 sums."""

from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.gemm_wide import gemm_wide
from llmcli.kernels.gemv import Epilogue, gemv
from llmcli.kernels.spec import KernelCost
from llmcli.kernels.stage_wide import image_bytes, padded_inputs, stage_wide
from llmcli.kernels.tiles import TiledMatrix
from llmcli.lab.matrices import StoredMatrix, tiles_of
from llmcli.lab.notes import matmul
from llmcli.lab.problem import ENGINE, ROUNDING, ROUNDOFF, Arrays, Expected, Output, Problem, ProblemKind
from llmcli.lab.rows import HALF_SUBNORMAL


def make_matmul(num_rows: int, num_columns: int, num_inputs: int) -> Problem:
    """out = a @ b. Every rung reads halves and sums in float32, so one bound serves CUDA cores and tensor cores.

    `b_columns` and `tiles` are b again, in the form that the library and the engine read: each column contiguous.
    Shapes: a float16 [num_rows, num_inputs], b float16 [num_inputs, num_columns], b_columns float16 [num_columns,
            num_inputs]; tiles uint8; out float32 [num_rows, num_columns]
    """
    generator = np.random.default_rng([num_rows, num_columns, num_inputs])
    a = generator.standard_normal((num_rows, num_inputs), dtype=np.float32).astype(np.float16)
    b = generator.standard_normal((num_inputs, num_columns), dtype=np.float32).astype(np.float16)
    stored = StoredMatrix("float16", np.ascontiguousarray(b.T))

    return Problem(
        inputs={"a": a, "b": b, "b_columns": stored.values, **tile_inputs(stored)},
        outputs={"out": Output((num_rows, num_columns))},
        reference=lambda: {"out": expected_product(a.astype(np.float64), b.astype(np.float64))},
        cost=KernelCost(
            read_bytes=2 * (num_rows + num_columns) * num_inputs,
            written_bytes=4 * num_rows * num_columns,
            flops=2 * num_rows * num_columns * num_inputs,
        ),
        scratch=image_scratch(num_rows, num_inputs),
        solvers={
            "cublas": lambda device, arrays: matmul(
                device, x=arrays["a"], weight=arrays["b_columns"], out=arrays["out"]
            ),
            ENGINE: partial(_multiply_many, stored, "a"),
        },
    )


def make_gemv(num_rows: int, num_columns: int) -> Problem:
    """out = weight @ x.

    x has values of halves, so that the library and the engine, which take x_half, are exact too.
    Shapes: weight float16 [num_rows, num_columns], and as `tiles`; x float32 and x_half float16 [num_columns]; out
            float32 [num_rows]
    """
    generator = np.random.default_rng([num_rows, num_columns])
    weight = generator.standard_normal((num_rows, num_columns), dtype=np.float32).astype(np.float16)
    x_half = generator.standard_normal(num_columns, dtype=np.float32).astype(np.float16)
    stored = StoredMatrix("float16", weight)

    def solve_by_library(device: Device, arrays: Arrays) -> None:
        x, out = arrays["x_half"].reshape(1, -1), arrays["out"].reshape(1, -1)
        matmul(device, x=x, weight=arrays["weight"], out=out)

    return Problem(
        inputs={"weight": weight, **tile_inputs(stored), "x": x_half.astype(np.float32), "x_half": x_half},
        outputs={"out": Output((num_rows,))},
        reference=lambda: {"out": _expected_row(x_half, stored.weights)},
        cost=KernelCost(
            read_bytes=2 * num_rows * num_columns + 4 * num_columns,
            written_bytes=4 * num_rows,
            flops=2 * num_rows * num_columns,
        ),
        scratch=row_scratch(num_columns),
        solvers={ENGINE: partial(_multiply_row, stored), "cublas": solve_by_library},
    )


def make_gemv_codes(weight_type: str, num_rows: int, num_columns: int) -> Problem:
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
    stored = StoredMatrix(weight_type, codes, None, "float32", scales[:, None], zeros[:, None])

    def reference() -> dict[str, Expected]:
        expected = _expected_row(x, stored.weights)
        rounded = sum_error(np.abs(stored.weights), input_error(x))
        return {"out": Expected(expected.values, expected.bound + rounded)}

    return Problem(
        inputs={
            "codes": codes[:, ::2] << 4 | codes[:, 1::2] if is_int4 else codes,
            "zeros": zeros,
            "scales": scales,
            "mins": -zeros.astype(np.float32) * scales,
            "x": x,
            **tile_inputs(stored),
        },
        outputs={"out": Output((num_rows,))},
        reference=reference,
        cost=KernelCost(
            read_bytes=num_rows * (num_columns // (2 if is_int4 else 1) + 5) + 4 * num_columns,
            written_bytes=4 * num_rows,
            flops=2 * num_rows * num_columns,
        ),
        scratch=row_scratch(num_columns),
        solvers={ENGINE: partial(_multiply_row, stored)},
    )


def make_int8_product(num_tokens: int, num_rows: int, num_inputs: int) -> Problem:
    """out = x @ ((codes - zeros) * scales).T; num_inputs is a multiple of 8.

    x has values of halves and scales are powers of two, so a weight is exact in float16 too, and one bound serves all.
    Shapes: x float32 and x_half float16 [num_tokens, num_inputs]; codes uint8 [num_rows, num_inputs]; scales float32
            and zeros uint8 [num_rows]; out float32 [num_tokens, num_rows]; tiles, tile_scales, tile_zeros: the same
            weights as the engine has them
    """
    generator = np.random.default_rng([num_tokens, num_rows, num_inputs])
    x_half = generator.standard_normal((num_tokens, num_inputs), dtype=np.float32).astype(np.float16)
    codes = generator.integers(0, 256, (num_rows, num_inputs), dtype=np.uint8)
    zeros = generator.integers(100, 156, num_rows, dtype=np.uint8)
    scales = np.ldexp(np.float32(1), generator.integers(-9, -5, num_rows)).astype(np.float32)
    stored = StoredMatrix("int8", codes, None, "float32", scales[:, None], zeros[:, None])

    return Problem(
        inputs={
            "x": x_half.astype(np.float32),
            "x_half": x_half,
            "codes": codes,
            "zeros": zeros,
            "scales": scales,
            **tile_inputs(stored),
        },
        outputs={"out": Output((num_tokens, num_rows))},
        reference=lambda: {"out": expected_product(x_half.astype(np.float64), stored.weights.T)},
        cost=KernelCost(
            read_bytes=num_rows * (num_inputs + 5) + 2 * num_tokens * num_inputs,
            written_bytes=4 * num_tokens * num_rows,
            flops=2 * num_tokens * num_rows * num_inputs,
        ),
        scratch=image_scratch(num_tokens, num_inputs),
        solvers={ENGINE: partial(_multiply_many, stored, "x_half")},
    )


def expected_product(a: np.ndarray, b: np.ndarray) -> Expected:
    """a @ b, and how far float32 sums may be from it; products are exact.

    A sum of n terms is rounded n times, up and down alike: sqrt(n) roundings, each of at most the sum of the terms'
    sizes. Tensor cores cut off instead, twice as much and always towards zero, but once for 8 terms, of a sum that is
    smaller than that by about sqrt(n) / 4. The last 4 are for short sums, and for roundings after the sum.
    Shapes: a float64 [m, n], b float64 [n, k]
    """
    return Expected(a @ b, (np.sqrt(a.shape[1]) + 4) * ROUNDING * (np.abs(a) @ np.abs(b)))


def _expected_row(x: np.ndarray, weights: np.ndarray) -> Expected:
    """weights @ x. Shapes: x [num_inputs], weights float64 [num_rows, num_inputs]"""
    expected = expected_product(x[np.newaxis].astype(np.float64), weights.T)
    return Expected(expected.values[0], np.asarray(expected.bound)[0])


def input_error(x: np.ndarray) -> np.ndarray:
    """How far the engine's inputs, which it rounds to fp16, may be from these. Shapes: x, result [num_inputs]"""
    half = np.dtype(np.float16)
    return np.asarray(ROUNDOFF[half] * np.abs(x.astype(np.float64)) + HALF_SUBNORMAL[half])


def sum_error(sizes: np.ndarray, errors: np.ndarray, times: float = 6) -> np.ndarray:
    """How far sums of inputs times weights may be off, if each input may be off by its error.

    Errors of inputs are independent, as are their roundings and the weights, so their sum stays below six times the
    root of the sum of their squares: by the same argument a sum of n terms has sqrt(n) roundings. For errors that are
    such bounds themselves fewer `times` do.
    Shapes: sizes [num_rows, num_inputs] of the weights; errors [num_inputs]; result [num_rows]
    """
    return np.asarray(np.minimum(sizes @ errors, times * np.sqrt(sizes**2 @ errors**2)))


def tile_inputs(stored: StoredMatrix, prefix: str = "") -> dict[str, np.ndarray]:
    """A matrix in the engine's tiles as inputs: `tiles`, `tile_scales`, `tile_zeros`, those that it has."""
    tiled = tiles_of(stored)
    given = {"tiles": tiled.tiles, "tile_scales": tiled.scales, "tile_zeros": tiled.zero_points}
    return {f"{prefix}{name}": array for name, array in given.items() if array is not None}


def tiled_matrix(stored: StoredMatrix, arrays: Arrays, prefix: str = "") -> TiledMatrix:
    """The matrix of `tile_inputs` on a card."""
    tiles, scales, zero_points = (arrays.get(f"{prefix}{name}") for name in ("tiles", "tile_scales", "tile_zeros"))
    return TiledMatrix(stored.layout, tiles, scales, zero_points, stored.widening, stored.power)


def row_scratch(num_inputs: int) -> dict[str, Output]:
    """What `multiply_row` works in, for rows of up to `num_inputs` inputs."""
    return {"row": Output((padded_inputs(num_inputs),), np.float16), "row_scale": Output((1,))}


def multiply_row(
    device: Device,
    arrays: Arrays,
    matrix: TiledMatrix,
    x: Any,
    out: Any,
    norm_weight: Any | None = None,
    eps: float = 0.0,
    epilogue: Epilogue = "store",
) -> None:
    """The engine's product of one row of floats: round it, normed or not, and multiply.

    Shapes: x float32 [num_inputs]; out float32, of "swiglu" float16, [num_outputs]; norm_weight float32 [num_inputs]
    """
    row, scales = arrays["row"][: padded_inputs(x.size)].reshape(1, -1), arrays["row_scale"]
    stage_wide(device, x=x.reshape(1, -1), unit_inputs=0, out=row, row_scales=scales, norm_weight=norm_weight, eps=eps)
    gemv(device, matrix=matrix, x=row[:, : x.size], out=out.reshape(1, -1), row_scales=scales, epilogue=epilogue)


def _multiply_row(stored: StoredMatrix, device: Device, arrays: Arrays) -> None:
    multiply_row(device, arrays, tiled_matrix(stored, arrays), arrays["x"], arrays["out"])


def image_scratch(num_tokens: int, num_inputs: int) -> dict[str, Output]:
    """What `_multiply_many` works in."""
    return {"image": Output((image_bytes(num_inputs, num_tokens),), np.uint8), "row_scales": Output((num_tokens,))}


def _multiply_many(stored: StoredMatrix, x: str, device: Device, arrays: Arrays) -> None:
    """Tokens of halves into an image, then the engine's product; `x` names their array."""
    image, scales, matrix = arrays["image"], arrays["row_scales"], tiled_matrix(stored, arrays)
    stage_wide(device, x=arrays[x], unit_inputs=stored.layout.unit_inputs, out=image, row_scales=scales)
    gemm_wide(device, matrix=matrix, image=image, row_scales=scales, out=arrays["out"])


KINDS = (
    ProblemKind("matmul", "product of two matrices of halves", make_matmul),
    ProblemKind("gemv", "a matrix of halves times one row", make_gemv),
    ProblemKind("gemv_int8", "a matrix of int8 codes times one row", partial(make_gemv_codes, "int8")),
    ProblemKind("gemv_int4", "a matrix of int4 codes times one row", partial(make_gemv_codes, "int4")),
    ProblemKind("int8_product", "tokens times a matrix of int8 codes", make_int8_product),
)
