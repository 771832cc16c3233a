"""NVIDIA's management library for machines without a card."""

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

WORKING_WATTS = 600.0
ADDRESS = "0000:b7:00.0"


class NVMLError(Exception):
    """As pynvml has it."""


class Nvml(ModuleType):
    """A stand-in for pynvml on a machine of two cards; `clock` gives the time, `watts` the second card's power then."""

    NVMLError = NVMLError

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__("pynvml")
        self.clock, self.watts, self.mode = clock, WORKING_WATTS, 0
        self.is_broken = self.has_field = False

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> str:
        if address != ADDRESS:
            raise NVMLError("Not Found")
        return "second card"

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if self.mode < 0:
            raise NVMLError("Not Supported")
        return [self.mode, self.mode]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "second card"
        if self.is_broken:
            raise NVMLError("Not Supported")
        return int(1000 * self.watts * self.clock())

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[int]) -> list[Any]:
        assert (handle, fields) == ("second card", [186])
        value = SimpleNamespace(uiVal=123_000)
        return [SimpleNamespace(nvmlReturn=0 if self.has_field else 3, value=value)]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if self.is_broken:
            raise NVMLError("GPU is lost")
        return 88_000
