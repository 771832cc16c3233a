"""Energy from a counter: which card is asked, what is subtracted, runs that are too short, and missing meters."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import ADDRESS, WORKING_WATTS, Nvml
from test_measure_bench import OPTIONS, ClockedRunner, Predictor

from llmcli.kernels import environment
from llmcli.measure import energy
from llmcli.measure.bench import Bench
from llmcli.measure.energy import Energy, EnergyMeter, Reading, open_meter

IDLE_WATTS = 100.0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    library = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(energy, "pci_bus_id", lambda index: {1: ADDRESS}.get(index))
    return library


def test_the_card_is_found_by_where_it_sits(nvml: Nvml) -> None:
    meter = open_meter(1)
    assert isinstance(meter, EnergyMeter)
    reading = meter.read()
    assert reading is not None
    assert reading.joules == pytest.approx(WORKING_WATTS * reading.time, rel=1e-3)


@pytest.mark.parametrize("mode", [0, -1])
def test_cards_that_are_not_divided_have_a_meter(nvml: Nvml, mode: int) -> None:
    nvml.mode = mode
    assert isinstance(open_meter(1), EnergyMeter)


def test_why_there_is_none(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_meter(None) == "only NVIDIA cards can be measured"
    assert open_meter(0) == "the driver does not say where the card is"
    nvml.mode = 1
    assert "partitioned (MIG)" in str(open_meter(1))
    nvml.mode, nvml.is_broken = 0, True
    assert open_meter(1) == "NVIDIA's management library says: Not Supported"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_meter(1) == "nvidia-ml-py is not installed"


def test_a_counter_that_stops_answering_is_no_error(nvml: Nvml) -> None:
    meter = open_meter(1)
    assert isinstance(meter, EnergyMeter)
    nvml.is_broken = True
    meter.wait_idle(0.001)
    assert meter.idle_watts is None
    meter.sample_idle()
    assert meter.idle_watts is None
    assert meter.used(meter.read(), Reading(2000.0, 3.0)) is None


def test_idle_power_of_a_moment(nvml: Nvml) -> None:
    meter = open_meter(1)
    assert isinstance(meter, EnergyMeter)
    meter.sample_idle()
    assert meter.idle_watts == 88.0
    nvml.has_field = True
    meter.sample_idle()
    assert meter.idle_watts == 123.0


def test_idle_power_of_a_while(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = open_meter(1)
    assert isinstance(meter, EnergyMeter)
    clock = SimpleNamespace(now=7.0)
    clock.perf_counter = nvml.clock = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(energy, "time", clock)
    nvml.watts = IDLE_WATTS
    meter.wait_idle(0.5)
    assert clock.now == 7.5
    assert meter.idle_watts == pytest.approx(IDLE_WATTS, rel=0.01)


def test_idle_power_is_subtracted() -> None:
    used = Energy(joules=1200.0, seconds=2.0, idle_watts=100.0)
    assert used.average_watts == 600.0
    assert used.joules_per_token(500) == pytest.approx(2.0)


def test_what_is_too_short_is_not_told(nvml: Nvml) -> None:
    meter = open_meter(1)
    assert isinstance(meter, EnergyMeter)
    start = Reading(1000.0, 1.0)
    assert meter.used(start, Reading(1600.0, 2.0)) is None  # idle power is not known yet
    meter.idle_watts = 100.0
    assert meter.used(start, Reading(1600.0, 2.0)) == Energy(600.0, 1.0, 100.0)
    assert meter.used(start, Reading(1240.0, 1.4)) is None
    assert meter.used(None, start) is None
    assert meter.used(start, None) is None


def test_bench_tells_the_energy_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run computes two tokens of a known prompt, chooses a token after it, and then 11 in steps."""
    runner = ClockedRunner(monkeypatch, chunk=16)
    nvml = Nvml(lambda: runner.now)
    meter = EnergyMeter(nvml, "second card")
    meter.idle_watts = IDLE_WATTS
    monkeypatch.setattr(meter, "wait_idle", lambda seconds: None)
    monkeypatch.setattr(energy, "time", SimpleNamespace(perf_counter=lambda: runner.now))
    bench = Bench(runner, Predictor(), OPTIONS, meter)
    assert bench.idle_watts == IDLE_WATTS
    (figures,) = bench.measure_decode(50)
    assert figures.average_watts == pytest.approx(WORKING_WATTS, rel=1e-3)
    # A run of 12 tokens takes 0.395 s. The times themselves are those of the runs before.
    assert figures.joules_per_token == pytest.approx((WORKING_WATTS - IDLE_WATTS) * 0.395 / 12, rel=1e-3)
    assert figures.step_seconds.median == pytest.approx(0.025)
    assert figures.step_seconds.num_runs == OPTIONS.repeats


def test_bench_without_a_meter_has_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ClockedRunner(monkeypatch)
    bench = Bench(runner, Predictor(), OPTIONS)
    (figures,) = bench.measure_decode(50)
    assert (bench.idle_watts, figures.joules_per_token, figures.average_watts) == (None, None, None)


def test_where_a_card_sits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        status = 0

        def cuInit(self, flags: int) -> int:
            return self.status

        def cuDeviceGet(self, device: Any, index: int) -> int:
            device._obj.value = index + 10
            return 0

        def cuDeviceGetPCIBusId(self, address: Any, size: int, device: Any) -> int:
            assert (size, device.value) == (32, 11)
            address.value = ADDRESS.encode()
            return 0

    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: Driver())
    assert environment.pci_bus_id(1) == ADDRESS
    monkeypatch.setattr(Driver, "status", 100)
    assert environment.pci_bus_id(1) is None
    monkeypatch.undo()


@pytest.mark.cuda
def test_a_card_tells_its_energy() -> None:
    pytest.importorskip("pynvml")
    meter = open_meter(0)
    if isinstance(meter, str):
        pytest.skip(meter)
    meter.wait_idle(1.0)
    assert meter.idle_watts is not None
    assert 1 < meter.idle_watts < 1500
