"""`StepGraphs`: a step's launches, captured once for each number of lanes and started as one."""

from collections.abc import Callable
from typing import Any

from llmcli.kernels.device import Device, device_errors


class StepGraphs:
    """Starts what `launch` launches for a number of lanes. `uses_graphs=False` launches it anew each time."""

    def __init__(self, device: Device, launch: Callable[[int], None], *, uses_graphs: bool):
        self._device = device
        self._launch = launch
        self._uses_graphs = uses_graphs
        self._graphs: dict[tuple[bool, int], Any] = {}  # by whether own kernels are in them, and lanes

    def start(self, count: int) -> None:
        """Queue the launches for `count` lanes."""
        if not self._uses_graphs:
            self._launch(count)
            return
        key = self._device.uses_own, count
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(count)
        with device_errors():
            graph.launch(self._device.stream)

    def _capture(self, count: int) -> Any:
        stream = self._device.stream
        with device_errors():
            stream.begin_capture()
            try:
                self._launch(count)
            finally:
                graph = stream.end_capture()
        return graph
