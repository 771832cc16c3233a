"""Launches that are planned once for all arrays that are alike, and then started with the addresses of each call.

Checks, grid, name and scalars follow from types, shapes, strides and alignment. To work them out takes the host longer
than a short kernel takes the card, and every layer of a model asks the same.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from llmcli.kernels.arguments import Array
from llmcli.kernels.driver import BoundLaunch
from llmcli.kernels.launches import Launch, is_address, place_of

# Checks arrays and options for a device and says what to launch. Of an array it may use type, shape, strides, and how
# far its address is from a multiple of 16; addresses go into the launch as arrays or Offsets, never as numbers.
Plan = Callable[..., Launch]

_ALIGNMENT = 16
MAX_PLANS = 4096  # some hundred lengths of prompts


def likeness(arrays: Sequence[Array | None], addresses: Sequence[int]) -> Hashable:
    """All that a plan may know of arrays that lie at these addresses."""
    return tuple(
        [
            None if array is None else (array.dtype, array.shape, array.strides, address % _ALIGNMENT)
            for array, address in zip(arrays, addresses, strict=True)
        ]
    )


@dataclass(frozen=True)
class _Ready:
    """A planned launch. It must not hold the arrays that it was planned for: they may be all of a card's memory."""

    stem: str
    name: str
    bound: BoundLaunch
    places: list[tuple[int, int]]


class PlannedLaunches:
    """The launches of one device that have been planned."""

    def __init__(self) -> None:
        self._ready: dict[Hashable, _Ready] = {}

    def start(
        self,
        device: Any,
        bind: Callable[[Launch], BoundLaunch],
        plan: Plan,
        arrays: Sequence[Any],
        options: tuple[Hashable, ...],
    ) -> tuple[str, str]:
        """Start what `plan(device, *arrays, *options)` says, once `bind` has made it ready; returns stem and name.

        Raises: what the plan and `bind` raise; as `BoundLaunch.start`
        """
        addresses = [0 if array is None else array.data.ptr for array in arrays]
        key = (plan, options, likeness(arrays, addresses))
        ready = self._ready.get(key)
        if ready is None:
            launch = plan(device, *arrays, *options)
            ready = _Ready(launch.stem, launch.name, bind(launch), _places(launch.arguments, arrays))
            if len(self._ready) >= MAX_PLANS:
                self._ready.clear()
            # From an array that stands there twice it is not seen which of two that are alike goes where.
            present = [id(array) for array in arrays if array is not None]
            if len(set(present)) == len(present):
                self._ready[key] = ready
        ready.bound.start([addresses[index] + num_bytes for index, num_bytes in ready.places])
        return ready.stem, ready.name


def _places(arguments: Sequence[Any], arrays: Sequence[Any]) -> list[tuple[int, int]]:
    """Where each address comes from: the index of its array, and the bytes to add.

    Raises: TypeError for an address in none of the arrays
    """
    indices = {id(array): index for index, array in enumerate(arrays)}
    places = []
    for argument in filter(is_address, arguments):
        array, num_bytes = place_of(argument)
        if id(array) not in indices:
            raise TypeError("a planned launch has an address that is in none of its arrays")
        places.append((indices[id(array)], num_bytes))
    return places


class PlansAnew:
    """`launch_planned` for what stands in for a device and only takes notice of launches."""

    def launch(self, stem: str, name: str, **details: Any) -> None:
        """Take notice."""
        raise NotImplementedError

    def launch_planned(self, plan: Plan, arrays: tuple[Any, ...], *options: Hashable) -> None:
        """As `Device.launch_planned` for arrays that it has not seen."""
        launch = plan(self, *arrays, *options)
        self.launch(
            launch.stem,
            launch.name,
            grid=launch.grid,
            block=launch.block,
            arguments=launch.arguments,
            shared_bytes=launch.shared_bytes,
        )
