"""Turns queries by their positions, in place. Source: arXiv 2104.09864, in Hugging Face's half-split form."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import rotary, rotary_cost
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.attention import cos_sin_table, exact, rotate
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem

_MAX_SEQ_LEN = 512
_BEHIND = 4  # columns after each row


def case(layout: QkvLayout, positions: np.ndarray) -> Problem:
    """Rows with a zero row, an outlier, and columns that stay: keys, values, padding, and those after a row."""
    generator = np.random.default_rng(layout.head_dim)
    before = generator.normal(size=(len(positions), layout.width + _BEHIND)).astype(np.float32)
    before[2:3] = 0.0
    before[3:4, 1] = 1e4
    table = cos_sin_table(_MAX_SEQ_LEN, layout.head_dim)

    def reference() -> dict[str, Expected]:
        values = before.astype(np.float64)
        bound = np.zeros_like(values)
        queries = before[:, : layout.q_size]
        turned = rotate(exact(queries.reshape(len(positions), -1, layout.head_dim)), table, positions)
        values[:, : layout.q_size] = turned.value.reshape(queries.shape)
        bound[:, : layout.q_size] = turned.error.reshape(queries.shape)
        return {"qkv": Expected(values, bound)}

    def solve(device: Device, arrays: Arrays) -> None:
        queries = arrays["qkv"][:, : layout.q_size]
        rotary(device, x=queries, positions=arrays["positions"], cos_sin=arrays["cos_sin"])

    return Problem(
        "rotary",
        {
            "num_tokens": len(positions),
            "num_attention_heads": layout.num_attention_heads,
            "num_key_value_heads": layout.num_key_value_heads,
            "head_dim": layout.head_dim,
        },
        inputs={"before": before, "positions": positions, "cos_sin": table},
        outputs={"qkv": Output(before.shape, initial="before")},
        reference=reference,
        cost=rotary_cost(len(positions), layout.q_size),
        solvers={ENGINE: solve},
    )


def odd_positions() -> np.ndarray:
    """First and last positions, in no order, one of them twice."""
    return np.array([0, 1, 2, 3, 511, 77, 511], np.int32)


def _checks() -> Iterator[Problem]:
    for head_dim in (8, 40, 64, 80, 96, 128, 256):
        for num_heads, num_key_value_heads in ((1, 1), (7, 1), (32, 8)):
            yield case(QkvLayout(num_heads, num_key_value_heads, head_dim), odd_positions())


CASES = KernelCases("rotary", _checks, partial(case, QkvLayout(32, 8, 128), np.arange(512, dtype=np.int32)))
