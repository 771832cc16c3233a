"""The card whose context is made early: the right one, in a thread, and no message if that fails."""

import sys
import threading
from typing import Any

import pytest

from llmcli.kernels import environment
from llmcli.kernels.environment import start_card
from llmcli.timeline import Timeline


class Driver:
    """A stand-in for the driver's library."""

    def __init__(self, cards: int = 2, status: int = 0) -> None:
        self.cards, self.status = cards, status
        self.contexts: list[tuple[int, str]] = []

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index + 10
        return 0 if index < self.cards else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.contexts.append((device.value, threading.current_thread().name))
        return 0


@pytest.fixture(autouse=True)
def has_cupy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("cuda"):
        return
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: object() if name == "cupy" else None)


def start(monkeypatch: pytest.MonkeyPatch, driver: Driver, index: int) -> Timeline:
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: driver)
    timeline = Timeline()
    thread = start_card(index, timeline)
    assert thread is not None
    thread.join()
    return timeline


def test_the_context_of_the_card_is_made_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    timeline = start(monkeypatch, driver, 1)
    assert driver.contexts == [(11, "start card")]
    assert [(part.name, part.is_beside) for part in timeline.parts] == [("driver and context", True)]


@pytest.mark.parametrize("driver", [Driver(cards=1), Driver(status=100)])
def test_what_fails_is_left_to_whoever_opens_the_card(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    start(monkeypatch, driver, 1)
    assert driver.contexts == []


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(environment.ctypes, "CDLL", absent)
    thread = start_card(0, Timeline())
    assert thread is not None
    thread.join()


def test_without_cupy_there_is_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    assert start_card(0, Timeline()) is None


@pytest.mark.cuda
def test_a_card_that_was_started_early_can_be_opened() -> None:
    from llmcli.kernels.device import Device

    thread = start_card(0, Timeline())
    device = Device.open(0)
    device.synchronize()
    assert thread is not None
    thread.join()
    assert "cupy" in sys.modules
