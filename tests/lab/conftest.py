"""The card for each test of the lab."""

from collections.abc import Iterator

import pytest

from llmcli.kernels.device import Device


@pytest.fixture
def device(opened_device: Device) -> Iterator[Device]:
    """Card 0, current in this thread, idle at the start and at the end of the test."""
    opened_device.activate()
    opened_device.synchronize()
    yield opened_device
    opened_device.synchronize()
