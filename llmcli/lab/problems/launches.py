"""Launches only: the cost of kernels that do no work."""

import numpy as np

from llmcli.kernels.spec import KernelCost
from llmcli.lab.problem import Expected, Output, Problem, ProblemKind


def make(num_blocks: int) -> Problem:
    """done = 1, once all launches have ended; `num_blocks` is for the launches.

    Shapes: done [1] int32
    """
    return Problem(
        "launches",
        {"num_blocks": num_blocks},
        inputs={},
        outputs={"done": Output((1,), np.int32)},
        reference=lambda: {"done": Expected(np.ones(1), 0.0)},
        cost=KernelCost(read_bytes=0, written_bytes=4, flops=0),
    )


LAUNCHES = ProblemKind("launches", "launches that do no work", make)
