"""Faults that `judge` finds, with NumPy on the host: wrong results, stray writes, changed inputs or bits."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmcli.errors import DeviceError
from llmcli.kernels.spec import KernelCost
from llmcli.lab.problem import Expected, Output, Problem
from llmcli.lab.trial import FENCE_BYTES, judge, run_once

DEVICE: Any = SimpleNamespace(stream=nullcontext(), synchronize=lambda: None)


class HostArray(np.ndarray):
    """An array that can be downloaded."""

    def get(self) -> np.ndarray:
        return np.array(self)


@pytest.fixture(autouse=True)
def cupy_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        asarray=lambda array: array.copy().view(HostArray),
        full=lambda *given, **named: np.full(*given, **named).view(HostArray),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)


def problem() -> Problem:
    """out = 2 x and, in place, y = y + 1, with a NaN that must be one."""
    x, y = np.array([1, 2, np.nan], np.float32), np.array([[5, 6]], np.float16)
    return Problem(
        "double",
        {"n": 3},
        inputs={"x": x, "before": y},
        outputs={"out": Output((3,)), "y": Output((1, 2), np.float16, initial="before")},
        reference=lambda: {
            "out": Expected(np.array([2.0, 4.0, np.nan]), 0.5),
            "y": Expected(np.array([[6.0, 7.0]]), 0.0),
        },
        cost=KernelCost(0, 0, 0),
        scratch={"between": Output((2,))},
    )


def solve(arrays: Any) -> None:
    arrays["between"][...] = 0
    arrays["out"][...] = 2 * arrays["x"]
    arrays["y"][...] += 1


def beside(arrays: Any) -> None:
    solve(arrays)
    arrays["between"].base.base[FENCE_BYTES + 8] = 1


def before(arrays: Any) -> None:
    solve(arrays)
    arrays["y"].base.base[FENCE_BYTES - 1] = 1


def with_input(arrays: Any) -> None:
    solve(arrays)
    arrays["x"][0] = 7


def wrong(arrays: Any) -> None:
    solve(arrays)
    arrays["out"][1] = 4.75


def not_written(arrays: Any) -> None:
    solve(arrays)
    arrays["out"][:2] = np.nan


def not_nan(arrays: Any) -> None:
    solve(arrays)
    arrays["out"][2] = 3


def test_a_right_one() -> None:
    judgement = judge(DEVICE, problem(), solve)
    assert (judgement.largest, judgement.fault) == (0.0, "")
    assert list(run_once(DEVICE, problem(), solve)) == ["out", "y"]


def test_a_small_error_is_part_of_its_bound() -> None:
    def solve_nearly(arrays: Any) -> None:
        solve(arrays)
        arrays["out"][1] = 4.25

    assert judge(DEVICE, problem(), solve_nearly).largest == 0.5


@pytest.mark.parametrize(
    ("start", "told"),
    [
        (beside, "1 bytes beside between were overwritten"),
        (before, "1 bytes beside y were overwritten"),
        (with_input, "x changed"),
        (wrong, "out[1] is 4.75, expected 4 within 0.5; 1 of 3"),
        (not_written, "2 of 3 elements are wrong"),
        (not_nan, "out[2] is 3, expected nan"),
    ],
)
def test_what_is_wrong_is_told(start: Callable[[Any], None], told: str) -> None:
    judgement = judge(DEVICE, problem(), start)
    assert told in judgement.fault
    assert judgement.largest == np.inf


def test_other_bits_in_a_second_run() -> None:
    runs: list[int] = []

    def solve_anew(arrays: Any) -> None:
        solve(arrays)
        arrays["out"][0] += np.float32(0.25) * len(runs)
        runs.append(1)

    assert judge(DEVICE, problem(), solve_anew).fault == "two runs give out different bits"


def test_bytes_beside_end_a_run() -> None:
    with pytest.raises(DeviceError, match="beside"):
        run_once(DEVICE, problem(), beside)
