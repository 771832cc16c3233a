"""References of the problems about memory access, branches and loops, each against torch in float64."""

import numpy as np
import pytest
import torch

from llmcli.lab.catalogue import make_problem
from llmcli.lab.problem import find_mismatch


def test_a_copy_is_one() -> None:
    problem = make_problem("copy", {"n": 1000})
    np.testing.assert_array_equal(problem.expected["out"].values, problem.inputs["x"])
    assert (problem.num_bytes, problem.sizes["stride"]) == (8000, 1)


def test_a_transpose_is_torch_s() -> None:
    problem = make_problem("transpose", {"num_rows": 5, "num_columns": 3})
    x = torch.from_numpy(problem.inputs["x"]).double()
    np.testing.assert_array_equal(problem.expected["out"].values, x.T.numpy())
    assert problem.num_bytes == 2 * 4 * 15


def test_the_laplacian_is_torch_s_convolution() -> None:
    problem = make_problem("laplacian", {"nx": 5, "ny": 6, "nz": 4})
    scalars = {name: float(value) for name, value in problem.scalars.items()}
    stencil = torch.zeros(3, 3, 3, dtype=torch.float64)
    stencil[1, 1, 1] = scalars["center_factor"]
    stencil[1, 1, [0, 2]] = scalars["inverse_hx2"]
    stencil[1, [0, 2], 1] = scalars["inverse_hy2"]
    stencil[[0, 2], 1, 1] = scalars["inverse_hz2"]
    u = torch.from_numpy(problem.inputs["u"]).double()
    inside = torch.nn.functional.conv3d(u[None, None], stencil[None, None])[0, 0]
    expected = torch.nn.functional.pad(inside, (1, 1, 1, 1, 1, 1))
    np.testing.assert_allclose(problem.expected["f"].values, expected.numpy(), rtol=0, atol=1e-14)


def test_the_laplacian_s_bound_is_that_of_its_terms() -> None:
    """At the boundary nothing may be added; inside, what seven products and their sum may lose."""
    problem = make_problem("laplacian", {"nx": 4, "ny": 4, "nz": 3})
    bound = np.asarray(problem.expected["f"].bound)
    assert np.count_nonzero(bound) == 2 * 2 * 1
    u = np.abs(problem.inputs["u"].astype(np.float64))
    factors = {name: abs(float(value)) for name, value in problem.scalars.items()}
    magnitude = (
        factors["center_factor"] * u[1, 1, 1]
        + factors["inverse_hx2"] * (u[1, 1, 0] + u[1, 1, 2])
        + factors["inverse_hy2"] * (u[1, 0, 1] + u[1, 2, 1])
        + factors["inverse_hz2"] * (u[0, 1, 1] + u[2, 1, 1])
    )
    assert 7 <= bound[1, 1, 1] / (magnitude * 2.0**-24) <= 7.1


def test_the_laplacian_s_ideal_traffic_leaves_the_edges_out() -> None:
    nx, ny, nz = 5, 4, 6
    x, y, z = np.meshgrid(np.arange(nx), np.arange(ny), np.arange(nz), indexing="ij")
    sides = sum((axis == 0) | (axis == last - 1) for axis, last in ((x, nx), (y, ny), (z, nz)))
    cost = make_problem("laplacian", {"nx": nx, "ny": ny, "nz": nz}).cost
    assert (cost.read_bytes, cost.written_bytes) == (4 * (sides <= 1).sum(), 4 * (sides == 0).sum())
    assert make_problem("laplacian", {"nx": 2, "ny": 9, "nz": 9}).num_bytes == 0


@pytest.mark.parametrize("num_steps", [1, 1000])
def test_branches_are_torch_s_steps(num_steps: int) -> None:
    problem = make_problem("branches", {"n": 33, "num_steps": num_steps})
    value = torch.from_numpy(problem.inputs["x"]).double()
    is_odd = torch.arange(33) % 2 == 1
    for _ in range(num_steps):
        value = torch.where(is_odd, value * (1 - 1 / 2048) - 1 / 2048, value * (1 - 1 / 4096) + 1 / 4096)
    np.testing.assert_allclose(problem.expected["out"].values, value.numpy(), rtol=1e-12)


def test_uneven_loops_are_torch_s_steps() -> None:
    problem = make_problem("uneven_loops", {"n": 500, "max_turns": 40})
    turns = torch.from_numpy(problem.inputs["num_turns"])
    value = torch.from_numpy(problem.inputs["x"]).double()
    for turn in range(int(turns.max())):
        for _ in range(8):
            value = torch.where(turn < turns, value * (1 - 1 / 4096) + 1 / 4096, value)
    np.testing.assert_allclose(problem.expected["out"].values, value.numpy(), rtol=1e-12)
    assert problem.cost.flops == 2 * 8 * int(turns.sum())


def test_most_loops_are_short_and_the_order_sorts_them() -> None:
    inputs = make_problem("uneven_loops", {"n": 20_000, "max_turns": 1000}).inputs
    turns = inputs["num_turns"]
    assert (turns.min(), turns.max()) == (1, 1000)
    assert 180 < turns.mean() < 220
    assert sorted(inputs["order"]) == list(range(20_000))
    assert np.all(np.diff(turns[inputs["order"]]) <= 0)


def test_one_step_too_few_is_seen() -> None:
    """The bound is tighter than a step is long."""
    problem = make_problem("branches", {"n": 64, "num_steps": 1000})
    is_odd = np.arange(64) % 2 == 1
    limit = np.where(is_odd, -1, 1)
    factor = np.where(is_odd, 1 - 1 / 2048, 1 - 1 / 4096)
    mismatch = find_mismatch(problem, {"out": limit + (problem.inputs["x"] - limit) * factor**999})
    assert mismatch is not None
    assert mismatch.count == 64


def test_one_turn_too_few_is_seen() -> None:
    problem = make_problem("uneven_loops", {"n": 64, "max_turns": 40})
    fewer = 1 + (problem.inputs["x"] - 1) * (1 - 1 / 4096) ** (8.0 * (problem.inputs["num_turns"] - 1))
    mismatch = find_mismatch(problem, {"out": fewer})
    assert mismatch is not None
    assert mismatch.count == 64
