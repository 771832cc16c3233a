"""Nsight Compute's CSV read into figures, and the limit of a kernel that they show."""

from dataclasses import replace

import pytest
from fake_ncu import AUTO_UNITS, AUTO_VALUES, STALL, UNITS, VALUES, FakeNcu

from llmcli.kernels.compiler import KernelResources
from llmcli.kernels.occupancy import Occupancy
from llmcli.lab.nsight import Counters, count, counters_of, find_limit, metrics_for, read_launches
from llmcli.lab.walk import KernelUse

ABOUT = ("ID", "Kernel Name", "CC")


def table(metrics: dict[str, tuple[str, str]], num_launches: int = 1) -> str:
    """Value and unit by metric, as ncu writes them."""

    def line(*cells: str) -> str:
        return ",".join(f'"{cell}"' for cell in cells)

    names, units = line(*ABOUT, *metrics), line("", "", "", *(unit for _, unit in metrics.values()))
    launches = [
        line(str(number), "gemv", "9.0", *(value for value, _ in metrics.values())) for number in range(num_launches)
    ]
    return "\n".join([names, units, *launches])


@pytest.mark.parametrize(("values", "units"), [(VALUES, UNITS), (AUTO_VALUES, AUTO_UNITS)], ids=["base", "scaled"])
def test_medians_in_seconds_bytes_and_shares(ncu: FakeNcu, values: dict[str, list[str]], units: dict[str, str]) -> None:
    """Each figure is the second of its three values by hand; both forms of units give the same."""
    ncu.write(values=values, units=units)
    counters = count(ncu.path, ["program"], "sm_90")
    assert counters.num_launches == 3
    assert counters.seconds == pytest.approx(9.312e-6)
    assert counters.read_bytes == pytest.approx(34_100_224)
    assert counters.written_bytes == pytest.approx(32)
    assert counters.num_bytes == pytest.approx(34_100_256)
    assert counters.memory_share == pytest.approx(0.782)
    assert counters.l2_share == pytest.approx(0.312)
    assert counters.compute_share == pytest.approx(0.402)
    assert counters.l1_hit_share == pytest.approx(0.0125)
    assert counters.l2_hit_share == pytest.approx(0.03)
    assert counters.occupancy == pytest.approx(0.242)
    assert counters.issue_share == pytest.approx(0.19)
    # Of 10 warps: 6, 2 and 1 wait, 1 issues.
    assert list(counters.stalls.items()) == [
        ("long_scoreboard", pytest.approx(0.6)),
        ("barrier", pytest.approx(0.2)),
        ("wait", pytest.approx(0.1)),
    ]


@pytest.mark.parametrize(
    ("value", "unit"), [("n/a", ""), ("", ""), ("(!) nan", "%"), ("nan", "%"), ("inf", "%"), ("5", "furlong")]
)
def test_a_figure_that_is_not_there_leaves_the_others(value: str, unit: str) -> None:
    metrics = {"lts__t_sector_hit_rate.pct": (value, unit), "gpu__time_duration.sum": ("1.5", "msecond")}
    counters = counters_of(read_launches(table(metrics)))
    assert counters.l2_hit_share is None
    assert counters.seconds == pytest.approx(1.5e-3)
    assert (counters.num_bytes, counters.memory_share, counters.stalls) == (None, None, {})


def test_lines_around_the_table_are_left_out() -> None:
    text = table({"gpu__time_duration.sum": ("1,234", "nsecond")}, 2)
    noisy = f'==PROF== Connected\nprinted, by "the program\n{text}\n==PROF== Disconnected\n"3","cut off\n'
    launches = read_launches(noisy)
    assert [one["gpu__time_duration.sum"] for one in launches] == [("1,234", "nsecond")] * 2


@pytest.mark.parametrize("text", ["", "\n\n", "ID", '"ID"\n', '"ID","CC"\n"",""\n', "==ERROR== no", '"', "\0,\r\n"])
def test_without_a_table_there_are_no_launches(text: str) -> None:
    assert read_launches(text) == []


def test_stalls_that_were_never_seen_are_no_shares() -> None:
    """A kernel that never issued: all zero."""
    assert counters_of(read_launches(table({STALL.format("wait"): ("0", "inst")}))).stalls == {}


def test_an_architecture_is_asked_for_the_states_that_it_has() -> None:
    metrics = {arch: metrics_for(arch) for arch in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")}
    assert {arch for arch, names in metrics.items() if STALL.format("gmma") in names} == {"sm_90"}
    assert {arch for arch, names in metrics.items() if STALL.format("imc_miss") in names} == {"sm_80", "sm_89", "sm_90"}
    for names in metrics.values():
        assert len(set(names)) == len(names)
        assert VALUES.keys() <= set(names)


IDLE = Counters(5, 1e-6, 1.0, 1.0, 0.1, 0.2, 0.3, 0.0, 0.0, 0.4, 0.1, {"barrier": 0.7})
USE = KernelUse("k", 264, 512, 0, KernelResources(64, 0, 0, 0, 0), Occupancy(2, 32, 0.5, ("registers",)))


@pytest.mark.parametrize(
    ("counters", "use", "limit"),
    [
        (replace(IDLE, memory_share=0.61, l2_share=0.6), USE, "memory"),
        (replace(IDLE, memory_share=0.61, l2_share=0.9), USE, "L2"),
        (replace(IDLE, memory_share=None, compute_share=0.8), USE, "multiprocessors"),
        (replace(IDLE, memory_share=0.7), replace(USE, num_blocks=1), "memory"),
        (IDLE, replace(USE, num_blocks=66), "blocks"),
        (IDLE, replace(USE, num_blocks=67), "latency"),
        (replace(IDLE, occupancy=0.2), USE, "occupancy"),
        (replace(IDLE, occupancy=0.31), USE, "latency"),
        (replace(IDLE, occupancy=0.0), None, "latency"),
        (replace(IDLE, stalls={}), USE, "unknown"),
        (replace(IDLE, stalls={"not_selected": 0.9}), USE, "unknown"),
        (replace(IDLE, stalls={"not_selected": 0.9, "wait": 0.1}), USE, "latency"),
        (replace(IDLE, memory_share=None, l2_share=None, compute_share=None), USE, "unknown"),
    ],
)
def test_what_limits_a_kernel(counters: Counters, use: KernelUse | None, limit: str) -> None:
    assert find_limit(counters, use, 132) == limit
