"""How rates are measured: on a card that is warm or not; launches on the host."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from llmcli.runners.cuda.predict import rates  # noqa: E402


class Clock:
    """A card whose calls take 5 ms until it has worked for 100 ms, and 4 ms from then on; and a host's time."""

    stream = None

    def synchronize(self) -> None: ...

    def __init__(self) -> None:
        self.now = 0.0

    def work(self) -> None:
        self.now += 0.005 if self.now < 0.1 else 0.004

    def event(self) -> Any:
        card = self

        class Event:
            def record(self, stream: Any) -> None:
                self.time = card.now

            def synchronize(self) -> None:
                pass

        return Event()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    card = Clock()
    monkeypatch.setattr(rates.cupy.cuda, "Event", card.event)
    monkeypatch.setattr(rates.cupy.cuda, "get_elapsed_time", lambda begin, end: (end.time - begin.time) * 1e3)
    return card


def test_a_card_is_measured_once_it_has_worked_for_a_while(card: Any) -> None:
    assert rates._median_seconds(card, card.work, 0.2) == pytest.approx(0.004, rel=1e-9)
    assert card.now < 0.6


def test_a_card_that_need_not_be_warm_is_measured_after_its_first_call(card: Any) -> None:
    rates._median_seconds(card, card.work, 0.0)
    assert card.now == pytest.approx(0.005 * 20 + 0.004 * 37)


def test_a_launch_is_what_the_host_takes_not_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, starts = Clock(), []

    def start(**arrays: Any) -> None:
        starts.append([None if one is None else (one.shape, str(one.dtype)) for one in arrays.values()])
        clock.now += 10e-6

    def wait_for_the_card() -> None:
        clock.now += 1.0

    monkeypatch.setattr(rates, "add_parts", lambda device, **arrays: start(**arrays))
    monkeypatch.setattr(rates, "_array", lambda shape, dtype: np.empty(shape, dtype))
    monkeypatch.setattr(rates.time, "perf_counter", lambda: clock.now)

    def record(run: Callable[[], None], arrays: Any) -> Any:
        clock.now += 1.0  # to work out what to launch
        run()
        return SimpleNamespace(start=lambda addresses: run())

    device: Any = SimpleNamespace(synchronize=wait_for_the_card, record=record)
    assert rates.measure_launch_seconds(device) == pytest.approx(10e-6)
    small = ((16, 16), "float32")
    assert starts[0] == [((1, 16, 16), "float32"), small]
