"""A launch as a launcher describes it to a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmcli.kernels.arguments import Array


@dataclass(frozen=True)
class Offset:
    """The address `num_bytes` after the start of an array, as a kernel's argument."""

    array: Array
    num_bytes: int


@dataclass(frozen=True)
class Launch:
    """Kernel `name` of `stem` with its arguments: arrays on the card, Offsets, NumPy scalars, ctypes structures, None.

    `shared_bytes` is dynamic shared memory. With `overlaps` the kernel may start before the one in front of it ends, on
    cards that can (sm_90); it must then wait by itself.
    """

    stem: str
    name: str
    grid: tuple[int, ...]
    block: int
    arguments: tuple[Any, ...]
    shared_bytes: int = 0
    overlaps: bool = False


def is_address(argument: Any) -> bool:
    """Whether an argument is an address: that of an array on the card, or one inside."""
    return isinstance(argument, Offset) or hasattr(getattr(argument, "data", None), "ptr")


def addresses_of(arguments: Sequence[Any]) -> list[int]:
    """Those of the arguments that are addresses."""
    places = [place_of(argument) for argument in arguments if is_address(argument)]
    return [int(array.data.ptr) + num_bytes for array, num_bytes in places]


def place_of(address: Any) -> tuple[Array, int]:
    """The array that an address is in, and how many bytes after its start."""
    return (address.array, address.num_bytes) if isinstance(address, Offset) else (address, 0)
