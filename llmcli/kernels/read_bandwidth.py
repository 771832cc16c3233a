"""A kernel that reads memory and does nothing else: what its rate is, no other kernel can beat."""

from typing import Any

import numpy as np

from llmcli.kernels.arguments import check
from llmcli.kernels.device import Device
from llmcli.kernels.spec import KernelSpec

BLOCK_SIZE = 512
_BLOCKS_PER_MULTIPROCESSOR = 4

SPEC = KernelSpec("read_bandwidth", "reads memory at full speed", ("read_bandwidth",))


def num_blocks(device: Device) -> int:
    """Blocks that the kernel runs with, and sums that it writes."""
    return device.num_multiprocessors * _BLOCKS_PER_MULTIPROCESSOR


def read_bandwidth(device: Device, *, memory: Any, sums: Any) -> None:
    """Read every byte of `memory`.

    Shapes: memory uint8 [a multiple of 16]; sums uint32 [num_blocks(device)], whose exclusive or is that of all words
    Raises: ValueError
    """
    check("read_bandwidth", "memory", memory, dtype=np.uint8, shape=(None,))
    check("read_bandwidth", "sums", sums, dtype=np.uint32, shape=(num_blocks(device),), aligned=4)
    if memory.shape[0] % 16 or memory.shape[0] == 0:
        raise ValueError(f"read_bandwidth: {memory.shape[0]} bytes of memory, expected a multiple of 16")
    device.launch(
        "read_bandwidth",
        "read_bandwidth",
        grid=(num_blocks(device),),
        block=BLOCK_SIZE,
        arguments=(memory, sums, np.uint64(memory.shape[0] // 16)),
    )
