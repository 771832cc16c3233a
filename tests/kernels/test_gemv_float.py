"""gemv_float against float64: tails, norm, bias, epilogues; and a row's bits among others."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.lab.cases.gemv import Case, make_case, problem_of
from llmcli.lab.matrices import random_matrix
from llmcli.lab.problem import ENGINE
from llmcli.lab.trial import run_once

pytestmark = pytest.mark.cuda


def case_of(num_outputs: int, num_inputs: int, num_rows: int, **options: bool) -> Case:
    return make_case(random_matrix(num_inputs, "float32", num_outputs, num_inputs), num_rows, **options)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(16, 40), (35, 7), (100, 1001), (40, 2304), (64, 11008)])
def test_tails(device: Device, num_outputs: int, num_inputs: int, has_norm: bool) -> None:
    for num_rows in (1, 8, 9):
        assert_right(device, problem_of(case_of(num_outputs, num_inputs, num_rows, has_norm=has_norm)))


@pytest.mark.parametrize("num_rows", [1, 8, 11])
def test_every_epilogue(device: Device, num_rows: int) -> None:
    """44 columns of SwiGLU leave the last tile half used."""
    before = np.random.default_rng(3).standard_normal((num_rows, 96)).astype(np.float32)
    case = replace(case_of(96, 320, num_rows, has_norm=True, has_bias=True), before=before)
    assert_right(device, problem_of(case))
    assert_right(device, problem_of(case, "add"))
    assert_right(device, problem_of(case, "swiglu", 44))


def test_a_row_has_the_bits_that_it_has_alone(device: Device) -> None:
    case = case_of(100, 1001, 11, has_norm=True)

    def solve(one: Case) -> np.ndarray:
        problem = problem_of(one)
        return run_once(device, problem, partial(problem.solvers[ENGINE], device))["out"].view(np.uint32)

    together = solve(case)
    for begin, end in ((0, 1), (10, 11), (3, 8)):
        np.testing.assert_array_equal(solve(replace(case, x=case.x[begin:end])), together[begin:end])
