"""What was started for the arrays of one layer, started again for those of another that is like it.

Checks, grids, names and scalars follow from types, shapes, strides and alignment. To work them out takes the host
longer than a short kernel takes the card, and every layer of a model asks the same.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from llmcli.kernels.arguments import Array

_ALIGNMENT = 16


class Starter(Protocol):
    """Work for the card of which only addresses are missing."""

    @property
    def label(self) -> tuple[str, str] | None:
        """Stem and name of a kernel of ours, None for the matrix library's."""

    def start(self, addresses: Sequence[int]) -> None:
        """Start it with these addresses.

        Raises: DeviceError
        """


Start = Callable[[Starter, Sequence[int]], None]


def likeness(arrays: Sequence[Array | None]) -> Hashable:
    """What launches may depend on of arrays: all but where they are, beyond the alignment of vectors."""
    return tuple(
        None if array is None else (array.dtype, array.shape, array.strides, array.data.ptr % _ALIGNMENT)
        for array in arrays
    )


def base_addresses(arrays: Sequence[Array | None]) -> list[int]:
    """Where each array begins, 0 for None."""
    return [0 if array is None else int(array.data.ptr) for array in arrays]


class Replay:
    """What has been started for some arrays, for any others of the same likeness. It holds no array."""

    def __init__(self, start: Start, started: Sequence[tuple[Starter, Sequence[int]]], arrays: Sequence[Array | None]):
        """`start` starts one of them; `arrays` are those that will be others, every other address stays what it was."""
        self._start = start
        begins = [(int(array.data.ptr), array.nbytes, index) for index, array in enumerate(arrays) if array is not None]
        self._started = [
            (starter, [_place(address, begins) for address in addresses]) for starter, addresses in started
        ]

    def start(self, addresses: Sequence[int]) -> None:
        """Start all of it with arrays that begin at these addresses, in the order of the recorded ones.

        Raises: DeviceError
        """
        begins = [*addresses, 0]
        for starter, places in self._started:
            self._start(starter, [begins[index] + num_bytes for index, num_bytes in places])


def _place(address: int, begins: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """The index of the array that an address is in, and how far; -1, which stands for address 0, for another one."""
    for begin, num_bytes, index in begins:
        if begin <= address < begin + num_bytes:
            return index, address - begin
    return -1, address
