"""A few rows times a tiled matrix: formats, groups, norm, bias, epilogues."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmcli.kernels.card_facts import TYPICAL_CARD
from llmcli.kernels.device import Device
from llmcli.kernels.gemv import Epilogue, gemv, gemv_cost, plan_passes
from llmcli.kernels.spec import KernelCost
from llmcli.lab.matrices import StoredMatrix, arrays_of, matrix_of, random_matrix, tiles_of
from llmcli.lab.problem import ENGINE, ROUNDING, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import widened

FORMATS: list[dict[str, Any]] = [
    {"weight_type": "int8", "scale_type": "float32"},
    {"weight_type": "int8", "scale_type": "bfloat16", "group_size": 128},
    {"weight_type": "int8", "scale_type": "float16", "group_size": 64},
    {"weight_type": "int8", "scale_type": "float32", "group_size": 32},
    {"weight_type": "int8", "scale_type": "float16", "group_size": 16, "is_symmetric": False},
    {"weight_type": "int8", "scale_type": "float16", "group_size": 8},
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
# What x loses as hi + lo: relative to itself and to the largest in its span. With codes the latter becomes 32639,
# within 2 ulp of a quotient, and the others integers.
_SPLIT_ERROR = {"float16": 2.0**-22, "fp8": 2.0**-22, "bfloat16": 2.0**-18}
_SPAN_ERROR = {"int8": 1 / 63000, "int4": 1 / 63000, "float16": 2.0**-39, "fp8": 2.0**-39}
EPS = 1e-5
U = ROUNDING  # under this name for gemm_codes and gemm_halves


@dataclass
class Case:
    """One product on the host, and its error bounds."""

    stored: StoredMatrix
    x: np.ndarray
    norm_weight: np.ndarray | None = None
    bias: np.ndarray | None = None
    before: np.ndarray | None = None

    def product(self) -> tuple[np.ndarray, np.ndarray]:
        """x' @ W.T + bias and its bound, float64 [num_rows, num_outputs]."""
        x = self.x.astype(np.float64)
        normed = x if self.norm_weight is None else x * self.norm_weight.astype(np.float64)
        inverse: np.ndarray | float = 1.0
        if self.norm_weight is not None:
            inverse = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS)
        weights = self.stored.weights
        y = normed @ weights.T * inverse
        magnitude = np.abs(normed) @ np.abs(weights).T * inverse
        num_terms = x.shape[1]
        # The sum, a rounding of x * w and of each scale, then x's own; the mean of the squares counts half.
        bound = (np.sqrt(num_terms) + 4) * ROUNDING * magnitude
        bound += _SPLIT_ERROR.get(self.stored.weight_type, 0) * magnitude
        bound += (
            _SPAN_ERROR.get(self.stored.weight_type, 0) * inverse * self._largest_of_spans(normed) @ np.abs(weights).T
        )
        bound += (4 + np.sqrt(num_terms) / 2 * (self.norm_weight is not None)) * ROUNDING * np.abs(y)
        if self.bias is not None:
            y = y + self.bias.astype(np.float64)[: y.shape[1]]
            bound += 2 * ROUNDING * np.abs(y)
        return y, bound

    def _largest_of_spans(self, x: np.ndarray) -> np.ndarray:
        """The largest magnitude in the span of each input. Shapes: x, result [num_rows, num_inputs]"""
        size = self.stored.layout.span_inputs
        padded = np.pad(np.abs(x), ((0, 0), (0, -x.shape[1] % size)))
        largest = np.maximum(padded.reshape(len(x), -1, size).max(axis=2), 2.0**-100)
        return np.asarray(np.repeat(largest, size, axis=1)[:, : x.shape[1]])


