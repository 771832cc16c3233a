"""Many tokens times a tiled matrix of codes."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.gemm_packed import gemm_packed, gemm_packed_cost
from llmcli.lab.matrices import StoredMatrix, arrays_of, matrix_of, random_matrix, tiles_of
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import widened

FORMATS: list[dict[str, Any]] = [
    {"weight_type": "int8", "scale_type": "float32"},
    {"weight_type": "int8", "scale_type": "bfloat16", "group_size": 128},
    {"weight_type": "int8", "scale_type": "float16", "group_size": 64, "is_symmetric": False},
    {"weight_type": "int8", "scale_type": "float32", "is_symmetric": False},
    {"weight_type": "int4", "scale_type": "float16"},
    {"weight_type": "int4", "scale_type": "bfloat16", "group_size": 128},
    {"weight_type": "int4", "scale_type": "float32", "group_size": 128, "is_symmetric": False},
]


def activations(num_tokens: int, num_inputs: int) -> np.ndarray:
    """Tokens of different sizes; one is zero, one has an outlier."""
    rng = np.random.default_rng(num_tokens)
    x = (rng.standard_normal((num_tokens, num_inputs)) * 2.0 ** rng.integers(-6, 4, (num_tokens, 1))).astype(np.float16)
    if num_tokens > 2:
        x[1] = 0
        x[2, num_inputs // 2] = 1e4
    return x


def problem_of(stored: StoredMatrix, num_tokens: int) -> Problem:
    """`num_tokens` tokens times a matrix; the gap after a token's inputs is NaN, and is not read."""
    num_rows, num_inputs = stored.values.shape
    layout = stored.layout
    x = activations(num_tokens, num_inputs)

    def reference() -> dict[str, Expected]:
        exact, weights = x.astype(np.float64), stored.weights
        values = exact @ weights.T
        magnitude = np.abs(exact) @ np.abs(weights).T
        return {"out": Expected(values, (np.sqrt(num_inputs) + 4) * 2.0**-24 * magnitude + 2.0**-23 * np.abs(values))}

    def solve(device: Device, arrays: Arrays) -> None:
        gemm_packed(device, matrix=matrix_of(layout, arrays), x=arrays["x"][:, :num_inputs], out=arrays["out"])

    return Problem(
        "gemm_packed",
        {"num_tokens": num_tokens, "num_inputs": num_inputs, "num_outputs": num_rows},
        inputs={"x": widened(x, 8), **arrays_of(tiles_of(stored))},
        outputs={"out": Output((num_tokens, num_rows))},
        reference=reference,
        cost=gemm_packed_cost(layout=layout, num_tokens=num_tokens),
        solvers={ENGINE: solve},
        label=stored.name,
    )


def _checks() -> Iterator[Problem]:
    for form in FORMATS:
        for num_rows, num_inputs, num_tokens in ((35, 72, 5), (130, 1000, 33)):
            yield problem_of(random_matrix(1, num_rows=num_rows, num_inputs=num_inputs, **form), num_tokens)
    for num_tokens in (1, 16, 17, 64, 65, 130):
        yield problem_of(random_matrix(2, num_rows=72, num_inputs=520, **FORMATS[1]), num_tokens)


def _typical() -> Problem:
    return problem_of(random_matrix(3, num_rows=4096, num_inputs=4096, **FORMATS[1]), 32)


CASES = KernelCases("gemm_packed", _checks, _typical)
