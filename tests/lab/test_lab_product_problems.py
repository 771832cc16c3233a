"""Products with many tokens and with one: references against torch, faults that must be found, tiles, launches."""

import numpy as np
import pytest
import torch

from llmcli.kernels.tiles import tile_layout
from llmcli.lab.catalogue import make_problem
from llmcli.lab.matrices import tile_rows
from llmcli.lab.notes import Notes, matmul, phantoms_of
from llmcli.lab.problem import Problem, find_mismatch

MATMUL = {"num_rows": 9, "num_columns": 21, "num_inputs": 300}
INT8 = {"num_tokens": 5, "num_rows": 37, "num_inputs": 72}
ROW = {"num_rows": 35, "num_columns": 328}
SIZES = {"matmul": MATMUL, "int8_product": INT8, "gemv": ROW, "gemv_int8": ROW, "gemv_int4": ROW}
CODES = ["int8_product", "gemv_int8", "gemv_int4"]


def make(name: str) -> Problem:
    return make_problem(name, SIZES[name])


def codes_of(problem: Problem) -> np.ndarray:
    """One code an element, as the articles' kernels read them."""
    stored = problem.inputs["codes"]
    if problem.name == "gemv_int4":
        return np.stack((stored >> 4, stored & 15), axis=-1).reshape(len(stored), -1)
    return stored


@pytest.mark.parametrize(("name", "left", "right", "atol"), [("matmul", "a", "b", 1e-12), ("gemv", "weight", "x", 0)])
def test_products_of_halves_are_torch_s(name: str, left: str, right: str, atol: float) -> None:
    problem = make(name)
    a, b = (torch.from_numpy(problem.inputs[one]).double() for one in (left, right))
    np.testing.assert_allclose(problem.expected["out"].values, (a @ b).numpy(), rtol=1e-12, atol=atol)


def test_what_stands_twice_is_the_same() -> None:
    matmul_inputs = make("matmul").inputs
    assert np.array_equal(matmul_inputs["b_columns"], matmul_inputs["b"].T)
    for name in ("gemv", "int8_product"):
        inputs = make(name).inputs
        assert np.array_equal(inputs["x"], inputs["x_half"].astype(np.float32))
    int4 = make("gemv_int4").inputs
    assert np.array_equal(int4["mins"], -int4["zeros"].astype(np.float32) * int4["scales"])


@pytest.mark.parametrize("name", CODES)
def test_products_of_codes_are_torch_s(name: str) -> None:
    problem = make(name)
    codes = torch.from_numpy(codes_of(problem)).double()
    x, scales, zeros = (torch.from_numpy(problem.inputs[key]).double() for key in ("x", "scales", "zeros"))
    weights = (codes - zeros[:, None]) * scales[:, None]
    expected = (x @ weights.T).numpy()
    if name == "int8_product":
        np.testing.assert_allclose(problem.expected["out"].values, expected, rtol=1e-12)
        assert torch.equal(weights.half().double(), weights), "widened weights would be rounded"
    else:
        np.testing.assert_allclose(problem.expected["out"].values, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["matmul", "gemv"])
def test_sums_in_float_are_right_and_sums_in_half_are_not(name: str) -> None:
    problem = make(name)
    a, b = (problem.inputs[one] for one in (("a", "b") if name == "matmul" else ("weight", "x")))
    for dtype, is_right in ((np.float32, True), (np.float16, False)):
        out = np.zeros(problem.outputs["out"].shape, dtype)
        for k in range(len(b)):  # one term after the other
            term = np.multiply.outer(a[:, k].astype(np.float32), b[k].astype(np.float32))
            out = (out + term).astype(dtype)
        assert (find_mismatch(problem, {"out": out.astype(np.float32)}) is None) == is_right


