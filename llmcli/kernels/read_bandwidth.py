"""A kernel that only reads memory: no other kernel can beat its rate."""

from typing import Any

import numpy as np

from llmcli.kernels.arguments import check
from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost, KernelSpec

BLOCK_SIZE = 512
BLOCK_BYTES = BLOCK_SIZE * 8 * 16  # what a block reads at a time: 8 loads of 16 bytes a thread
BLOCKS_PER_MULTIPROCESSOR = 4

SPEC = KernelSpec("read_bandwidth", "reads memory at full speed", ("read_bandwidth",))


def num_blocks(device: Launcher) -> int:
    """Number of blocks that reads at full speed."""
    return device.num_multiprocessors * BLOCKS_PER_MULTIPROCESSOR


def read_bandwidth(device: Launcher, *, memory: Any, sums: Any) -> None:
    """Read every byte of `memory`, in one block for each of `sums`.

    Shapes: memory uint8 [a multiple of 16]; sums uint32 [num_blocks], the exclusive or of the words that each block
            read: blocks take turns, each with BLOCK_BYTES at a time
    Raises: ValueError
    """
    check("read_bandwidth", "memory", memory, dtype=np.uint8, shape=(None,))
    check("read_bandwidth", "sums", sums, dtype=np.uint32, shape=(None,), aligned=4)
    if memory.shape[0] % 16 or memory.shape[0] == 0:
        raise ValueError(f"read_bandwidth: {memory.shape[0]} bytes of memory, expected a multiple of 16")
    device.launch(
        "read_bandwidth",
        "read_bandwidth",
        grid=(sums.shape[0],),
        block=BLOCK_SIZE,
        arguments=(memory, sums, np.uint64(memory.shape[0] // 16)),
        cost=lambda: read_bandwidth_cost(memory.shape[0], sums.shape[0]),
    )


def read_bandwidth_cost(num_bytes: int, num_blocks: int) -> KernelCost:
    """What one call moves."""
    return KernelCost(num_bytes, 4 * num_blocks, 0)
