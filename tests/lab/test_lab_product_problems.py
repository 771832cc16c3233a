"""Products of matrices: references against torch, bounds that detect sums in half, tiles against their description."""

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


def test_matmul_is_torch_s() -> None:
    problem = make_problem("matmul", MATMUL)
    a, b = (torch.from_numpy(problem.inputs[name]).double() for name in ("a", "b"))
    np.testing.assert_allclose(problem.expected["out"].values, (a @ b).numpy(), rtol=1e-12, atol=1e-12)
    assert np.array_equal(problem.inputs["b_columns"], problem.inputs["b"].T)


def test_the_int8_product_is_torch_s() -> None:
    problem = make_problem("int8_product", INT8)
    x, codes, zeros, scales = (torch.from_numpy(problem.inputs[name]) for name in ("x", "codes", "zeros", "scales"))
    weights = (codes.double() - zeros.double()[:, None]) * scales.double()[:, None]
    np.testing.assert_allclose(problem.expected["out"].values, (x.double() @ weights.T).numpy(), rtol=1e-12)
    assert torch.equal(weights.half().double(), weights), "widened weights would be rounded"
    assert np.array_equal(problem.inputs["x"], problem.inputs["x_half"].astype(np.float32))


def test_sums_in_float_are_right_and_sums_in_half_are_not() -> None:
    problem = make_problem("matmul", MATMUL)
    a, b = problem.inputs["a"], problem.inputs["b"]
    for dtype, is_right in ((np.float32, True), (np.float16, False)):
        out = np.zeros((9, 21), dtype)
        for k in range(300):  # one term after the other
            out = (out + np.outer(a[:, k].astype(np.float32), b[k].astype(np.float32))).astype(dtype)
        assert (find_mismatch(problem, {"out": out.astype(np.float32)}) is None) == is_right


def test_a_zero_point_that_is_one_off_is_found() -> None:
    problem = make_problem("int8_product", INT8)
    wrong = problem.inputs["x_half"].astype(np.float64).sum(axis=1, keepdims=True) * problem.inputs["scales"]
    assert find_mismatch(problem, {"out": (problem.expected["out"].values + wrong).astype(np.float32)}) is not None


@pytest.mark.parametrize(("name", "sizes"), [("matmul", MATMUL), ("int8_product", INT8)])
def test_tiles_are_those_of_the_engine(name: str, sizes: dict[str, int]) -> None:
    """Every weight lies where kernels/common/tile.cuh says; padding has the code of zero."""
    problem = make_problem(name, sizes)
    rows = problem.inputs["b_columns" if name == "matmul" else "codes"]
    tiles, found = problem.inputs["tiles"].copy(), np.empty_like(rows)
    for row in range(rows.shape[0]):
        for column in range(rows.shape[1]):
            unit, byte = divmod(column * rows.itemsize, 64)
            part, place = divmod(byte, 16)
            begin = row % 16 // 8 * 512 + (row % 8 * 4 + part) * 16 + place
            bytes_ = tiles[row // 16, unit, begin : begin + rows.itemsize]
            found[row, column] = bytes_.view(rows.dtype)[0]
            bytes_[...] = 0x80 if name == "int8_product" else 0
    assert np.array_equal(found, rows)
    assert np.all(tiles == (0x80 if name == "int8_product" else 0))


def test_scales_and_zero_points_of_tiles() -> None:
    problem = make_problem("int8_product", INT8)
    layout = tile_layout("int8", 37, 72, None, "float32", is_symmetric=False)
    assert problem.inputs["tiles"].shape == (layout.num_tiles, layout.num_units, 1024)
    for name, of_tiles in (("scales", "tile_scales"), ("zeros", "tile_zeros")):
        values = problem.inputs[of_tiles]
        assert values.shape == (layout.num_tiles, layout.num_groups, 16)
        assert np.array_equal(values.reshape(-1)[:37], problem.inputs[name])
        assert not values.reshape(-1)[37:].any()


def test_rows_that_are_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        tile_rows(tile_layout("float16", 3, 8), np.zeros((3, 300), np.float16))


def solved(problem: Problem, name: str) -> list[tuple[str, tuple[int, ...]]]:
    notes = Notes()
    problem.solvers[name](notes, phantoms_of(problem))  # type: ignore[arg-type]
    return [(launch.stem, launch.grid) for launch in notes.launches]


def test_the_engine_s_solvers_launch_its_kernels() -> None:
    assert [stem for stem, _ in solved(make_problem("matmul", MATMUL), "llmcli")] == ["dequantize"]
    assert solved(make_problem("matmul", MATMUL), "cublas") == []
    int8 = make_problem("int8_product", INT8)
    assert [stem for stem, _ in solved(int8, "llmcli_packed")] == ["gemm_packed"]
    assert [stem for stem, _ in solved(int8, "llmcli_widened")] == ["dequantize"]


def test_the_library_is_asked_only_for_arrays_that_fit() -> None:
    arrays = phantoms_of(make_problem("matmul", MATMUL))
    with pytest.raises(ValueError, match="weight"):
        matmul(Notes(), x=arrays["a"], weight=arrays["b"], out=arrays["out"])  # type: ignore[arg-type]
