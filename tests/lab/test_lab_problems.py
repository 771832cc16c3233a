"""Problems of the lab: references against torch in float64, bounds against float32 and against mistakes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from llmcli.errors import UsageError
from llmcli.lab.catalogue import PROBLEMS, make_problem
from llmcli.lab.problem import Problem, find_mismatch


def wide(problem: Problem, name: str) -> torch.Tensor:
    return torch.from_numpy(problem.inputs[name]).double()


def test_rms_norm_is_torch_s() -> None:
    problem = make_problem("rms_norm", {"num_rows": 3, "num_columns": 100})
    x, weight = (wide(problem, name) for name in ("x", "weight"))
    expected = torch.nn.functional.rms_norm(x, (100,), weight, eps=float(np.float32(1e-5)))
    np.testing.assert_allclose(problem.expected["out"].values, expected.numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_catalogue_has_the_names_of_its_kinds(name: str) -> None:
    assert PROBLEMS[name].name == name
    assert PROBLEMS[name].summary


def test_a_wrong_element_is_named() -> None:
    problem = make_problem("rms_norm", {"num_rows": 2, "num_columns": 5})
    out = problem.expected["out"].values.astype(np.float32)
    out[1, 3] += 0.5
    out[0, 2] += 1e-3
    mismatch = find_mismatch(problem, {"out": out})
    assert mismatch is not None
    assert (mismatch.index, mismatch.count, mismatch.size) == ((1, 3), 2, 10)
    assert str(mismatch).startswith("out[1, 3] is ")
    assert "expected" in str(mismatch)


def test_what_was_not_written_is_wrong() -> None:
    problem = make_problem("rms_norm", {"num_rows": 1, "num_columns": 3})
    out = problem.expected["out"].values.astype(np.float32)
    out[0, 1] = np.nan
    mismatch = find_mismatch(problem, {"out": out})
    assert mismatch is not None
    assert mismatch.index == (0, 1)


@pytest.mark.parametrize(("name", "sizes"), [("rms_nrm", {"n": 1}), ("rms_norm", {"n": 1})])
def test_unknown_names_and_sizes_are_refused(name: str, sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        make_problem(name, sizes)


def test_a_copy_is_one() -> None:
    problem = make_problem("copy", {"n": 1000})
    np.testing.assert_array_equal(problem.expected["out"].values, problem.inputs["x"])
    assert (problem.num_bytes, problem.sizes["stride"]) == (8000, 1)


def test_a_transpose_is_torch_s() -> None:
    problem = make_problem("transpose", {"num_rows": 5, "num_columns": 3})
    x = wide(problem, "x")
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
    u = wide(problem, "u")
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
    value = wide(problem, "x")
    is_odd = torch.arange(33) % 2 == 1
    for _ in range(num_steps):
        value = torch.where(is_odd, value * (1 - 1 / 2048) - 1 / 2048, value * (1 - 1 / 4096) + 1 / 4096)
    np.testing.assert_allclose(problem.expected["out"].values, value.numpy(), rtol=1e-12)


def test_uneven_loops_are_torch_s_steps() -> None:
    problem = make_problem("uneven_loops", {"n": 500, "max_turns": 40})
    turns = torch.from_numpy(problem.inputs["num_turns"])
    value = wide(problem, "x")
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


Sizes = dict[str, int]
ROWS: list[Sizes] = [{"num_rows": 1, "num_columns": 3}, {"num_rows": 5, "num_columns": 1001}]
VALUES: list[Sizes] = [{"num_values": 3}, {"num_values": 1001}]


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


def is_right(problem: Problem, out: torch.Tensor) -> bool:
    return find_mismatch(problem, {"out": out.float().numpy()}) is None


def test_gelu_after_a_bias_is_torch_s() -> None:
    problem = make_problem("bias_gelu", {"num_rows": 3, "num_columns": 1003})
    x, bias = (wide(problem, name) for name in ("x", "bias"))
    expected = torch.nn.functional.gelu(x + bias, approximate="tanh")
    np.testing.assert_allclose(problem.expected["out"].values, expected.numpy(), rtol=1e-9, atol=1e-12)
    assert is_right(problem, torch.nn.functional.gelu((x + bias).float(), approximate="tanh"))
    assert not is_right(problem, torch.nn.functional.gelu(x + bias))  # the exact form
    assert not is_right(problem, torch.nn.functional.gelu(x, approximate="tanh"))


def masked(problem: Problem, offset: int = 0) -> torch.Tensor:
    scores, slopes = (wide(problem, name) for name in ("scores", "slopes"))
    _, num_queries, num_keys = scores.shape
    seen = torch.ones(num_queries, num_keys).tril(num_keys - num_queries + offset).bool()
    biased = scores + slopes[:, None, None] * torch.arange(num_keys)
    return biased.masked_fill(~seen, -torch.inf)


def test_the_masked_softmax_is_torch_s() -> None:
    problem = make_problem("masked_softmax", {"num_heads": 4, "num_queries": 5, "num_keys": 300})
    expected = masked(problem).softmax(-1)
    np.testing.assert_allclose(problem.expected["out"].values, expected.numpy(), rtol=1e-9, atol=1e-300)
    hidden = problem.inputs["mask"] == 1
    assert torch.equal(masked(problem)[0] == -torch.inf, torch.from_numpy(hidden))
    assert is_right(problem, masked(problem).float().softmax(-1))
    assert not is_right(problem, masked(problem, offset=-1).softmax(-1))
    assert not is_right(problem, masked(problem, offset=1).softmax(-1))


def test_more_queries_than_keys_are_refused() -> None:
    with pytest.raises(UsageError, match="5 queries"):
        make_problem("masked_softmax", {"num_heads": 1, "num_queries": 5, "num_keys": 4})


SIZES = {"num_tokens": 5, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
FORMS = ("half", "adjacent", "two_parts")


def heads_of(values: np.ndarray) -> torch.Tensor:
    """The heads that are rotated. Shapes: values [5, 160]; result [5, 8, 16]"""
    return torch.from_numpy(values[:, :128].reshape(5, 8, 16)).double()


def angles_of(problem: Problem, part: int, size: int) -> torch.Tensor:
    """Shapes: result float64 [5, 1, size / 2]"""
    positions = torch.from_numpy(problem.inputs["positions"].reshape(-1, 5)[part])
    inverse = 1.0 / 10_000 ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    assert np.allclose(inverse, problem.inputs["frequencies"], rtol=2e-7, atol=0)
    return (positions.float()[:, None] * torch.from_numpy(problem.inputs["frequencies"])).double()[:, None]


def rotate_half(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Hugging Face's."""
    cos, sin = (torch.cat((f(angles), f(angles)), dim=-1) for f in (torch.cos, torch.sin))
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def rotated(problem: Problem, form: str) -> torch.Tensor:
    x = heads_of(problem.inputs["before"])
    if form == "half":
        return rotate_half(x, angles_of(problem, 0, 16))
    if form == "adjacent":  # a pair is a complex number
        numbers = torch.view_as_complex(x.reshape(5, 8, 8, 2).contiguous())
        angles = angles_of(problem, 0, 16)
        return torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)).flatten(2)
    halves = x.chunk(2, dim=-1)
    return torch.cat([rotate_half(half, angles_of(problem, part, 8)) for part, half in enumerate(halves)], dim=-1)


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_torch_s(form: str) -> None:
    problem = make_problem(f"rotary_{form}", SIZES)
    values = problem.expected["data"].values
    np.testing.assert_allclose(heads_of(values).numpy(), rotated(problem, form).numpy(), rtol=1e-12, atol=1e-12)
    assert np.array_equal(values[:, 128:], problem.inputs["before"][:, 128:]), "values are not rotated"


