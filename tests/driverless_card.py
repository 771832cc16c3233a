"""A device without a card: it binds and starts launches as the real one does; a stand-in driver records them."""

import ctypes
from types import SimpleNamespace
from typing import Any

from llmcli.kernels.device import Device
from llmcli.kernels.driver import LaunchDriver
from llmcli.kernels.launches import Launch, check_launch


class Driver:
    """Notes the first 8 bytes of every argument: the whole of an address or a scalar."""

    def __init__(self) -> None:
        self.launches: list[list[int]] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:  # noqa: N802
        self.launches.append([ctypes.c_uint64.from_address(address).value for address in parameters])
        return 0


class DriverlessCard(Device):
    """Attributes: launches: the calls of the driver."""

    def __init__(self) -> None:
        self.num_multiprocessors, self.shared_bytes_per_block = 132, 227 * 1024
        self.can_cluster = self.can_wgmma = True
        self.uses_own = False
        self.noted, self._started = [], None
        self.stream = SimpleNamespace(ptr=0)
        driver = Driver()
        self.launches = driver.launches
        self._driver = LaunchDriver(driver)

    def _bind(self, launch: Launch) -> Any:
        check_launch(launch, self.shared_bytes_per_block)
        return self._driver.bind(launch, 0x1234, 0x1000, launch.overlaps)