def make_case(
    stored: StoredMatrix, num_rows: int, seed: int = 0, has_norm: bool = False, has_bias: bool = False
) -> Case:
    """Rows of different sizes; with four rows or more a zero row, a constant one, and one with an outlier of 1e4."""
    rng = np.random.default_rng(seed)
    num_inputs = stored.values.shape[1]
    x = rng.standard_normal((num_rows, num_inputs)).astype(np.float32)
    x *= 2.0 ** rng.integers(-40, 40, (num_rows, 1))
    if num_rows >= 4:
        x[1] = 0
        x[2] = 0.3
        x[3, num_inputs // 2] = 1e4
    norm_weight = rng.uniform(0.5, 2, (num_inputs,)).astype(np.float32) if has_norm else None
    bias = rng.standard_normal(stored.layout.padded_rows).astype(np.float32) if has_bias else None
    return Case(stored, x, norm_weight, bias)


def swiglu_of_tiles(y: np.ndarray, bound: np.ndarray, num_columns: int) -> tuple[np.ndarray, np.ndarray]:
    """silu(gate) * up of tiles of 8 columns of gate and 8 of up, and its bound. Shapes: y, bound [num_rows, outputs]"""
    tiles, bounds = (values.reshape(len(values), -1, 2, 8) for values in (y, bound))
    gate, up = (tiles[:, :, i].reshape(len(y), -1)[:, :num_columns] for i in (0, 1))
    gate_bound, up_bound = (bounds[:, :, i].reshape(len(y), -1)[:, :num_columns] for i in (0, 1))
    silu = gate / (1 + np.exp(-gate))
    # The slope of silu is at most 1.1; its own exponential and quotient take 4 roundings.
    error = 1.1 * gate_bound * (np.abs(up) + up_bound) + np.abs(silu) * up_bound + 8 * ROUNDING * np.abs(silu * up)
    return silu * up, error


def problem_of(case: Case, epilogue: Epilogue = "store", num_outputs: int | None = None) -> Problem:
    """The product of a case, its rows with gaps between them."""
    num_rows, num_inputs = case.x.shape
    layout = case.stored.layout
    out_shape = (num_rows, num_outputs or layout.num_rows)
    others = {"norm_weight": case.norm_weight, "bias": case.bias, "before": case.before}
    given = {name: array for name, array in others.items() if array is not None}

    def reference() -> dict[str, Expected]:
        y, bound = case.product()
        if epilogue == "add":
            assert case.before is not None
            y = case.before + y
            bound = bound + 2 * ROUNDING * np.abs(y)
        elif epilogue == "swiglu":
            y, bound = swiglu_of_tiles(y, bound, out_shape[1])
        return {"out": Expected(y, bound)}

    def solve(device: Device, arrays: Arrays) -> None:
        gemv(
            device,
            matrix=matrix_of(layout, arrays),
            x=arrays["x"][:, :num_inputs],
            out=arrays["out"],
            norm_weight=arrays.get("norm_weight"),
            eps=EPS,
            bias=arrays.get("bias"),
            epilogue=epilogue,
        )

    return Problem(
        "gemv",
        {"num_rows": num_rows, "num_inputs": num_inputs, "num_outputs": out_shape[1]},
        inputs={"x": widened(case.x, 12), **arrays_of(tiles_of(case.stored)), **given},
        outputs={"out": Output(out_shape, initial="before" if epilogue == "add" else "")},
        reference=reference,
        cost=_cost(case, epilogue),
        solvers={ENGINE: solve},
        label=" ".join(filter(None, (case.stored.name, epilogue, "norm" if case.norm_weight is not None else ""))),
    )


def _cost(case: Case, epilogue: Epilogue) -> KernelCost:
    """The cost of the first launch, which is the only one up to eight rows."""
    plan = next(
        plan_passes(
            case.stored.layout,
            len(case.x),
            num_multiprocessors=TYPICAL_CARD.num_multiprocessors,
            shared_bytes_per_block=TYPICAL_CARD.shared_bytes_per_block,
            can_cluster=TYPICAL_CARD.can_cluster,
        )
    )
    has_norm, has_bias = case.norm_weight is not None, case.bias is not None
    return gemv_cost(plan, case.stored.layout, epilogue=epilogue, has_norm=has_norm, has_bias=has_bias)


def _case(form: dict[str, Any], num_outputs: int, num_inputs: int, num_rows: int, **options: bool) -> Case:
    return make_case(
        random_matrix(num_inputs, num_rows=num_outputs, num_inputs=num_inputs, **form), num_rows, **options
    )


def _checks() -> Iterator[Problem]:
    for form in FORMATS:
        yield problem_of(_case(form, 35, 72, 1))
        yield problem_of(_case(form, 100, 1001, 1))
        yield problem_of(_case(form, 40, 600, 8, has_norm=True))
        yield problem_of(_case(form, 40, 600, 1, has_norm=True))
    before = np.random.default_rng(3).standard_normal((8, 96)).astype(np.float32)
    for form in (FORMATS[1], FORMATS[12], FORMATS[15], FORMATS[18]):
        case = _case(form, 96, 320, 8, has_norm=True, has_bias=True)
        yield problem_of(case)
        yield problem_of(replace(case, before=before), "add")
        yield problem_of(case, "swiglu", 44)
    yield problem_of(_case(FORMATS[1], 64, 11008, 8))


GEMV = KernelCases("gemv", _checks, lambda: problem_of(_case(FORMATS[1], 4096, 4096, 1)))
