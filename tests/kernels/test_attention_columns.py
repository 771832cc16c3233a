"""Blocks of attention_span whose teams take sixteen columns; emulated on the CPU."""

import numpy as np
import pytest
from emulated import COMPILER, EmulatedDevice, can_emulate, solve

from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.lab.engine import CASES
from llmcli.lab.problem import Problem, find_mismatch

pytestmark = pytest.mark.skipif(not can_emulate(), reason=f"no {COMPILER} that knows _Float16 and ucontext.h")

# With few blocks, a split is not cut into fewer columns to give all of them work.
SIXTEEN, EIGHT = 1, TYPICAL_CARD.num_multiprocessors


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    return EmulatedDevice(tmp_path_factory.mktemp("columns"))


def problem_with(label: str) -> Problem:
    """Five new tokens of a row and an unused lane, four query heads to a key-value head."""
    (problem,) = (one for one in CASES["attention_span"].checks() if one.sizes["num_lanes"] == 7 and one.label == label)
    return problem


@pytest.mark.parametrize("label", ["float16", "codes"])
def test_sixteen_columns_get_the_bits_of_eight(label: str, emulated: EmulatedDevice) -> None:
    problem = problem_with(label)
    emulated.compile_for([problem])
    found = []
    for emulated.num_multiprocessors in (SIXTEEN, EIGHT):
        for emulated.is_late in (False, True):
            found.append(solve(emulated, problem))
            assert find_mismatch(problem, found[-1]) is None
    for one in found[1:]:
        for name, array in found[0].items():
            np.testing.assert_array_equal(one[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("rest[3], odd[0], odd[1]", "rest[3], even[0], even[1]"),  # values of another dimension
        ("larger = fmaxf(larger, reduce::shuffle_xor(larger, 2));", ""),  # a maximum of half the tokens
        ("sum[i][0] = t == 0 ? weight : 0.0f;", "sum[i][0] = weight;"),  # the own token counted four times
    ],
)
def test_faults_are_found(right: str, wrong: str, emulated: EmulatedDevice) -> None:
    problem = problem_with("float16")

    def change(text: str) -> str:
        assert right in text
        return text.replace(right, wrong)

    emulated.compile_for([problem], change)
    emulated.num_multiprocessors = SIXTEEN
    assert find_mismatch(problem, solve(emulated, problem)) is not None
