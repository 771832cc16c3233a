"""Ceilings, places and the gap, from fixed numbers, computed by hand."""

import pytest

from llmcli.kernels.launches import Launch
from llmcli.kernels.spec import KernelCost
from llmcli.lab.roofline import Ceilings, StepTimes, find_gap, place_calls
from llmcli.lab.trial import Times
from llmcli.lab.walk import Call, Walk

CEILINGS = Ceilings(1e12, {"float32": 50e12, "float16": 500e12, "int8": 1000e12})


def call(stem: str, num_bytes: int, flops: int, count: int = 1, bits: int = 8) -> Call:
    cost = KernelCost(num_bytes - 8, 8, flops, element_bits=bits)
    return Call(Launch(stem, f"{stem}<1>", (1,), 32, ()), "", cost, tuple(range(count)), None)


CALLS = (
    call("gemv", 8_000_000, 16_000_000, count=2),  # reads for 8 us
    call("matmul", 1_000_000, 5_000_000_000),  # multiplies for 10 us in 16 bits
    call("matmul32", 1_000_000, 5_000_000_000, bits=32),  # for 100 us in 32
    call("embedding", 1_000_000, 0, bits=0),  # reads for 1 us, here from L2
)
SECONDS = (10e-6, 16e-6, 125e-6, 0.5e-6)
STEP = StepTimes(Walk("A step", (), CALLS), Times(160e-6, 0.0), tuple(Times(one, one) for one in SECONDS))


def test_the_ceiling_is_the_slower_of_bytes_and_operations() -> None:
    assert [CEILINGS.least_seconds(one) for one in CALLS] == pytest.approx([8e-6, 10e-6, 100e-6, 1e-6])


def test_calls_have_their_place() -> None:
    points = place_calls(STEP, CEILINGS)
    assert [point.intensity for point in points] == pytest.approx([2, 5000, 5000, 0])
    assert [point.reached for point in points] == pytest.approx([1.6e12, 312.5e12, 40e12, 0])
    assert [point.ceiling for point in points] == pytest.approx([2e12, 500e12, 50e12, 0])
    assert [point.share for point in points] == pytest.approx([0.8, 0.625, 0.8, 2.0])


def test_the_gap_is_what_kernels_lose() -> None:
    gap = find_gap(STEP, CEILINGS)
    assert gap.least == pytest.approx(2 * 8e-6 + 10e-6 + 100e-6 + 0.5e-6)
    assert gap.whole == 160e-6
    assert gap.lost == pytest.approx({"matmul32": 25e-6, "matmul": 6e-6, "gemv": 4e-6, "embedding": 0.0})
    assert list(gap.lost) == ["matmul32", "matmul", "gemv", "embedding"]
