"""`StepGraphs`: a step's launches, captured once for each shape of the step and started as one."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from llmcli.kernels.device import Device, device_errors

S = TypeVar("S")


class StepGraphs(Generic[S]):
    """Starts the launches of a kind of step. `uses_graphs=False` launches them anew each time.

    The shape is everything that decides a step's launches, such as the number of lanes.

    It keeps no reference to its caller: a cycle would keep an unused model on the card.
    """

    def __init__(self, device: Device, *, uses_graphs: bool):
        self._device = device
        self._uses_graphs = uses_graphs
        self._graphs: dict[tuple[bool, S], Any] = {}  # by whether own kernels are in them, and shape

    def start(self, shape: S, launch: Callable[[S], None]) -> None:
        """Queue what `launch` launches for a shape; each call with that shape must launch the same."""
        if not self._uses_graphs:
            launch(shape)
            return
        key = self._device.uses_own, shape
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(shape, launch)
        with device_errors():
            graph.launch(self._device.stream)

    def _capture(self, shape: S, launch: Callable[[S], None]) -> Any:
        stream = self._device.stream
        with device_errors():
            stream.begin_capture()
            try:
                launch(shape)
            finally:
                graph = stream.end_capture()
        return graph