@pytest.mark.parametrize("name", CODES)
def test_a_zero_point_that_is_one_off_is_found(name: str) -> None:
    problem = make(name)
    x, right = problem.inputs["x"].astype(np.float64), problem.expected["out"].values
    zero_off = right + x.sum(axis=-1, keepdims=True) * problem.inputs["scales"]
    assert find_mismatch(problem, {"out": zero_off.astype(np.float32)}) is not None


@pytest.mark.parametrize("name", ["gemv_int8", "gemv_int4"])
def test_a_lost_column_is_found(name: str) -> None:
    problem = make(name)
    zeros, scales = problem.inputs["zeros"].astype(np.float64), problem.inputs["scales"]
    last = (codes_of(problem)[:, -1] - zeros) * scales * problem.inputs["x"].astype(np.float64)[-1]
    assert find_mismatch(problem, {"out": (problem.expected["out"].values - last).astype(np.float32)}) is not None


@pytest.mark.parametrize("name", SIZES)
def test_tiles_are_those_of_the_engine(name: str) -> None:
    """Every byte lies where kernels/common/tile.cuh says; eight codes of int4 have the order 0 2 4 6 1 3 5 7."""
    problem = make(name)
    rows = problem.inputs[{"matmul": "b_columns", "gemv": "weight"}.get(name, "codes")].view(np.uint8)
    if name == "gemv_int4":
        ordered = codes_of(problem).reshape(len(rows), -1, 4, 2).transpose(0, 1, 3, 2).reshape(len(rows), -1)
        rows = ordered[:, ::2] | ordered[:, 1::2] << 4
    tiles = problem.inputs["tiles"].copy()
    row, byte = np.indices(rows.shape)
    place = row // 16, byte // 64, row % 16 // 8 * 512 + (row % 8 * 4 + byte % 64 // 16) * 16 + byte % 16
    assert np.array_equal(tiles[place], rows)
    filler = {"int8_product": 0x80, "gemv_int8": 0x80, "gemv_int4": 0x88}.get(name, 0)  # the code of zero
    tiles[place] = filler
    assert np.all(tiles == filler)


@pytest.mark.parametrize("name", CODES)
def test_scales_and_zero_points_of_tiles(name: str) -> None:
    inputs = make(name).inputs
    num_rows, num_inputs = codes_of(make(name)).shape
    kind = "int4" if name == "gemv_int4" else "int8"
    layout = tile_layout(kind, num_rows, num_inputs, None, "float32", is_symmetric=False)
    assert inputs["tiles"].shape == (layout.num_tiles, layout.num_units, 1024)
    for plain, of_tiles in (("scales", "tile_scales"), ("zeros", "tile_zeros")):
        assert inputs[of_tiles].shape == (layout.num_tiles, layout.num_groups, 16)
        for group in range(layout.num_groups):
            values = inputs[of_tiles][:, group].reshape(-1)
            assert np.array_equal(values[:num_rows], inputs[plain])
            assert not values[num_rows:].any()


def test_rows_that_are_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        tile_rows(tile_layout("float16", 3, 8), np.zeros((3, 300), np.float16))


@pytest.mark.parametrize(
    ("name", "solver", "stems"),
    [
        ("matmul", "llmcli", ["stage_wide", "gemm_narrow"]),
        ("matmul", "cublas", []),
        ("int8_product", "llmcli", ["stage_wide", "gemm_narrow"]),
        *((name, "llmcli", ["stage_wide", "gemv"]) for name in ("gemv", "gemv_int8", "gemv_int4")),
    ],
)
def test_solvers_launch_the_engine_s_kernels(name: str, solver: str, stems: list[str]) -> None:
    problem, notes = make(name), Notes()
    problem.solvers[solver](notes, phantoms_of(problem))  # type: ignore[arg-type]
    assert [launch.stem for launch in notes.launches] == stems


def test_the_library_is_asked_only_for_arrays_that_fit() -> None:
    arrays = phantoms_of(make("matmul"))
    with pytest.raises(ValueError, match="weight"):
        matmul(Notes(), x=arrays["a"], weight=arrays["b"], out=arrays["out"])  # type: ignore[arg-type]
