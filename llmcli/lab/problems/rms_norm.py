"""RMSNorm of rows. Source: arXiv 1910.07467, equation 4."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.rms_norm import rms_norm, rms_norm_cost
from llmcli.lab.matrices import EPSILON, STORAGE, storage_name
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem, ProblemKind
from llmcli.lab.rows import COLUMNS, make_rows, rounded_rows

_EPS = np.float32(1e-5)


def make(num_rows: int, num_columns: int) -> Problem:
    """out = weight * x / sqrt(mean(x^2) + eps).

    Shapes: x, out [num_rows, num_columns]; weight [num_columns]; all float32
    """
    generator = np.random.default_rng([num_rows, num_columns])
    x = generator.standard_normal((num_rows, num_columns)).astype(np.float32)
    weight = generator.uniform(0.5, 2, num_columns).astype(np.float32)

    def reference() -> dict[str, Expected]:
        values = _normed(x, weight)
        # Half of the sum's error, then a division, eps, a root (2 ulp) and two products.
        return {"out": Expected(values, (np.sqrt(num_columns) / 2 + 8) * EPSILON * np.abs(values))}

    return Problem(
        "rms_norm",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={"x": x, "weight": weight},
        outputs={"out": Output(x.shape)},
        reference=reference,
        cost=rms_norm_cost(num_rows=num_rows, num_columns=num_columns, itemsize=4),
        scalars={"eps": _EPS},
        scratch={"row_scale": Output((num_rows,))},
        solvers={ENGINE: _solve},
    )


def case(num_rows: int, num_columns: int, dtype: Any) -> Problem:
    """The same for rows of every kind, stored in any type with a power of two a row."""
    x = make_rows(num_rows, num_columns)
    generator = np.random.default_rng(num_columns)
    # Weights of 1e4 put rows above 2^15.
    weight = (generator.uniform(0.5, 2.0, num_columns) * generator.choice([-1, 1, 1e4], num_columns)).astype(np.float32)

    def reference() -> dict[str, Expected]:
        # Half of the sum's error; division, eps and rsqrtf (2 ulp) 5 roundings; two products.
        out, scale = rounded_rows(_normed(x, weight), dtype, (np.sqrt(num_columns) / 2 + 7) * EPSILON)
        return {"out": out, "row_scale": scale}

    return Problem(
        "rms_norm",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={"x": x, "weight": weight},
        outputs={"out": Output(x.shape, dtype), "row_scale": Output((num_rows,))},
        reference=reference,
        cost=rms_norm_cost(num_rows=num_rows, num_columns=num_columns, itemsize=np.dtype(dtype).itemsize),
        solvers={ENGINE: _solve},
        label=storage_name(dtype),
    )


def _checks() -> Iterator[Problem]:
    for num_columns in COLUMNS:
        for dtype in STORAGE:
            yield case(6, num_columns, dtype)


def _normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return np.asarray(weight * wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + np.float64(_EPS)))


def _solve(device: Device, arrays: Arrays) -> None:
    rms_norm(
        device,
        x=arrays["x"],
        weight=arrays["weight"],
        eps=float(_EPS),
        out=arrays["out"],
        row_scale=arrays["row_scale"],
    )


RMS_NORM = ProblemKind("rms_norm", "RMSNorm of rows", make)
CASES = KernelCases("rms_norm", _checks, partial(case, 1, 4096, np.float16))
