"""A few rows times a tiled matrix: formats, groups, norm, bias, epilogues, chunks of the inputs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.gemv import GATED_SCALE, Epilogue, gemv, gemv_cost
from llmcli.lab.matrices import StoredMatrix, arrays_of, matrix_of, random_matrix, tiles_of
from llmcli.lab.problem import ENGINE, ROUNDING, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import HALF_SUBNORMAL, powers_of_two, truncated_sum_bound, widened

FORMATS: list[dict[str, Any]] = [
    {"weight_type": "int8", "scale_type": "float32"},
    {"weight_type": "int8", "scale_type": "bfloat16", "group_size": 128},
    {"weight_type": "int8", "scale_type": "float16", "group_size": 64},
    {"weight_type": "int8", "scale_type": "float32", "group_size": 32},
    {"weight_type": "int8", "scale_type": "float16", "group_size": 16, "is_symmetric": False},
    {"weight_type": "int8", "scale_type": "float16", "is_symmetric": False},
    {"weight_type": "int4", "scale_type": "float16"},
    {"weight_type": "int4", "scale_type": "bfloat16", "group_size": 128},
    {"weight_type": "int4", "scale_type": "float16", "group_size": 256, "is_symmetric": False},
    {"weight_type": "int4", "scale_type": "float32", "group_size": 64, "is_symmetric": False},
    {"weight_type": "int4", "scale_type": "bfloat16", "group_size": 32},
    {"weight_type": "int4", "scale_type": "float16", "group_size": 32, "is_symmetric": False},
    {"weight_type": "int4", "scale_type": "float32", "group_size": 16, "is_symmetric": False},
    {"weight_type": "float16"},
    {"weight_type": "bfloat16"},
    {"weight_type": "float32"},
    {"weight_type": "fp8", "scale_type": "float32"},
    {"weight_type": "fp8", "scale_type": "bfloat16", "group_size": 128},
    {"weight_type": "fp8", "scale_type": "float16", "group_size": 256},
    {"weight_type": "fp8", "scale_type": "block", "group_size": 128},
    {"weight_type": "fp8", "scale_type": "block", "group_size": 256},
]
EPS = 1e-5
_HALF = 2.0**-11  # a rounding to fp16


@dataclass
class Case:
    """One product on the host, and its error bounds. x is float16 with scales, or float32."""

    stored: StoredMatrix
    x: np.ndarray
    row_scales: np.ndarray | None = None
    norm_weight: np.ndarray | None = None
    bias: np.ndarray | None = None
    before: np.ndarray | None = None

    def product(self) -> tuple[np.ndarray, np.ndarray]:
        """x' @ W.T + bias and its bound, float64 [num_rows, num_outputs]."""
        x, scale = self.x.astype(np.float64), np.ones((len(self.x), 1))
        if self.row_scales is not None:
            scale = self.row_scales[:, None].astype(np.float64)
            x = x * scale
        is_float = self.stored.weight_type == "float32"
        weights, num_terms = self.stored.weights, x.shape[1]
        error = np.zeros_like(x)  # of x
        if self.norm_weight is not None:
            x = x * self.norm_weight / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS)
            error += (10 + np.sqrt(num_terms) / 2) * ROUNDING * np.abs(x)
        if is_float:
            bound = (np.sqrt(num_terms) + 4) * ROUNDING * np.abs(x) @ np.abs(weights).T
        else:
            weights = self.stored.halves
            if self.x.dtype == np.float32:
                scale = np.maximum(np.ldexp(1.0, np.frexp(np.abs(x).max(axis=1, keepdims=True))[1] - 15), 1)
                error += _HALF * np.abs(x) + HALF_SUBNORMAL[np.dtype(np.float16)] * scale
            bound = truncated_sum_bound(x / scale, weights, self.stored.layout.unit_inputs, self.stored.power) * scale
        y = x @ weights.T
        bound = bound + error @ np.abs(weights).T + 12 * ROUNDING * np.abs(y)
        if self.bias is not None:
            y = y + self.bias.astype(np.float64)[: y.shape[1]]
            bound += 2 * ROUNDING * np.abs(y)
        return y, bound


