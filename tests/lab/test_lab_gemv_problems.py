"""Products with one row: references against torch, tiles against their description, faults that must be found."""

import numpy as np
import pytest
import torch

from llmcli.kernels.tiles import tile_layout
from llmcli.lab.catalogue import make_problem
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.problem import find_mismatch

SIZES = {"num_rows": 35, "num_columns": 300}


def test_gemv_is_torch_s() -> None:
    problem = make_problem("gemv", SIZES)
    weight, x = (torch.from_numpy(problem.inputs[name]).double() for name in ("weight", "x"))
    np.testing.assert_allclose(problem.expected["out"].values, (weight @ x).numpy(), rtol=1e-12)
    assert np.array_equal(problem.inputs["x"], problem.inputs["x_half"].astype(np.float32))


def test_sums_in_float_are_right_and_sums_in_half_are_not() -> None:
    problem = make_problem("gemv", SIZES)
    weight, x = problem.inputs["weight"], problem.inputs["x"]
    for dtype, is_right in ((np.float32, True), (np.float16, False)):
        out = np.zeros(35, dtype)
        for column in range(300):
            out = (out + weight[:, column].astype(np.float32) * x[column]).astype(dtype)
        assert (find_mismatch(problem, {"out": out.astype(np.float32)}) is None) == is_right


@pytest.mark.parametrize("name", ["gemv_int8", "gemv_int4"])
def test_codes_are_torch_s(name: str) -> None:
    problem = make_problem(name, SIZES)
    codes = torch.from_numpy(codes_of(name, problem.inputs["codes"])).double()
    x, scales, zeros = (torch.from_numpy(problem.inputs[key]).double() for key in ("x", "scales", "zeros"))
    expected = ((codes - zeros[:, None]) * scales[:, None]) @ x
    np.testing.assert_allclose(problem.expected["out"].values, expected.numpy(), rtol=1e-11, atol=1e-13)


def test_the_two_forms_of_int4_are_one() -> None:
    inputs = make_problem("gemv_int4", SIZES).inputs
    assert np.array_equal(inputs["mins"], -inputs["zeros"].astype(np.float32) * inputs["scales"])


@pytest.mark.parametrize("name", ["gemv_int8", "gemv_int4"])
def test_a_zero_point_that_is_one_off_and_a_lost_column_are_found(name: str) -> None:
    problem = make_problem(name, SIZES)
    x, right = problem.inputs["x"].astype(np.float64), problem.expected["out"].values
    zero_off = right + x.sum() * problem.inputs["scales"]
    assert find_mismatch(problem, {"out": zero_off.astype(np.float32)}) is not None
    zeros, scales = problem.inputs["zeros"].astype(np.float64), problem.inputs["scales"]
    last = (codes_of(name, problem.inputs["codes"])[:, -1] - zeros) * scales * x[-1]
    assert find_mismatch(problem, {"out": (right - last).astype(np.float32)}) is not None


@pytest.mark.parametrize("name", ["gemv", "gemv_int8", "gemv_int4"])
def test_tiles_are_those_of_the_engine(name: str) -> None:
    """Bytes lie where kernels/common/tile.cuh says; in a byte of int4 the first code is in the low half."""
    problem = make_problem(name, SIZES)
    rows = problem.inputs["weight" if name == "gemv" else "codes"].view(np.uint8)
    if name == "gemv_int4":
        rows = rows >> 4 | rows << 4  # the article has the first code in the high half
    tiles = problem.inputs["tiles"]
    row, byte = np.indices(rows.shape)
    begin = row % 16 // 8 * 512 + (row % 8 * 4 + byte % 64 // 16) * 16 + byte % 16
    assert np.array_equal(tiles[row // 16, byte // 64, begin], rows)


@pytest.mark.parametrize(("name", "kind"), [("gemv_int8", "int8"), ("gemv_int4", "int4")])
def test_scales_and_zero_points_of_tiles(name: str, kind: str) -> None:
    inputs = make_problem(name, SIZES).inputs
    layout = tile_layout(kind, 35, 300, None, "float32", is_symmetric=False)
    for plain, of_tiles in (("scales", "tile_scales"), ("zeros", "tile_zeros")):
        assert inputs[of_tiles].shape == (layout.num_tiles, layout.num_groups, 16)
        for group in range(layout.num_groups):
            values = inputs[of_tiles][:, group].reshape(-1)
            assert np.array_equal(values[:35], inputs[plain])


@pytest.mark.parametrize("name", ["gemv", "gemv_int8", "gemv_int4"])
def test_the_engine_solves_it_in_one_launch(name: str) -> None:
    problem, notes = make_problem(name, SIZES), Notes()
    problem.solvers["llmcli"](notes, phantoms_of(problem))  # type: ignore[arg-type]
    assert [launch.stem for launch in notes.launches] == ["gemv"]


def codes_of(name: str, stored: np.ndarray) -> np.ndarray:
    """One code an element, as the articles' kernels read them."""
    if name == "gemv_int8":
        return stored
    return np.stack((stored >> 4, stored & 15), axis=-1).reshape(len(stored), -1)
