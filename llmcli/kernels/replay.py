"""Replays one layer's launches with another layer's addresses.

Types, shapes, strides and alignment decide a launch's checks, grid, name and scalars. Computing these takes the host
longer than a short kernel takes the card, and equal layers give equal results.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from llmcli.kernels.arguments import Array

_ALIGNMENT = 16


class Starter(Protocol):
    """Work for the card that lacks only its addresses."""

    @property
    def label(self) -> tuple[str, str] | None:
        """Stem and name of one of our kernels; None for the matrix library's."""

    def start(self, addresses: Sequence[int]) -> None:
        """Start it with these addresses.

        Raises: DeviceError
        """


Start = Callable[[Starter, Sequence[int]], None]


def likeness(arrays: Sequence[Array | None]) -> Hashable:
    """All that launches may depend on: type, shape, strides and alignment of each array, but not its address."""
    return tuple(
        None if array is None else (array.dtype, array.shape, array.strides, array.data.ptr % _ALIGNMENT)
        for array in arrays
    )


def base_addresses(arrays: Sequence[Array | None]) -> list[int]:
    """The address of each array; 0 for None."""
    return [0 if array is None else int(array.data.ptr) for array in arrays]


class Replay:
    """Recorded launches, to be started with other arrays of the same likeness. It holds no array."""

    def __init__(self, start: Start, started: Sequence[tuple[Starter, Sequence[int]]], arrays: Sequence[Array | None]):
        """`start` starts one launch. Only addresses inside `arrays` are replaced; all others stay."""
        self._start = start
        begins = [(int(array.data.ptr), array.nbytes, index) for index, array in enumerate(arrays) if array is not None]
        self._started = [
            (starter, [_place(address, begins) for address in addresses]) for starter, addresses in started
        ]

    def start(self, addresses: Sequence[int]) -> None:
        """Start all launches. `addresses` are those of the new arrays, in the order of the recorded ones.

        Raises: DeviceError
        """
        begins = [*addresses, 0]
        for starter, places in self._started:
            self._start(starter, [begins[index] + num_bytes for index, num_bytes in places])


def _place(address: int, begins: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """The index of the array that holds an address, and the offset in it. Outside all arrays: -1 and the address."""
    for begin, num_bytes, index in begins:
        if begin <= address < begin + num_bytes:
            return index, address - begin
    return -1, address
