"""A few rows times a tiled matrix: formats, groups, norm, bias, epilogues, chunks of the inputs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.gemv import GATED_SCALE, Epilogue, NextRows, RowNorm, gemv, gemv_cost, gemv_float, norm_sums
from llmcli.lab.matrices import StoredMatrix, arrays_of, matrix_of, random_matrix, tiles_of
from llmcli.lab.problem import ENGINE, ROUNDING, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import HALF_SUBNORMAL, powers_of_two, rounded_rows, truncated_sum_bound, widened

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
    """One product on the host, and its error bounds. x is float16; or float32 for weights of 32 bits.

    With `hidden` x is hidden * norm_weight as the product before leaves it: without powers of two.
    """

    stored: StoredMatrix
    x: np.ndarray
    row_scales: np.ndarray | None = None
    hidden: np.ndarray | None = None
    norm_weight: np.ndarray | None = None
    bias: np.ndarray | None = None
    before: np.ndarray | None = None

    def product(self) -> tuple[np.ndarray, np.ndarray]:
        """x' @ W.T + bias and its bound, float64 [num_rows, num_outputs]."""
        is_float = self.stored.weight_type == "float32"
        weights = self.stored.weights if is_float else self.stored.halves
        x, scale = self.x.astype(np.float64), np.ones((len(self.x), 1))
        error = np.zeros(x.shape)  # of x
        if self.hidden is not None and self.norm_weight is not None:
            hidden = self.hidden.astype(np.float64)
            rounded, powers = rounded_rows(hidden * self.norm_weight, np.float16, 2 * ROUNDING, lifts=True)
            scale = powers.values[:, None] / np.sqrt(np.mean(hidden * hidden, axis=1, keepdims=True) + EPS)
            x, error = rounded.values, np.asarray(rounded.bound)
        elif self.norm_weight is not None:
            x = x * self.norm_weight / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS)
            error += (10 + np.sqrt(x.shape[1]) / 2) * ROUNDING * np.abs(x)
        if self.row_scales is not None:
            scale = self.row_scales[:, None].astype(np.float64)
        if is_float:
            bound = (np.sqrt(x.shape[1]) + 4) * ROUNDING * np.abs(x) @ np.abs(weights).T
        else:
            bound = truncated_sum_bound(x, weights, self.stored.layout.unit_inputs, self.stored.power)
        y = (x @ weights.T) * scale
        # A norm's factor has the roundings of its sum.
        num_roundings = 12 if self.hidden is None else 12 + np.sqrt(x.shape[1]) / 2
        bound = (bound + error @ np.abs(weights).T) * scale + num_roundings * ROUNDING * np.abs(y)
        if self.bias is not None:
            y = y + self.bias.astype(np.float64)[: y.shape[1]]
            bound += 2 * ROUNDING * np.abs(y)
        return y, bound


