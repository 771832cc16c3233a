"""References of the problems on rows and values against torch in float64, and their bounds against NumPy in float32."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from llmcli.lab.catalogue import make_problem
from llmcli.lab.problem import Problem, find_mismatch

Sizes = dict[str, int]
ROWS: list[Sizes] = [{"num_rows": 1, "num_columns": 3}, {"num_rows": 5, "num_columns": 1001}]
VALUES: list[Sizes] = [{"num_values": 3}, {"num_values": 1001}]


def wide(problem: Problem, name: str) -> torch.Tensor:
    return torch.from_numpy(problem.inputs[name]).double()


def row_sum(problem: Problem) -> torch.Tensor:
    return wide(problem, "x").sum(dim=1)


def softmax(problem: Problem) -> torch.Tensor:
    return torch.softmax(wide(problem, "x"), dim=1)


def layer_norm(problem: Problem) -> torch.Tensor:
    x, weight, bias = (wide(problem, name) for name in ("x", "weight", "bias"))
    return torch.nn.functional.layer_norm(x, x.shape[1:], weight, bias, eps=float(np.float32(1e-5)))


def gelu(problem: Problem) -> torch.Tensor:
    return torch.nn.functional.gelu(wide(problem, "x"), approximate="tanh")


def silu(problem: Problem) -> torch.Tensor:
    return torch.nn.functional.silu(wide(problem, "x"))


def swiglu(problem: Problem) -> torch.Tensor:
    gate, up = wide(problem, "gate_up").chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


CASES = [(torch_s, sizes) for torch_s in (row_sum, softmax, layer_norm, swiglu) for sizes in ROWS]
CASES += [(torch_s, sizes) for torch_s in (gelu, silu) for sizes in VALUES]


@pytest.mark.parametrize(("torch_s", "sizes"), CASES)
def test_the_reference_is_torch_s(torch_s: Callable[[Problem], torch.Tensor], sizes: Sizes) -> None:
    problem = make_problem(torch_s.__name__, sizes)
    np.testing.assert_allclose(
        problem.expected["out"].values, torch_s(problem).numpy(), rtol=1e-11, atol=1e-14 if torch_s is gelu else 0
    )


@pytest.mark.parametrize("sizes", [*ROWS, {"num_rows": 64, "num_columns": 32000}])
def test_top1_is_torch_s_and_has_ties(sizes: Sizes) -> None:
    problem = make_problem("top1", sizes)
    x, index = wide(problem, "x"), problem.expected["index"].values
    np.testing.assert_array_equal(problem.expected["value"].values, x.amax(dim=1).numpy())
    for row, numbers in enumerate(x):
        places = torch.nonzero(numbers == numbers.max())[:, 0]
        assert index[row] == places.min()
        assert len(places) >= 2 or sizes["num_columns"] < 10


def layer_norm_by_squares(problem: Problem) -> np.ndarray:
    x = problem.inputs["x"]
    mean = x.mean(axis=1, keepdims=True)
    variance = (x * x).mean(axis=1, keepdims=True) - mean * mean
    inverse = 1 / np.sqrt(variance + problem.scalars["eps"])
    return (x - mean) * inverse * problem.inputs["weight"] + problem.inputs["bias"]


def softmax_in_passes(problem: Problem) -> np.ndarray:
    x = problem.inputs["x"]
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def gelu_as_written(problem: Problem) -> np.ndarray:
    x = problem.inputs["x"]
    argument = np.float32(0.7978845608028654) * x * (1 + np.float32(0.044715) * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(argument))


def gelu_by_exp(problem: Problem) -> np.ndarray:
    x = problem.inputs["x"]
    return x / (1 + np.exp(-np.float32(1.5957691216057308) * x * (1 + np.float32(0.044715) * x * x)))


def silu_as_written(problem: Problem) -> np.ndarray:
    x = problem.inputs["x"]
    return x / (1 + np.exp(-x))


IN_FLOAT32 = [
    ("layer_norm", layer_norm_by_squares),
    ("softmax", softmax_in_passes),
    ("gelu", gelu_as_written),
    ("gelu", gelu_by_exp),
    ("silu", silu_as_written),
    ("row_sum", lambda problem: problem.inputs["x"].cumsum(axis=1, dtype=np.float32)[:, -1]),
]


@pytest.mark.filterwarnings("ignore:overflow")  # the exponential of a large gate
@pytest.mark.parametrize(("name", "solve"), IN_FLOAT32)
def test_the_bound_holds_in_float32_and_tells_a_small_fault(name: str, solve: Callable[[Problem], np.ndarray]) -> None:
    sizes = {"num_values": 70001} if name in ("gelu", "silu") else {"num_rows": 5, "num_columns": 4099}
    problem = make_problem(name, sizes)
    out = solve(problem)
    assert out.dtype == np.float32
    assert find_mismatch(problem, {"out": out}) is None
    largest = np.unravel_index(np.argmax(np.abs(out)), out.shape)
    out[largest] *= np.float32(1.001)
    assert find_mismatch(problem, {"out": out}) is not None


@pytest.mark.parametrize("num_columns", [1, 7, 8, 21])
def test_swiglu_s_two_layouts_hold_the_same(num_columns: int) -> None:
    problem = make_problem("swiglu", {"num_rows": 2, "num_columns": num_columns})
    tiles = problem.inputs["gate_up_tiles"]
    for column in range(num_columns):
        place = 16 * (column // 8) + column % 8
        np.testing.assert_array_equal(tiles[:, place], problem.inputs["gate_up"][:, column])
        np.testing.assert_array_equal(tiles[:, place + 8], problem.inputs["gate_up"][:, num_columns + column])
