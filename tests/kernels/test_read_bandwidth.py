"""read_bandwidth reads every word once."""

import numpy as np
import pytest
from fenced import fenced, to_host

from llmcli.kernels.device import Device
from llmcli.kernels.read_bandwidth import num_blocks, read_bandwidth


@pytest.mark.cuda
@pytest.mark.parametrize("num_bytes", [16, 64 * 1024, 50_000_016])
def test_sums_of_all_words(device: Device, num_bytes: int) -> None:
    import cupy

    memory = np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8)
    sums = fenced((num_blocks(device),), np.uint32)
    read_bandwidth(device, memory=cupy.asarray(memory), sums=sums.array)
    device.synchronize()
    sums.check()
    assert np.bitwise_xor.reduce(to_host(sums.array)) == np.bitwise_xor.reduce(memory.view(np.uint32))


@pytest.mark.cuda
def test_odd_sizes_are_refused(device: Device) -> None:
    import cupy

    sums = cupy.zeros(num_blocks(device), dtype=np.uint32)
    for num_bytes in (0, 24):
        with pytest.raises(ValueError, match=f"{num_bytes} bytes of memory"):
            read_bandwidth(device, memory=cupy.zeros(num_bytes, dtype=np.uint8), sums=sums)
