"""Reads memory, and combines what each block read by exclusive or."""

from collections.abc import Iterator

import numpy as np

from llmcli.kernels.card_facts import TYPICAL_CARD
from llmcli.kernels.device import Device
from llmcli.kernels.read_bandwidth import (
    BLOCK_BYTES,
    BLOCKS_PER_MULTIPROCESSOR,
    read_bandwidth,
    read_bandwidth_cost,
)
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem


def case(num_bytes: int, num_blocks: int) -> Problem:
    """Random bytes. The blocks take turns, each with BLOCK_BYTES at a time; one without any writes zero."""
    memory = np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8)

    def reference() -> dict[str, Expected]:
        num_rounds = -(-num_bytes // (num_blocks * BLOCK_BYTES))
        padded = np.zeros(num_rounds * num_blocks * BLOCK_BYTES, np.uint8)
        padded[:num_bytes] = memory
        words = padded.view(np.uint32).reshape(num_rounds, num_blocks, -1)
        return {"sums": Expected(np.bitwise_xor.reduce(words, axis=(0, 2)).astype(np.float64), 0.0)}

    def solve(device: Device, arrays: Arrays) -> None:
        read_bandwidth(device, memory=arrays["memory"], sums=arrays["sums"])

    return Problem(
        "read_bandwidth",
        {"num_bytes": num_bytes, "num_blocks": num_blocks},
        inputs={"memory": memory},
        outputs={"sums": Output((num_blocks,), np.uint32)},
        reference=reference,
        cost=read_bandwidth_cost(num_bytes, num_blocks),
        solvers={ENGINE: solve},
    )


def _checks() -> Iterator[Problem]:
    for num_bytes in (16, BLOCK_BYTES, 3 * BLOCK_BYTES - 16, 5_000_016):
        for num_blocks in (1, 3, 528):
            yield case(num_bytes, num_blocks)


def _typical() -> Problem:
    return case(256 * 2**20, TYPICAL_CARD.num_multiprocessors * BLOCKS_PER_MULTIPROCESSOR)


CASES = KernelCases("read_bandwidth", _checks, _typical)
