"""Nine and more rows, as digits, times a tiled matrix of codes: formats, numbers of rows, bias, epilogues."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.gemm_codes import gemm_codes, gemm_codes_cost
from llmcli.kernels.gemv import Epilogue
from llmcli.lab.cases.gemv import U, swiglu_of_tiles
from llmcli.lab.cases.stage_digits import make_rows
from llmcli.lab.matrices import StoredMatrix, arrays_of, matrix_of, random_matrix, tiles_of
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import digits_of

FORMATS: list[dict[str, Any]] = [
    {"weight_type": "int8", "scale_type": "float32"},
    {"weight_type": "int8", "scale_type": "bfloat16", "group_size": 128},
    {"weight_type": "int8", "scale_type": "float16", "group_size": 256},
    {"weight_type": "int8", "scale_type": "float16", "group_size": 256, "is_symmetric": False},
    {"weight_type": "int8", "scale_type": "float32", "is_symmetric": False},
    {"weight_type": "int4", "scale_type": "float16"},
    {"weight_type": "int4", "scale_type": "bfloat16", "group_size": 128},
    {"weight_type": "int4", "scale_type": "float32", "group_size": 128, "is_symmetric": False},
    {"weight_type": "int4", "scale_type": "float16", "group_size": 256, "is_symmetric": False},
]
_UNUSED = 0xFF  # bytes of rows that do not exist: as scales they are NaN


def problem_of(
    stored: StoredMatrix,
    num_rows: int,
    epilogue: Epilogue = "store",
    num_outputs: int | None = None,
    has_bias: bool = False,
) -> Problem:
    """The product of `num_rows` rows with given digits."""
    layout = stored.layout
    rng = np.random.default_rng([num_rows, layout.num_inputs])
    x = make_rows(num_rows, layout.num_inputs)
    digits = digits_of(layout, x)
    sizes = np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1))
    factors = (rng.uniform(0.1, 0.4, num_rows) / np.where(sizes > 0, sizes, 1)).astype(np.float32)
    out_shape = (num_rows, num_outputs or layout.num_rows)
    given: dict[str, np.ndarray] = {}
    if has_bias:
        given["bias"] = rng.standard_normal(layout.padded_rows).astype(np.float32)
    if epilogue == "add":
        given["before"] = rng.standard_normal(out_shape).astype(np.float32)

    def reference() -> dict[str, Expected]:
        x, weights = digits.values * factors[:, None].astype(np.float64), stored.weights
        y = x @ weights.T
        # Integers are exact. Then each unit's sum and scale are rounded, and the sum of units; factors follow.
        bound = (np.sqrt(layout.num_units) + 4) * U * (np.abs(x) @ np.abs(weights).T) + 4 * U * np.abs(y)
        if has_bias:
            y = y + given["bias"].astype(np.float64)[: y.shape[1]]
            bound += 2 * U * np.abs(y)
        if epilogue == "add":
            y = given["before"] + y
            bound = bound + 2 * U * np.abs(y)
        elif epilogue == "swiglu":
            y, bound = swiglu_of_tiles(y, bound, out_shape[1])
        return {"out": Expected(y, bound)}

    def solve(device: Device, arrays: Arrays) -> None:
        gemm_codes(
            device,
            matrix=matrix_of(layout, arrays),
            image=arrays["image"],
            factors=arrays["factors"],
            out=arrays["out"],
            bias=arrays.get("bias"),
            epilogue=epilogue,
        )

    return Problem(
        "gemm_codes",
        {"num_rows": num_rows, "num_inputs": layout.num_inputs, "num_outputs": out_shape[1]},
        inputs={"image": digits.image(_UNUSED), "factors": factors, **arrays_of(tiles_of(stored)), **given},
        outputs={"out": Output(out_shape, initial="before" if epilogue == "add" else "")},
        reference=reference,
        cost=gemm_codes_cost(layout, num_rows, epilogue=epilogue, has_bias=has_bias),
        solvers={ENGINE: solve},
        label=f"{stored.name}, {epilogue}",
    )


def _matrix(form: dict[str, Any], num_outputs: int, num_inputs: int) -> StoredMatrix:
    return random_matrix(num_inputs, num_rows=num_outputs, num_inputs=num_inputs, **form)


def _checks() -> Iterator[Problem]:
    for form in FORMATS:
        for num_outputs, num_inputs, num_rows in ((35, 72, 9), (100, 1001, 33), (300, 600, 70)):
            yield problem_of(_matrix(form, num_outputs, num_inputs), num_rows)
    for form in (FORMATS[1], FORMATS[4], FORMATS[6]):
        stored = _matrix(form, 96, 320)
        for num_rows in (16, 17, 32, 64, 65, 257):
            yield problem_of(stored, num_rows, has_bias=True)
        yield problem_of(stored, 24, "add", has_bias=True)
        yield problem_of(stored, 40, "swiglu", 44, has_bias=True)
    yield problem_of(_matrix(FORMATS[1], 64, 11008), 16)


def _typical() -> Problem:
    return problem_of(_matrix(FORMATS[1], 4096, 4096), 64)


CASES = KernelCases("gemm_codes", _checks, _typical)
