"""Values that creep towards a limit: arithmetic without memory, for studies of branches and loops.

A step is v = c * v + d, rounded once. After k steps a value x has become limit + (x - limit) * c^k, so far from the
limit that one step more or less shows.
"""

import numpy as np

from llmcli.kernels.spec import KernelCost
from llmcli.lab.problem import Expected, Output, Problem, ProblemKind

_ROUNDING = 2.0**-24
_LOWEST, _HIGHEST = 2.0, 3.0  # of x; both limits lie below, and every value stays above its limit

EVEN_FACTOR, EVEN_TERM = 1 - 2.0**-12, 2.0**-12  # limit 1
ODD_FACTOR, ODD_TERM = 1 - 2.0**-11, -(2.0**-11)  # limit -1
STEPS_A_TURN = 8


def make_branches(n: int, num_steps: int) -> Problem:
    """Elements of even index take `num_steps` steps towards 1, those of odd index towards -1, at twice the pace.

    Shapes: x, out [n] float32
    """
    x = _starts(n, num_steps)

    def reference() -> dict[str, Expected]:
        is_odd = np.arange(n) % 2 == 1
        return {"out": _relaxed(x, np.where(is_odd, ODD_FACTOR, EVEN_FACTOR), np.where(is_odd, -1, 1), num_steps)}

    return Problem(
        "branches",
        {"n": n, "num_steps": num_steps},
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

    def reference() -> dict[str, Expected]:
        return {"out": _relaxed(x, EVEN_FACTOR, 1, STEPS_A_TURN * num_turns.astype(np.int64))}

    return Problem(
        "uneven_loops",
        {"n": n, "max_turns": max_turns},
        inputs={"x": x, "num_turns": num_turns, "order": np.argsort(-num_turns, kind="stable").astype(np.int32)},
        outputs={"out": Output(x.shape)},
        reference=reference,
        cost=KernelCost(
            read_bytes=8 * n, written_bytes=4 * n, flops=2 * STEPS_A_TURN * int(num_turns.sum(dtype=np.int64))
        ),
    )


def _starts(n: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng([n, seed])
    return (_LOWEST + (_HIGHEST - _LOWEST) * generator.random(n, np.float32)).astype(np.float32)


def _relaxed(
    x: np.ndarray, factor: np.ndarray | float, limit: np.ndarray | int, num_steps: np.ndarray | int
) -> Expected:
    values = limit + (x - np.float64(limit)) * np.power(factor, num_steps)
    # Every step rounds once, a value of at most _HIGHEST; no factor is above 1, so no error grows afterwards.
    return Expected(values, _ROUNDING * _HIGHEST * np.float64(num_steps))


BRANCHES = ProblemKind("branches", "two long branches, one for even and one for odd elements", make_branches)
UNEVEN_LOOPS = ProblemKind("uneven_loops", "a loop for each element, of lengths that differ", make_uneven_loops)