@pytest.mark.parametrize("form", FORMS)
def test_another_form_another_direction_and_rotated_values_are_found(form: str) -> None:
    problem = make_problem(f"rotary_{form}", SIZES)
    right = problem.expected["data"].values.astype(np.float32)
    assert find_mismatch(problem, {"data": right}) is None
    assert find_mismatch(problem, {"data": problem.inputs["before"]}) is not None
    for other in set(FORMS) - {form}:
        assert (
            find_mismatch(problem, {"data": make_problem(f"rotary_{other}", SIZES).expected["data"].values}) is not None
        )
    touched = right.copy()
    touched[0, 128] = np.nextafter(touched[0, 128], np.float32(9))
    assert find_mismatch(problem, {"data": touched}) is not None


@pytest.mark.parametrize("form", FORMS)
def test_tables_hold_the_angles_of_a_position(form: str) -> None:
    inputs = make_problem(f"rotary_{form}", SIZES).inputs
    frequencies = inputs["frequencies"]
    for position in (0, 1, 4095):
        angles = (np.float32(position) * frequencies).astype(np.float64)
        assert np.array_equal(inputs["cosines"][position], np.cos(angles).astype(np.float32))
        assert np.array_equal(inputs["sines"][position], np.sin(angles).astype(np.float32))
    assert np.array_equal(inputs["cos_sin"], np.stack((inputs["cosines"], inputs["sines"]), axis=-1))
