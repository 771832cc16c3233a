"""RMSNorm of rows. Source: arXiv 1910.07467, equation 4."""

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.norms import rms_norm, rms_norm_cost
from llmcli.lab.matrices import EPSILON
from llmcli.lab.problem import ENGINE, Arrays, Expected, Output, Problem, ProblemKind

EPS = np.float32(1e-5)


def make(num_rows: int, num_columns: int) -> Problem:
    """out = weight * x / sqrt(mean(x^2) + eps).

    Shapes: x, out [num_rows, num_columns]; weight [num_columns]; all float32
    """
    generator = np.random.default_rng([num_rows, num_columns])
    x = generator.standard_normal((num_rows, num_columns)).astype(np.float32)
    weight = generator.uniform(0.5, 2, num_columns).astype(np.float32)

    def reference() -> dict[str, Expected]:
        values = normed(x, weight)
        # Half of the sum's error, then a division, eps, a root (2 ulp) and two products.
        return {"out": Expected(values, (np.sqrt(num_columns) / 2 + 8) * EPSILON * np.abs(values))}

    return Problem(
        "rms_norm",
        {"num_rows": num_rows, "num_columns": num_columns},
        inputs={"x": x, "weight": weight},
        outputs={"out": Output(x.shape)},
        reference=reference,
        cost=rms_norm_cost(num_rows=num_rows, num_columns=num_columns, itemsize=4),
        scalars={"eps": EPS},
        scratch={"row_scale": Output((num_rows,))},
        solvers={ENGINE: solve},
    )


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The right rows, in float64. Shapes: as for `make`"""
    wide = x.astype(np.float64)
    return np.asarray(weight * wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + np.float64(EPS)))


def solve(device: Device, arrays: Arrays) -> None:
    """The engine's kernel."""
    rms_norm(
        device,
        x=arrays["x"],
        weight=arrays["weight"],
        eps=float(EPS),
        out=arrays["out"],
        row_scale=arrays["row_scale"],
    )


RMS_NORM = ProblemKind("rms_norm", "RMSNorm of rows", make)
