"""read_bandwidth reads every word once."""

import numpy as np
import pytest
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.kernels.read_bandwidth import num_blocks, read_bandwidth
from llmcli.lab.cases.reductions import read_bandwidth_case


@pytest.mark.cuda
@pytest.mark.parametrize("num_bytes", [16, 64 * 1024, 50_000_016])
def test_sums_of_all_words(device: Device, num_bytes: int) -> None:
    assert_right(device, read_bandwidth_case(num_bytes, num_blocks(device)))


@pytest.mark.cuda
def test_odd_sizes_are_refused(device: Device) -> None:
    import cupy

    sums = cupy.zeros(num_blocks(device), dtype=np.uint32)
    for num_bytes in (0, 24):
        with pytest.raises(ValueError, match=f"{num_bytes} bytes of memory"):
            read_bandwidth(device, memory=cupy.zeros(num_bytes, dtype=np.uint8), sums=sums)
