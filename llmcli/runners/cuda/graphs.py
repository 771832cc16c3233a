"""`StepGraphs`: a step's launches, captured once for each number of lanes and started as one."""

from collections.abc import Callable
from typing import Any

from llmcli.kernels.device import Device, device_errors


class StepGraphs:
    """Starts the launches of a kind of step. `uses_graphs=False` launches them anew each time.

    It holds nothing of who launches: in a ring of references a model would stay on the card when nobody uses it.
    """

    def __init__(self, device: Device, *, uses_graphs: bool):
        self._device = device
        self._uses_graphs = uses_graphs
        self._graphs: dict[tuple[bool, int], Any] = {}  # by whether own kernels are in them, and lanes

    def start(self, count: int, launch: Callable[[int], None]) -> None:
        """Queue what `launch` launches for `count` lanes; the same for each call with that number."""
        if not self._uses_graphs:
            launch(count)
            return
        key = self._device.uses_own, count
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(count, launch)
        with device_errors():
            graph.launch(self._device.stream)

    def _capture(self, count: int, launch: Callable[[int], None]) -> Any:
        stream = self._device.stream
        with device_errors():
            stream.begin_capture()
            try:
                launch(count)
            finally:
                graph = stream.end_capture()
        return graph
