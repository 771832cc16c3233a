"""The MLP of a layer: the reference against torch, its bound against faults, its tiles and launches."""

from typing import Any

import numpy as np
import pytest
import torch

from llmcli.kernels.tiles import tile_layout
from llmcli.lab.catalogue import make_problem
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.problem import Problem, find_mismatch

SIZES = {"hidden_size": 208, "intermediate_size": 1040}


def mlp(problem: Problem, dtype: torch.dtype, **changed: np.ndarray) -> Any:
    """Hugging Face's LlamaRMSNorm and LlamaMLP, with the halves as weights."""
    inputs = {**problem.inputs, **changed}
    hidden, norm_weight, gate, up, down = (
        torch.from_numpy(inputs[name]).to(dtype) for name in ("before", "norm_weight", "gate", "up", "down")
    )
    normed = torch.nn.functional.rms_norm(hidden, hidden.shape, norm_weight, eps=float(np.float32(1e-5)))
    return (hidden + down @ (torch.nn.functional.silu(gate @ normed) * (up @ normed))).numpy()


def test_the_reference_is_torch_s() -> None:
    problem = make_problem("decode_mlp", SIZES)
    np.testing.assert_allclose(problem.expected["hidden"].values, mlp(problem, torch.float64), rtol=1e-10, atol=1e-12)


def test_float32_is_right_and_a_norm_without_its_weight_is_not() -> None:
    problem = make_problem("decode_mlp", SIZES)
    assert find_mismatch(problem, {"hidden": mlp(problem, torch.float32)}) is None
    ones = np.ones_like(problem.inputs["norm_weight"])
    assert find_mismatch(problem, {"hidden": mlp(problem, torch.float32, norm_weight=ones)}) is not None


@pytest.mark.parametrize("name", ["gate", "up", "down"])
@pytest.mark.parametrize("sizes", [SIZES, {"hidden_size": 2096, "intermediate_size": 4240}])
def test_a_lost_pack_of_weights_is_found(name: str, sizes: dict[str, int]) -> None:
    """Eight columns, as one load brings them, of one row of down, or of all rows of gate or of up."""
    problem = make_problem("decode_mlp", sizes)
    weights = problem.inputs[name].copy()
    weights[0 if name == "down" else slice(None), -8:] = 0
    assert find_mismatch(problem, {"hidden": mlp(problem, torch.float32, **{name: weights})}) is not None


def test_codes_are_the_halves() -> None:
    inputs = make_problem("decode_mlp", SIZES).inputs
    for name in ("gate", "up", "down"):
        weights = (inputs[f"{name}_codes"].astype(np.float64) - 128) * inputs[f"{name}_scales"][:, None]
        assert np.array_equal(weights, inputs[name].astype(np.float64))


def test_tiles_have_eight_rows_of_gate_and_eight_of_up() -> None:
    inputs = make_problem("decode_mlp", SIZES).inputs
    layout = tile_layout("int8", 2080, 208, None, "float32")
    assert inputs["gate_up_tiles"].shape == (layout.num_tiles, layout.num_units, 1024)
    row, column = np.indices((1040, 208))
    begin = (row % 8 * 4 + column % 64 // 16) * 16 + column % 16
    for name, half in (("gate", 0), ("up", 512)):
        assert np.array_equal(inputs["gate_up_tiles"][row // 8, column // 64, half + begin], inputs[f"{name}_codes"])
        scales = inputs["gate_up_tile_scales"][:, 0, half // 64 : half // 64 + 8]
        assert np.array_equal(scales.reshape(-1), inputs[f"{name}_scales"])


def test_the_engine_needs_two_launches() -> None:
    problem, notes = make_problem("decode_mlp", SIZES), Notes()
    problem.solvers["llmcli"](notes, phantoms_of(problem))  # type: ignore[arg-type]
    assert [launch.stem for launch in notes.launches] == ["gemv", "gemv"]
    assert [launch.arguments[-1].epilogue for launch in notes.launches] == [2, 1]
