"""The energy that a card uses, by the counter of NVIDIA's management library for the whole card.

The library is optional, and cards and containers may refuse: a missing figure is a reason in words, never an error.
"""

import importlib
import time
from dataclasses import dataclass
from typing import Any

from llmcli.kernels.environment import pci_bus_id

# The counter moves every 20 to 100 ms, depending on the card: over a shorter time the error is too large.
SHORTEST_SECONDS = 0.5

_DIVIDED = 1  # NVML_DEVICE_MIG_ENABLE
_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT; the plain reading is a mean over a second on cards since Ampere


@dataclass(frozen=True)
class Reading:
    """The counter at a time. Units: joules, seconds; each from its own start."""

    joules: float
    time: float


@dataclass(frozen=True)
class Energy:
    """The energy that the card used in a time, and its idle power. Units: joules, seconds, watts"""

    joules: float
    seconds: float
    idle_watts: float

    @property
    def average_watts(self) -> float:
        """Of the whole card, with idle power."""
        return self.joules / self.seconds

    def joules_per_token(self, num_tokens: int) -> float:
        """For each of `num_tokens` tokens, without the idle power."""
        return (self.joules - self.idle_watts * self.seconds) / num_tokens


class EnergyMeter:
    """Reads one card. `idle_watts` is the power to subtract, None until it has been measured."""

    def __init__(self, library: Any, handle: Any) -> None:
        """For `open_meter`. `library` is the module pynvml."""
        self._library = library
        self._handle = handle
        self.idle_watts: float | None = None

    def read(self) -> Reading | None:
        """The counter now, None if the card does not report it."""
        try:
            millijoules = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except self._library.NVMLError:
            return None
        return Reading(millijoules / 1e3, time.perf_counter())

    def wait_idle(self, seconds: float) -> None:
        """Measure the idle power: the mean power over a time in which the card has nothing to do."""
        start = self.read()
        time.sleep(seconds)
        end = self.read()
        if start is not None and end is not None:
            self.idle_watts = (end.joules - start.joules) / (end.time - start.time)

    def sample_idle(self) -> None:
        """Take the present power as idle power: cheap, but higher than that of a card long at rest."""
        try:
            value = self._library.nvmlDeviceGetFieldValues(self._handle, [_POWER_INSTANT])[0]
            if value.nvmlReturn == 0:
                self.idle_watts = value.value.uiVal / 1e3
            else:
                self.idle_watts = self._library.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        except self._library.NVMLError:
            self.idle_watts = None

    def used(self, start: Reading | None, end: Reading | None) -> Energy | None:
        """The energy between two readings; None if one is missing, or they are too close to each other."""
        if start is None or end is None or self.idle_watts is None or end.time - start.time < SHORTEST_SECONDS:
            return None
        return Energy(end.joules - start.joules, end.time - start.time, self.idle_watts)


def open_meter(card: int | None) -> EnergyMeter | str:
    """The meter of a card by its number in the driver's order, or why there is none; `card` None is the CPU."""
    if card is None:
        return "only NVIDIA cards can be measured"
    try:
        # Not at module level: it is an optional dependency.
        library = importlib.import_module("pynvml")
    except ImportError:
        return "nvidia-ml-py is not installed"
    address = pci_bus_id(card)
    if address is None:
        return "the driver does not say where the card is"
    try:
        library.nvmlInit()
        # The two libraries number cards differently, and CUDA_VISIBLE_DEVICES holds for only one of them.
        handle = library.nvmlDeviceGetHandleByPciBusId(address)
        if _is_divided(library, handle):
            return "the card is partitioned (MIG), and the counter covers all partitions"
        library.nvmlDeviceGetTotalEnergyConsumption(handle)
    except library.NVMLError as error:
        return f"NVIDIA's management library says: {error}"
    return EnergyMeter(library, handle)


def _is_divided(library: Any, handle: Any) -> bool:
    try:
        mode: int = library.nvmlDeviceGetMigMode(handle)[0]
    except library.NVMLError:  # most cards cannot be divided
        return False
    return mode == _DIVIDED
