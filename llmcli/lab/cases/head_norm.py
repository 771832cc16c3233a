"""RMSNorm of each head, in place, in columns of a wider buffer."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.norms import head_norm, head_norm_cost
from llmcli.lab.matrices import EPSILON
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import make_rows

_EPS = np.float32(1e-6)
_BEHIND = 16  # columns after the heads


def case(num_rows: int, num_heads: int, head_dim: int, offset: int) -> Problem:
    """Heads between columns that do not change."""
    width = num_heads * head_dim
    before = np.random.default_rng(1).normal(size=(num_rows, offset + width + _BEHIND)).astype(np.float32)
    columns = slice(offset, offset + width)
    before[:, columns] = make_rows(num_rows * num_heads, head_dim).reshape(num_rows, width)
    weight = np.random.default_rng(2).uniform(-2, 2, head_dim).astype(np.float32)

    def reference() -> dict[str, Expected]:
        values = before.astype(np.float64)
        heads = values[:, columns].reshape(num_rows, num_heads, head_dim)
        normed = weight * heads / np.sqrt(np.mean(heads**2, axis=-1, keepdims=True) + np.float64(_EPS))
        values[:, columns] = normed.reshape(num_rows, width)
        bound = np.zeros_like(values)
        # Half of the sum's error; division, eps and rsqrtf (2 ulp) 5 roundings; two products, one of them the store's.
        bound[:, columns] = (2 + np.sqrt(head_dim) / 2 + 7) * EPSILON * np.abs(values[:, columns]) + 2.0**-150
        return {"x": Expected(values, bound)}

    def solve(device: Device, arrays: Arrays) -> None:
        head_norm(device, x=arrays["x"][:, columns], weight=arrays["weight"], eps=float(_EPS))

    return Problem(
        "head_norm",
        {"num_rows": num_rows, "num_heads": num_heads, "head_dim": head_dim, "offset": offset},
        inputs={"before": before, "weight": weight},
        outputs={"x": Output(before.shape, initial="before")},
        reference=reference,
        cost=head_norm_cost(num_rows=num_rows, num_heads=num_heads, head_dim=head_dim),
        solvers={ENGINE: solve},
    )


def _checks() -> Iterator[Problem]:
    for head_dim in (4, 6, 20, 64, 80, 100, 128, 254, 256):
        for offset in (0, 16):
            yield case(7, 3, head_dim, offset)
        yield case(1, 32, head_dim, 0)


CASES = KernelCases("head_norm", _checks, partial(case, 16, 32, 128, 0))
