"""The first problems: copies, a stencil, launches, branches and loops."""

import numpy as np

from llmcli.kernels.spec import KernelCost
from llmcli.lab.problem import ROUNDING, Expected, Output, Problem, ProblemKind


def make_copy(n: int, stride: int = 1) -> Problem:
    """out = x. `stride` is the distance of the elements of neighbouring threads, for kernels that use it.

    The result does not depend on how threads share the elements, but the time does.
    Shapes: x, out [n] float32
    """
    x = np.random.default_rng(n).random(n, np.float32)
    return Problem(
        inputs={"x": x},
        outputs={"out": Output(x.shape)},
        reference=lambda: {"out": Expected(x.astype(np.float64), 0.0)},
        cost=KernelCost(read_bytes=4 * n, written_bytes=4 * n, flops=0),
    )


def make_transpose(num_rows: int, num_columns: int) -> Problem:
    """out[j, i] = x[i, j]: every byte moves, and nothing is computed.

    Shapes: x [num_rows, num_columns]; out [num_columns, num_rows]; both float32
    """
    x = np.random.default_rng([num_rows, num_columns]).random((num_rows, num_columns), np.float32)
    return Problem(
        inputs={"x": x},
        outputs={"out": Output((num_columns, num_rows))},
        reference=lambda: {"out": Expected(np.ascontiguousarray(x.T, np.float64), 0.0)},
        cost=KernelCost(read_bytes=x.nbytes, written_bytes=x.nbytes, flops=0),
    )


# The Laplacian by central differences of second order. Inverse squares of the spacing along each axis are all
# different, so that mixed-up axes show.
_X, _Y, _Z = np.float32(1.0), np.float32(0.7), np.float32(0.4)
_CENTER = np.float32(-2 * (_X + _Y + _Z))


def make_laplacian(nx: int, ny: int, nz: int) -> Problem:
    """The second differences of u, summed over the axes, at inner points; f is 0 at first, and stays 0 at the boundary.

    Seven points are read, one is written. Source: AMD lab notes, finite difference method, parts 1 to 3.
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
        return {"f": Expected(values, 7.01 * ROUNDING * magnitude)}

    return Problem(
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


def make_launches(num_blocks: int) -> Problem:
    """done = 1, once all launches have ended: the cost of kernels that do no work. `num_blocks` is for the launches.

    Shapes: done [1] int32
    """
    return Problem(
        inputs={},
        outputs={"done": Output((1,), np.int32)},
        reference=lambda: {"done": Expected(np.ones(1), 0.0)},
        cost=KernelCost(read_bytes=0, written_bytes=4, flops=0),
    )


# Values that creep towards a limit: arithmetic without memory, for studies of branches and loops.
#
# A step is v = c * v + d, rounded once. After k steps a value x has become limit + (x - limit) * c^k, so far from the
# limit that one step more or less shows.

_LOWEST, _HIGHEST = 2.0, 3.0  # of x; both limits lie below, and every value stays above its limit
_EVEN_FACTOR = 1 - 2.0**-12  # d is 2^-12, the limit 1
_ODD_FACTOR = 1 - 2.0**-11  # d is -2^-11, the limit -1
_STEPS_A_TURN = 8


def make_branches(n: int, num_steps: int) -> Problem:
    """Elements of even index take `num_steps` steps towards 1, those of odd index towards -1, at twice the pace.

    Shapes: x, out [n] float32
    """
    x = _starts(n, num_steps)

    def reference() -> dict[str, Expected]:
        is_odd = np.arange(n) % 2 == 1
        return {"out": _relaxed(x, np.where(is_odd, _ODD_FACTOR, _EVEN_FACTOR), np.where(is_odd, -1, 1), num_steps)}

    return Problem(
        inputs={"x": x},
        outputs={"out": Output(x.shape)},
        reference=reference,
        cost=KernelCost(read_bytes=4 * n, written_bytes=4 * n, flops=2 * n * num_steps),
    )


def make_uneven_loops(n: int, max_turns: int) -> Problem:
    """Element i takes 8 * num_turns[i] steps towards 1. Most turns are few: a fifth of `max_turns` on average.

    `order` lists the elements by their turns, the most first.
    Shapes: x, out [n] float32; num_turns, order [n] int32
    """
    x = _starts(n, max_turns)
    share = np.random.default_rng([n, max_turns, 1]).random(n) ** 4
    num_turns = (1 + share * max_turns).astype(np.int32)
    num_steps = _STEPS_A_TURN * num_turns.astype(np.int64)

    return Problem(
        inputs={"x": x, "num_turns": num_turns, "order": np.argsort(-num_turns, kind="stable").astype(np.int32)},
        outputs={"out": Output(x.shape)},
        reference=lambda: {"out": _relaxed(x, _EVEN_FACTOR, 1, num_steps)},
        cost=KernelCost(read_bytes=8 * n, written_bytes=4 * n, flops=2 * int(num_steps.sum())),
    )


def _starts(n: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng([n, seed])
    return (_LOWEST + (_HIGHEST - _LOWEST) * generator.random(n, np.float32)).astype(np.float32)


def _relaxed(
    x: np.ndarray, factor: np.ndarray | float, limit: np.ndarray | int, num_steps: np.ndarray | int
) -> Expected:
    values = limit + (x - np.float64(limit)) * np.power(factor, num_steps)
    # Every step rounds once, a value of at most _HIGHEST; no factor is above 1, so no error grows afterwards.
    return Expected(values, ROUNDING * _HIGHEST * np.float64(num_steps))


KINDS = (
    ProblemKind("copy", "a copy of an array", make_copy),
    ProblemKind("transpose", "the transpose of a matrix", make_transpose),
    ProblemKind("laplacian", "the Laplacian on a 3-D grid, seven points", make_laplacian),
    ProblemKind("launches", "launches that do no work", make_launches),
    ProblemKind("branches", "two long branches, one for even and one for odd elements", make_branches),
    ProblemKind("uneven_loops", "a loop for each element, of lengths that differ", make_uneven_loops),
)
