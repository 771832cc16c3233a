"""The Laplacian on a 3-D grid by central differences of second order: seven points read, one written.

Source: AMD lab notes, finite difference method, parts 1 to 3.
"""

import numpy as np

from llmcli.kernels.spec import KernelCost
from llmcli.lab.problem import Expected, Output, Problem, ProblemKind

_ROUNDING = 2.0**-24
# Inverse squares of the spacing along each axis, all different, so that mixed-up axes show.
_X, _Y, _Z = np.float32(1.0), np.float32(0.7), np.float32(0.4)
_CENTER = np.float32(-2 * (_X + _Y + _Z))


def make(nx: int, ny: int, nz: int) -> Problem:
    """The second differences of u, summed over the axes, at inner points; f is 0 at first, and stays 0 at the boundary.

    Shapes: u, f [nz, ny, nx] float32
    """
    u = np.random.default_rng([nx, ny, nz]).random((nz, ny, nx), np.float32)
    inside = max(nx - 2, 0), max(ny - 2, 0), max(nz - 2, 0)
    num_inside = inside[0] * inside[1] * inside[2]
    # The edges of the box are not read.
    num_faces = 2 * (inside[0] * inside[1] + inside[0] * inside[2] + inside[1] * inside[2])

    def reference() -> dict[str, Expected]:
        values, magnitude = _second_differences(u.astype(np.float64))
        # Seven products, added one after the other: at most 7 roundings of each, and what they do to each other.
        return {"f": Expected(values, 7.01 * _ROUNDING * magnitude)}

    return Problem(
        "laplacian",
        {"nx": nx, "ny": ny, "nz": nz},
        inputs={"u": u},
        outputs={"f": Output(u.shape, holds_zeros=True)},
        reference=reference,
        cost=KernelCost(
            read_bytes=4 * (num_inside + num_faces) if num_inside else 0,
            written_bytes=4 * num_inside,
            flops=10 * num_inside,
        ),
        scalars={"inverse_hx2": _X, "inverse_hy2": _Y, "inverse_hz2": _Z, "center_factor": _CENTER},
    )


def _second_differences(u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The differences, and the sum of their terms' absolute values; u is not negative."""
    values, magnitude = np.zeros_like(u), np.zeros_like(u)
    inside = (slice(1, -1),) * 3
    values[inside] = float(_CENTER) * u[inside]
    for axis, factor in enumerate((_Z, _Y, _X)):
        before, after = list(inside), list(inside)
        before[axis], after[axis] = slice(None, -2), slice(2, None)
        values[inside] += float(factor) * (u[tuple(before)] + u[tuple(after)])
    magnitude[inside] = values[inside] - 2 * float(_CENTER) * u[inside]
    return values, magnitude


LAPLACIAN = ProblemKind("laplacian", "the Laplacian on a 3-D grid, seven points", make)
