"""The compiler and the card, as the tests of kernels have them."""

from collections.abc import Iterator

import pytest

from llmcli.kernels import environment
from llmcli.kernels.device import Device


@pytest.fixture(scope="session")
def nvrtc() -> None:
    """For tests that compile: scripts/test installs what they need."""
    version = environment.nvrtc_version()
    if isinstance(version, str) or environment.header_folder() is None:
        pytest.skip("needs CuPy, NVRTC and the CUDA headers: the extra compile, cuda12 or cuda13")


@pytest.fixture(scope="session")
def opened_device() -> Device:
    """Card 0. Tests that ask for it are marked `cuda`; without a card they fail rather than pass unseen."""
    return Device.open(0)


@pytest.fixture
def device(opened_device: Device) -> Iterator[Device]:
    """Card 0, current in this thread, with nothing under way at the start and at the end of the test."""
    opened_device.activate()
    opened_device.synchronize()
    yield opened_device
    opened_device.synchronize()
