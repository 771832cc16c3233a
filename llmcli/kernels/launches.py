"""A launch as a launcher describes it to a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmcli.kernels.arguments import Array
from llmcli.kernels.spec import Cost


@dataclass(frozen=True)
class Offset:
    """The address `num_bytes` after the start of an array, as a kernel's argument."""

    array: Array
    num_bytes: int


@dataclass(frozen=True)
class Launch:
    """Kernel `name` of `stem` with its arguments: arrays on the card, Offsets, NumPy scalars, ctypes structures, None.

    `shared_bytes` is dynamic shared memory. With `overlaps` the kernel may start before the one in front of it ends, on
    cards that can (sm_90); it must then wait by itself. `cost` is for those who predict times; nothing that runs asks.
    """

    stem: str
    name: str
    grid: tuple[int, ...]
    block: int
    arguments: tuple[Any, ...]
    shared_bytes: int = 0
    overlaps: bool = False
    cost: Cost | None = None


def is_address(argument: Any) -> bool:
    """Whether an argument is an address: that of an array on the card, or one inside."""
    return isinstance(argument, Offset) or hasattr(getattr(argument, "data", None), "ptr")


def addresses_of(arguments: Sequence[Any]) -> list[int]:
    """Those of the arguments that are addresses."""
    return [
        int(one.array.data.ptr) + one.num_bytes if isinstance(one, Offset) else int(one.data.ptr)
        for one in arguments
        if is_address(one)
    ]
