"""Host time of a launch on this card: by CuPy's call of a RawKernel, and by the driver as replays launch.

For each kernel: all that `Device.launch` does with a launch that is described (checks, binding, start), and the start
alone, as a replay repeats it. Batches are short enough that the card's queue never makes the host wait; medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np

from llmcli.kernels.attention_decode import LaneInputs, append_tokens
from llmcli.kernels.device import Device
from llmcli.kernels.driver import RawLaunch
from llmcli.kernels.elementwise import add_parts
from llmcli.kernels.launches import Launch, addresses_of
from llmcli.kernels.qkv import PAGE_TOKENS, LayerCache, QkvLayout
from llmcli.kernels.replay import Starter

BATCH = 200  # the driver's queue takes about a thousand
HIDDEN_SIZE = 64
LAYOUT = QkvLayout(4, 2, 64)


class NotingDevice(Device):
    """A card that records the launches it binds. Attributes: launches."""

    launches: list[Launch]

    def _bind(self, launch: Launch) -> Starter:
        self.launches.append(launch)
        return super()._bind(launch)

    def bind_raw(self, launch: Launch) -> Starter:
        """Launch by CuPy's call."""
        return RawLaunch(launch, self._kernels[self._key(launch.stem, launch.name)], self.stream)

    def bind_driver(self, launch: Launch, overlaps: bool) -> Starter:
        """Launch by the driver's."""
        function = self._kernels[self._key(launch.stem, launch.name)].function
        return self._driver.bind(launch, function, self.stream.ptr, overlaps)


def describe(device: NotingDevice) -> list[Launch]:
    """Launches of few and of many arguments, on arrays so small that the card is done at once."""

    def zeros(*shape: int, dtype: Any = np.float32) -> Any:
        return cupy.zeros(shape, dtype)

    device.launches = []
    row = zeros(1, HIDDEN_SIZE)
    add_parts(device, parts=zeros(1, 1, HIDDEN_SIZE), out=row)
    cache = zeros(7, 2, PAGE_TOKENS, 64, dtype=np.float16)
    places = {"rows": zeros(1, dtype=np.int32), "positions": zeros(1, dtype=np.int32)}
    lanes = LaneInputs(
        qkv=zeros(1, LAYOUT.width),
        layout=LAYOUT,
        q_norm=None,
        k_norm=None,
        eps=0.0,
        cos_sin=None,
        **places,
        page_table=zeros(1, 7, dtype=np.int32),
        cache=LayerCache(cache, cache),
        window=None,
    )
    append_tokens(device, lanes)
    device.synchronize()
    return device.launches


def host_microseconds(device: Device, run: Callable[[], object], rounds: int) -> float:
    """The median time of one call on the host; the card is idle before every batch."""
    times = []
    for _ in range(rounds):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(BATCH):
            run()
        times.append((time.perf_counter() - start) / BATCH * 1e6)
    device.synchronize()
    return statistics.median(times)


def ways(device: NotingDevice, launch: Launch) -> dict[str, Callable[[], Starter]]:
    """The ways to bind the launch, by name."""
    return {
        "CuPy": lambda: device.bind_raw(launch),
        "driver": lambda: device.bind_driver(launch, overlaps=False),
        "driver, overlapping": lambda: device.bind_driver(launch, overlaps=True),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print microseconds for every kernel and way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args(arguments).rounds
    device = NotingDevice.open()
    assert isinstance(device, NotingDevice)
    print(f"{device.name}, host microseconds a launch\n")
    print(f"{'kernel':<14}{'arguments':>10}  {'way':<20}{'whole':>8}{'start':>8}")
    with device.stream:
        for launch in describe(device):
            addresses = addresses_of(launch.arguments)
            for name, bind in ways(device, launch).items():
                if name.endswith("overlapping") and not device.can_cluster:
                    continue
                starter = bind()

                def start(starter: Starter = starter, addresses: Sequence[int] = addresses) -> None:
                    starter.start(addresses)

                def whole(bind: Callable[[], Starter] = bind, launch: Launch = launch) -> None:
                    bind().start(addresses_of(launch.arguments))

                figures = [host_microseconds(device, run, rounds) for run in (whole, start)]
                columns = "".join(f"{figure:>8.2f}" for figure in figures)
                print(f"{launch.stem:<14}{len(launch.arguments):>10}  {name:<20}{columns}")


if __name__ == "__main__":
    main()
