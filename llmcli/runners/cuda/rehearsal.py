"""Finds out which kernels a model needs, by going through its launches without launching any."""

from collections.abc import Callable, Mapping
from typing import Any

from llmcli.kernels.device import Device


class Rehearsal:
    """Stands in for a `Device` and notes every kernel's name.

    Attributes: wanted: the name expressions by `.cu` stem
    """

    def __init__(self, device: Device):
        self.num_multiprocessors = device.num_multiprocessors
        self.shared_bytes_per_block = device.shared_bytes_per_block
        self.can_cluster = device.can_cluster
        self.l2_bytes = device.l2_bytes
        self.arch = device.arch
        self._wanted: dict[str, set[str]] = {}

    def launch(self, stem: str, name: str, **launch: Any) -> None:
        """Note the name."""
        self._wanted.setdefault(stem, set()).add(name)

    def record(self, run: Callable[[], None], arrays: Any) -> None:
        """Run it; there is nothing to start again."""
        run()

    @property
    def wanted(self) -> Mapping[str, set[str]]:
        """What has been asked for."""
        return self._wanted
