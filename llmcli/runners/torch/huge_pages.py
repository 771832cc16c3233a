"""Memory of weights that the system may hold in large pages: a decoded token reads all of it, page after page."""

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 * 2**20


def empty_weight(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Like `torch.empty`, in memory of its own. Where Linux lets programs ask for pages of 2 MiB, this does."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
