"""What the machine is said to offer, on a machine of whatever kind."""

import ctypes
from importlib import metadata

import pytest

from llmcli.kernels import environment


class FakeDriver:
    """Answers like libcuda.so with one card, or with an error."""

    def __init__(self, init_status: int = 0, version: int = 13010):
        self.init_status = init_status
        self.version = version

    def cuDriverGetVersion(self, version) -> int:
        version._obj.value = self.version
        return 0

    def cuInit(self, flags: int) -> int:
        return self.init_status

    def cuDeviceGetCount(self, count) -> int:
        count._obj.value = 1
        return 0

    def cuDeviceGet(self, device, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name, length: int, device) -> int:
        name.value = b"NVIDIA Test"
        return 0

    def cuDeviceTotalMem_v2(self, total, device) -> int:
        total._obj.value = 24 * 2**30
        return 0

    def cuDeviceGetAttribute(self, value, attribute: int, device) -> int:
        value._obj.value = {75: 8, 76: 9}[attribute]
        return 0


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert environment.find_driver() is None


def test_a_card_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver())
    driver = environment.find_driver()
    assert driver == environment.Driver((13, 1), (environment.Card(0, "NVIDIA Test", (8, 9), 24 * 2**30),))


@pytest.mark.parametrize(("status", "problem"), [(100, None), (999, "the driver does not start (CUDA error 999)")])
def test_a_driver_without_cards(monkeypatch: pytest.MonkeyPatch, status: int, problem: str | None) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(init_status=status))
    assert environment.find_driver() == environment.Driver((13, 1), (), problem)


def test_two_cupy_packages_are_both_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    assert environment.cupy_distributions() == versions


def test_the_compiler_has_a_version_or_a_reason() -> None:
    version = environment.nvrtc_version()
    if environment.cupy_distributions():
        assert isinstance(version, tuple)
        assert version >= (12, 0)
    else:
        assert "ModuleNotFoundError" in version


@pytest.mark.cuda
def test_the_driver_and_cupy_describe_the_same_card() -> None:
    import cupy

    driver = environment.find_driver()
    assert driver is not None
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    assert driver.cards[0].name == properties["name"].decode()
    assert driver.cards[0].compute_capability == (properties["major"], properties["minor"])
    assert driver.cards[0].memory_bytes == properties["totalGlobalMem"]
    assert driver.cuda_version[0] * 1000 <= cupy.cuda.runtime.driverGetVersion()
    assert environment.header_folder() is not None