def make_case(
    stored: StoredMatrix,
    num_rows: int,
    seed: int = 0,
    *,
    has_norm: bool = False,
    has_bias: bool = False,
    has_scales: bool = False,
) -> Case:
    """Rows of different sizes; with four rows or more a zero row, a constant one, and one with an outlier.

    With a norm some rows need a power of two: a small one, and one with an outlier of 1e6.
    """
    rng = np.random.default_rng(seed)
    num_inputs, is_float = stored.values.shape[1], stored.weight_type == "float32"
    x = rng.standard_normal((num_rows, num_inputs)).astype(np.float32)
    x *= 2.0 ** rng.integers(-6, 4, (num_rows, 1))
    if num_rows >= 4:
        x[1] = 0
        x[2] = 0.3
        x[3, num_inputs // 2] = 1e6 if is_float or has_norm else 1e4
    if num_rows >= 5:
        x[4] *= 2.0**-20
    norm_weight = rng.uniform(0.5, 2, (num_inputs,)).astype(np.float32) if has_norm else None
    bias = rng.standard_normal(stored.layout.padded_rows).astype(np.float32) if has_bias else None
    scales = powers_of_two(num_rows) if has_scales else None
    if is_float:
        return Case(stored, x, scales, None, norm_weight, bias)
    hidden = x if has_norm else None
    with np.errstate(over="ignore"):
        halves = (x if norm_weight is None else x * norm_weight).astype(np.float16)
    return Case(stored, halves, scales, hidden, norm_weight, bias)


def tile_sums(hidden: np.ndarray, rounded: np.ndarray) -> np.ndarray:
    """What a product leaves for the norm of the next one: of 16 inputs the sum of squares and the largest magnitude.

    Shapes: hidden, rounded [num_rows, num_inputs]; result float64 [num_rows, norm_sums(num_inputs)]
    """
    padding = ((0, 0), (0, -hidden.shape[1] % 32))
    tiles, sizes = (np.pad(one.astype(np.float64), padding).reshape(len(one), -1, 16) for one in (hidden, rounded))
    sums = np.stack([(tiles * tiles).sum(axis=2), np.abs(sizes).max(axis=2)], axis=2)
    return sums.reshape(len(hidden), -1)


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


def problem_of(
    case: Case, epilogue: Epilogue = "store", num_outputs: int | None = None, *, leads: bool = False
) -> Problem:
    """The product of a case, its rows with gaps between them. `leads`: it also writes what the next product takes."""
    num_rows, num_inputs = case.x.shape
    layout = case.stored.layout
    is_float = layout.weight_type == "float32"
    out_shape = (num_rows, num_outputs or layout.num_rows)
    out_type = np.float16 if epilogue == "swiglu" and not is_float else np.float32
    next_weight = np.random.default_rng(num_inputs).uniform(0.5, 2, out_shape[1]).astype(np.float32)
    others = {
        "row_scales": case.row_scales,
        "hidden": case.hidden,
        "norm_weight": case.norm_weight,
        "sums": None
        if case.hidden is None
        else tile_sums(case.hidden, case.hidden * case.norm_weight).astype(np.float32),
        "bias": case.bias,
        "before": case.before,
        "next_weight": next_weight if leads else None,
    }
    given = {name: array for name, array in others.items() if array is not None}
    outputs = {"out": Output(out_shape, out_type, initial="before" if epilogue == "add" else "")}
    if leads:
        outputs["next_x"] = Output((num_rows, out_shape[1] + -out_shape[1] % 8), np.float16, holds_zeros=True)
        outputs["next_sums"] = Output((num_rows, norm_sums(out_shape[1])), holds_zeros=True)

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
        expected = {"out": Expected(y, bound)}
        if leads:
            x, error = y * next_weight, bound * next_weight
            widths = ((0, 0), (0, -x.shape[1] % 8))
            half = error + _HALF * np.abs(x) + HALF_SUBNORMAL[np.dtype(np.float16)]
            expected["next_x"] = Expected(np.pad(x, widths), np.pad(half, widths))
            sums, largest = tile_sums(y, x), tile_sums(np.abs(y) + bound, np.abs(x) + error)
            expected["next_sums"] = Expected(sums, largest - sums + 16 * ROUNDING * largest)
        return expected

    def solve(device: Device, arrays: Arrays) -> None:
        product: dict[str, Any] = {
            "matrix": matrix_of(layout, arrays, case.stored),
            "x": arrays["x"][:, :num_inputs],
            "out": arrays["out"],
            "row_scales": arrays.get("row_scales"),
            "bias": arrays.get("bias"),
            "epilogue": epilogue,
        }
        if is_float:
            gemv_float(device, norm_weight=arrays.get("norm_weight"), eps=EPS, **product)
            return
        norm = RowNorm(arrays["sums"], arrays["hidden"], arrays["norm_weight"], EPS) if "sums" in arrays else None
        led = None
        if leads:
            next_x = arrays["next_x"][:, : out_shape[1]]
            led = NextRows(arrays["next_weight"], next_x, arrays["next_sums"])
        gemv(device, norm=norm, next_rows=led, **product)

    has_norm, has_bias = case.norm_weight is not None, case.bias is not None
    notes = "norm" if has_norm else "", "leads" if leads else ""
    return Problem(
        "gemv_float" if is_float else "gemv",
        {"num_rows": num_rows, "num_inputs": num_inputs, "num_outputs": out_shape[1]},
        inputs={"x": widened(case.x, -num_inputs % 8 + 16), **arrays_of(tiles_of(case.stored)), **given},
        outputs=outputs,
        reference=reference,
        cost=gemv_cost(
            layout, min(num_rows, 8), epilogue=epilogue, has_norm=has_norm, has_bias=has_bias, has_next=leads
        ),
        solvers={ENGINE: solve},
        label=" ".join(filter(None, (case.stored.name, epilogue, *notes))),
    )


def _case(form: dict[str, Any], num_outputs: int, num_inputs: int, num_rows: int, **options: bool) -> Case:
    return make_case(
        random_matrix(num_inputs, num_rows=num_outputs, num_inputs=num_inputs, **form), num_rows, **options
    )


def _checks_of(forms: list[dict[str, Any]], some: list[dict[str, Any]]) -> Iterator[Problem]:
    """Tails, one row and eight, with scales, with a norm; `some` with all epilogues."""
    for form in forms:
        yield problem_of(_case(form, 35, 72, 1))
        yield problem_of(_case(form, 100, 1001, 1, has_scales=True))
        yield problem_of(_case(form, 24, 136, 3, has_norm=True))
        yield problem_of(_case(form, 40, 600, 8, has_scales=True))
        yield problem_of(_case(form, 40, 600, 8, has_norm=True))
        yield problem_of(_case(form, 40, 600, 1, has_norm=True))
    before = np.random.default_rng(3).standard_normal((8, 96)).astype(np.float32)
    for form in some:
        is_float = form["weight_type"] == "float32"
        case = _case(form, 96, 320, 8, has_bias=True, has_norm=True)
        yield problem_of(case)
        yield problem_of(replace(case, before=before), "add", leads=not is_float)
        one = _case(form, 88, 1024, 1)
        yield problem_of(replace(one, before=before[:1, :88]), "add", 88, leads=not is_float)
        yield problem_of(case, "swiglu", 44)
    yield problem_of(_case(some[0], 64, 11008, 8))


def _float_checks() -> Iterator[Problem]:
    """Also of rows in fp16, as a product before leaves them."""
    yield from _checks_of(_IN_FLOATS, _IN_FLOATS)
    for num_rows in (1, 8):
        case = _case(_IN_FLOATS[0], 40, 600, num_rows, has_scales=True)
        yield problem_of(replace(case, x=np.clip(case.x, -60000, 60000).astype(np.float16)))


IN_HALVES = [form for form in FORMATS if form["weight_type"] != "float32"]
_IN_FLOATS = [{"weight_type": "float32"}]

GEMV = KernelCases(
    "gemv",
    lambda: _checks_of(IN_HALVES, [FORMATS[1], FORMATS[11], FORMATS[14], FORMATS[17], FORMATS[19]]),
    lambda: problem_of(_case(FORMATS[1], 4096, 4096, 1)),
)
GEMV_FLOAT = KernelCases(
    "gemv_float",
    _float_checks,
    lambda: problem_of(_case(_IN_FLOATS[0], 4096, 4096, 1)),
)