def make_case(
    stored: StoredMatrix,
    num_rows: int,
    seed: int = 0,
    has_norm: bool = False,
    has_bias: bool = False,
    is_rounded: bool = False,
) -> Case:
    """Rows of different sizes; with four rows or more a zero row, a constant one, and one with an outlier of 1e4.

    With `is_rounded` rows are float16 with powers of two.
    """
    rng = np.random.default_rng(seed)
    num_inputs = stored.values.shape[1]
    x = rng.standard_normal((num_rows, num_inputs)).astype(np.float32)
    x *= 2.0 ** rng.integers(-6, 4, (num_rows, 1))
    if num_rows >= 4:
        x[1] = 0
        x[2] = 0.3
        x[3, num_inputs // 2] = 1e4 if is_rounded else 1e6
    norm_weight = rng.uniform(0.5, 2, (num_inputs,)).astype(np.float32) if has_norm else None
    bias = rng.standard_normal(stored.layout.padded_rows).astype(np.float32) if has_bias else None
    if is_rounded:
        return Case(stored, x.astype(np.float16), powers_of_two(num_rows), norm_weight, bias)
    return Case(stored, x, None, norm_weight, bias)


def swiglu_of_tiles(y: np.ndarray, bound: np.ndarray, num_columns: int) -> tuple[np.ndarray, np.ndarray]:
    """silu(gate) * up of tiles of 8 columns of gate and 8 of up, and its bound. Shapes: y, bound [num_rows, outputs]"""
    tiles, bounds = (values.reshape(len(values), -1, 2, 8) for values in (y, bound))
    gate, up = (tiles[:, :, i].reshape(len(y), -1)[:, :num_columns] for i in (0, 1))
    gate_bound, up_bound = (bounds[:, :, i].reshape(len(y), -1)[:, :num_columns] for i in (0, 1))
    silu = gate / (1 + np.exp(-gate))
    # The slope of silu is at most 1.1; its own exponential and quotient take 4 roundings.
    error = 1.1 * gate_bound * (np.abs(up) + up_bound) + np.abs(silu) * up_bound + 8 * ROUNDING * np.abs(silu * up)
    return silu * up, error


def gated_as_stored(y: np.ndarray, bound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """SwiGLU's results as they are stored in fp16: over GATED_SCALE, cut off at the largest number. And their bound."""
    stored, size = np.clip(y / GATED_SCALE, -65504, 65504), np.abs(y) / GATED_SCALE
    # The fast exponential and quotient, then the rounding to fp16, also below its smallest normal number.
    error = bound / GATED_SCALE + (_HALF + 2.0**-16) * size + HALF_SUBNORMAL[np.dtype(np.float16)]
    return stored, error


def problem_of(case: Case, epilogue: Epilogue = "store", num_outputs: int | None = None) -> Problem:
    """The product of a case, its rows with gaps between them."""
    num_rows, num_inputs = case.x.shape
    layout = case.stored.layout
    is_float, is_rounded = layout.weight_type == "float32", case.row_scales is not None
    out_shape = (num_rows, num_outputs or layout.num_rows)
    out_type = np.float16 if epilogue == "swiglu" and not is_float else np.float32
    others = {
        "row_scales": case.row_scales,
        "norm_weight": case.norm_weight,
        "bias": case.bias,
        "before": case.before,
    }
    given = {name: array for name, array in others.items() if array is not None}

    def reference() -> dict[str, Expected]:
        y, bound = case.product()
        if epilogue == "add":
            assert case.before is not None
            y = case.before + y
            bound = bound + 8 * ROUNDING * np.abs(y)
        elif epilogue == "swiglu":
            y, bound = swiglu_of_tiles(y, bound, out_shape[1])
            if not is_float:
                y, bound = gated_as_stored(y, bound)
        return {"out": Expected(y, bound)}

    def solve(device: Device, arrays: Arrays) -> None:
        gemv(
            device,
            matrix=matrix_of(layout, arrays, case.stored),
            x=arrays["x"][:, :num_inputs],
            out=arrays["out"],
            row_scales=arrays.get("row_scales"),
            norm_weight=arrays.get("norm_weight"),
            eps=EPS,
            bias=arrays.get("bias"),
            epilogue=epilogue,
        )

    has_norm, has_bias = case.norm_weight is not None, case.bias is not None
    notes = "norm" if has_norm else "", "rounded" if is_rounded else ""
    return Problem(
        "gemv_float" if is_float else "gemv",
        {"num_rows": num_rows, "num_inputs": num_inputs, "num_outputs": out_shape[1]},
        inputs={"x": widened(case.x, -num_inputs % 8 + 16), **arrays_of(tiles_of(case.stored)), **given},
        outputs={"out": Output(out_shape, out_type, initial="before" if epilogue == "add" else "")},
        reference=reference,
        cost=gemv_cost(
            layout, min(num_rows, 8), epilogue=epilogue, is_rounded=is_rounded, has_norm=has_norm, has_bias=has_bias
        ),
        solvers={ENGINE: solve},
        label=" ".join(filter(None, (case.stored.name, epilogue, *notes))),
    )


def _case(form: dict[str, Any], num_outputs: int, num_inputs: int, num_rows: int, **options: bool) -> Case:
    return make_case(
        random_matrix(num_inputs, num_rows=num_outputs, num_inputs=num_inputs, **form), num_rows, **options
    )


def _checks_of(forms: list[dict[str, Any]], some: list[dict[str, Any]], *, can_round: bool) -> Iterator[Problem]:
    """Tails, one row and eight, as float32 and in fp16; `some` with all epilogues."""
    for form in forms:
        yield problem_of(_case(form, 35, 72, 1))
        yield problem_of(_case(form, 100, 1001, 1, is_rounded=can_round))
        yield problem_of(_case(form, 24, 136, 3))
        yield problem_of(_case(form, 40, 600, 8, is_rounded=can_round))
        yield problem_of(_case(form, 40, 600, 8, has_norm=True))
        yield problem_of(_case(form, 40, 600, 1, has_norm=True))
    before = np.random.default_rng(3).standard_normal((8, 96)).astype(np.float32)
    for form in some:
        case = _case(form, 96, 320, 8, has_bias=True, has_norm=not can_round, is_rounded=can_round)
        yield problem_of(case)
        yield problem_of(replace(case, before=before), "add")
        yield problem_of(case, "swiglu", 44)
    yield problem_of(_case(some[0], 64, 11008, 8, is_rounded=can_round))


IN_HALVES = [form for form in FORMATS if form["weight_type"] != "float32"]
_IN_FLOATS = [{"weight_type": "float32"}]

GEMV = KernelCases(
    "gemv",
    lambda: _checks_of(IN_HALVES, [FORMATS[1], FORMATS[11], FORMATS[14], FORMATS[17], FORMATS[19]], can_round=True),
    lambda: problem_of(_case(FORMATS[1], 4096, 4096, 1, is_rounded=True)),
)
GEMV_FLOAT = KernelCases(
    "gemv_float",
    lambda: _checks_of(_IN_FLOATS, _IN_FLOATS, can_round=False),
    lambda: problem_of(_case(_IN_FLOATS[0], 4096, 4096, 1)),
)
