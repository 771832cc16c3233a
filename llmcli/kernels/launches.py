"""A launch as a launcher describes it to a device, and what is known of the card. Refuses what CUDA would misread."""

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.kernels.arguments import Array
from llmcli.kernels.spec import Cost

_SCALARS = (np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64)
_MAX_BLOCK = 1024
POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)


@dataclass(frozen=True)
class Offset:
    """A kernel's argument: the address `num_bytes` after the start of an array."""

    array: Array
    num_bytes: int


@dataclass(frozen=True)
class Launch:
    """Kernel `name` of `stem` with its arguments: arrays on the card, Offsets, NumPy scalars, ctypes structures, None.

    `block` is threads, or threads by dimension. `shared_bytes` is dynamic shared memory. With `overlaps` the kernel may
    start before the previous one ends, from sm_90 on; it must then wait by itself (kernels/common/launch.cuh). Only
    predictions of times read `cost`.
    """

    stem: str
    name: str
    grid: tuple[int, ...]
    block: int | tuple[int, ...]
    arguments: tuple[Any, ...]
    shared_bytes: int = 0
    overlaps: bool = False
    cost: Cost | None = None

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Threads in x, y and z."""
        x, y, z = (*((self.block,) if isinstance(self.block, int) else self.block), 1, 1)[:3]
        return x, y, z


@dataclass(frozen=True)
class CardFacts:
    """The facts of a card that decide about sizes, launches and times.

    Units: bytes, hertz (the highest clock). can_cluster: blocks can form clusters, from sm_90 on. can_wgmma: four warps
    can multiply together, on sm_90 only.
    """

    num_multiprocessors: int
    shared_bytes_per_block: int
    can_cluster: bool
    can_wgmma: bool
    clock_hertz: float
    l2_bytes: int


# An H200. Used for a card that is not here, if the user gives only memory and bandwidth.
TYPICAL_CARD = CardFacts(
    num_multiprocessors=132,
    shared_bytes_per_block=227 * 1024,
    can_cluster=True,
    can_wgmma=True,
    clock_hertz=1.98e9,
    l2_bytes=50 * 2**20,
)


class Launcher(ABC):
    """What launchers need of a card: some facts, and `launch`. A device, or what only notes its launches."""

    num_multiprocessors: int
    shared_bytes_per_block: int
    can_cluster: bool
    can_wgmma: bool

    def launch(
        self,
        stem: str,
        name: str,
        *,
        grid: tuple[int, ...],
        block: int | tuple[int, ...],
        arguments: tuple[Any, ...],
        shared_bytes: int = 0,
        overlaps: bool = False,
        cost: Cost | None = None,
    ) -> None:
        """Make this `Launch`.

        Raises: TypeError, ValueError for what CUDA would misread; DeviceError
        """
        self.make(Launch(stem, name, grid, block, arguments, shared_bytes, overlaps, cost))

    @abstractmethod
    def make(self, launch: Launch) -> None:
        """Start it on the card, or note it. Raises: as `launch`"""


def is_address(argument: Any) -> bool:
    """Whether an argument is an address: an array on the card, or an Offset into one."""
    return isinstance(argument, Offset) or hasattr(getattr(argument, "data", None), "ptr")


def addresses_of(arguments: Sequence[Any]) -> list[int]:
    """The addresses among the arguments."""
    return [
        int(one.array.data.ptr) + one.num_bytes if isinstance(one, Offset) else int(one.data.ptr)
        for one in arguments
        if is_address(one)
    ]


def check_launch(launch: Launch, max_shared_bytes: int) -> None:
    """Refuse sizes that CUDA answers with "invalid argument"; `max_shared_bytes` is the card's limit a block.

    Raises: ValueError
    """
    stem, grid, shared_bytes = launch.stem, launch.grid, launch.shared_bytes
    if not 1 <= len(grid) <= 3 or min(grid) < 1:
        raise ValueError(f"{stem}: grid {grid} is empty or not of 1 to 3 dimensions")
    if min(launch.block_shape) < 1 or math.prod(launch.block_shape) > _MAX_BLOCK:
        raise ValueError(f"{stem}: a block of {launch.block} threads, 1 to {_MAX_BLOCK} are possible")
    if not 0 <= shared_bytes <= max_shared_bytes:
        raise ValueError(f"{stem}: {shared_bytes} bytes of shared memory a block, this card has {max_shared_bytes}")


def bytes_of(launch: Launch) -> list[bytes | None]:
    """Each argument's bytes; None for an address, which each start passes.

    Raises: TypeError
    """
    return [_bytes_of(launch.stem, position, argument) for position, argument in enumerate(launch.arguments)]


def _bytes_of(stem: str, position: int, argument: Any) -> bytes | None:
    if isinstance(argument, _SCALARS):
        return argument.tobytes()
    if argument is None:
        return bytes(POINTER_BYTES)
    if isinstance(argument, ctypes.Structure):
        return bytes(argument)
    if is_address(argument):
        return None
    # A Python number has no size, and CUDA would read whatever the kernel declares.
    raise TypeError(
        f"{stem}: argument {position} is {type(argument).__name__}; kernels take arrays on the card, NumPy scalars of "
        "32 or 64 bits, ctypes structures, and None"
    )
