"""Cases of append_tokens and attention_decode: torch and numpy in float32 pass, and no fault does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import simulated_attention  # noqa: E402
import torch  # noqa: E402
from simulated_kernels import allocate, on_host  # noqa: E402

from llmcli.kernels.attention_decode import LaneInputs  # noqa: E402
from llmcli.kernels.qkv import QkvLayout  # noqa: E402
from llmcli.lab.attention import (  # noqa: E402
    CODES,
    DTYPES,
    EPS,
    Estimate,
    append,
    in_cache,
    new_tokens,
    rounded,
    spans_of,
    stored,
    with_unused_lanes,
)
from llmcli.lab.cases import attention  # noqa: E402
from llmcli.lab.problem import ENGINE, ROUNDING, Problem, find_mismatch  # noqa: E402
from llmcli.runners.host.llama import rotate  # noqa: E402
from llmcli.runners.torch.operators import TorchOperators  # noqa: E402

LAYOUT = QkvLayout(6, 2, 24)
CASES = {"append_tokens": attention.APPEND_TOKENS, "attention_decode": attention.ATTENTION_DECODE}
MAKE = {"append_tokens": attention.append_case, "attention_decode": attention.decode_case}
Launcher = Callable[..., None]


def on_card(values: np.ndarray) -> Any:
    array = cupy.ndarray(values.shape, values.dtype, allocate(values.nbytes))
    on_host(array)[...] = values
    return array


def solve(problem: Problem, launcher: Launcher) -> dict[str, np.ndarray]:
    """The result of a launcher on the host for a problem."""
    arrays = {name: on_card(array) for name, array in problem.inputs.items()}
    for name, output in {**problem.outputs, **problem.scratch}.items():
        before = np.full(int(np.prod(output.shape)) * np.dtype(output.dtype).itemsize, 0xFF, np.uint8)
        array = before.view(output.dtype).reshape(output.shape)
        arrays[name] = on_card(np.zeros_like(array) if output.holds_zeros else array)
        if output.initial:
            arrays[name] = on_card(problem.inputs[output.initial])
    with pytest.MonkeyPatch.context() as monkeypatch:
        owner = attention.kernel if problem.name == "attention_decode" else attention
        monkeypatch.setattr(owner, problem.name, launcher)
        problem.solvers[ENGINE](None, arrays)  # type: ignore[arg-type]
    for name, array in problem.inputs.items():
        assert on_host(arrays[name]).tobytes() == array.tobytes(), f"{name} changed"
    return {name: on_host(arrays[name]).copy() for name in problem.outputs}


@pytest.mark.parametrize("stem", CASES)
def test_the_numpy_of_the_simulated_card_is_right(stem: str) -> None:
    launcher = getattr(simulated_attention, stem)
    for problem in CASES[stem].checks():
        assert find_mismatch(problem, solve(problem, launcher)) is None, (problem.sizes, problem.label)


Memory = dict[str, Any]  # partial sums, counters, out


def forgets_the_norm(launcher: Launcher, lanes: LaneInputs, memory: Memory) -> None:
    launcher(None, replace(lanes, k_norm=None), **memory)


def takes_the_place_before(launcher: Launcher, lanes: LaneInputs, memory: Memory) -> None:
    positions = on_host(lanes.positions)
    launcher(None, replace(lanes, positions=on_card(np.where(positions > 0, positions - 1, positions))), **memory)


def rotates_nothing(launcher: Launcher, lanes: LaneInputs, memory: Memory) -> None:
    launcher(None, replace(lanes, cos_sin=None), **memory)


def swaps_keys_and_values(launcher: Launcher, lanes: LaneInputs, memory: Memory) -> None:
    cache = replace(lanes.cache, keys=lanes.cache.values, values=lanes.cache.keys)
    launcher(None, replace(lanes, cache=cache), **memory)


def leaves_a_counter(launcher: Launcher, lanes: LaneInputs, memory: Memory) -> None:
    launcher(None, lanes, **memory)
    on_host(memory["counters"])[-1, -1] = 1


def sees_one_token_too_few(launcher: Launcher, lanes: LaneInputs, memory: Memory) -> None:
    launcher(None, replace(lanes, window=36), **memory)


def forgets_a_query_head(launcher: Launcher, lanes: LaneInputs, memory: Memory) -> None:
    launcher(None, lanes, **memory)
    on_host(memory["out"])[-1, -24:] = 0


def adds_a_thousandth(launcher: Launcher, lanes: LaneInputs, memory: Memory) -> None:
    launcher(None, lanes, **memory)
    on_host(memory["out"])[-1] *= np.float32(1.001)


FAULTS = [forgets_the_norm, takes_the_place_before, rotates_nothing, swaps_keys_and_values]
FAULTS_OF_ATTENTION = [leaves_a_counter, sees_one_token_too_few, forgets_a_query_head, adds_a_thousandth]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("stem", "fault"),
    [("append_tokens", fault) for fault in FAULTS]
    + [("attention_decode", fault) for fault in FAULTS + FAULTS_OF_ATTENTION],
)
def test_faults_are_found(stem: str, fault: Callable[..., None], dtype: np.dtype[Any]) -> None:
    problem = MAKE[stem](new_tokens(LAYOUT, dtype, [1, 37], norms=True))
    launcher = getattr(simulated_attention, stem)
    assert find_mismatch(problem, solve(problem, launcher)) is None
    wrong = solve(problem, lambda device, lanes, **memory: fault(launcher, lanes, memory))
    assert find_mismatch(problem, wrong) is not None


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(("norms", "rotary"), [(True, True), (False, True), (True, False)])
def test_torch_attends_alike(norms: bool, rotary: bool, window: int | None) -> None:
    """The plain torch reference of the runners, in float32 as it is."""
    tokens = new_tokens(LAYOUT, DTYPES[0], [0, 50, 19], norms=norms, rotary=rotary, window=window)
    expected = attention.decode_case(tokens).expected["out"]
    after, operators = append(tokens), TorchOperators()
    for lane, row, position in tokens.used():
        query = torch.from_numpy(tokens.qkv[lane : lane + 1, : LAYOUT.q_size]).view(1, -1, LAYOUT.head_dim)
        if tokens.q_norm is not None:
            query = operators.rms_norm(query, torch.from_numpy(tokens.q_norm), EPS)
        if tokens.cos_sin is not None:
            cos, sin = torch.from_numpy(tokens.cos_sin[position]).unbind(-1)
            query = rotate(operators, query, cos, sin)
        begin = 0 if window is None else max(0, position + 1 - window)
        cached = (torch.from_numpy(of.elements[row, :, begin : position + 1]) for of in (after.keys, after.values))
        out = operators.attend(query, *cached, position - begin, window).numpy()[0].astype(np.float64)
        assert (np.abs(out - expected.values[lane]) <= expected.bound[lane] + 8 * ROUNDING).all()


@pytest.mark.parametrize("relative_error", [1e-6, 1e-3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_stored_lies_within_its_bound_of_every_right_number(
    dtype: np.dtype[Any], relative_error: float
) -> None:
    """Float32 vectors within the error, rounded as the cache does; nearly all bounds are 0 where that is small."""
    generator = np.random.default_rng(0)
    value = generator.normal(size=(50, 64))
    error = relative_error * np.abs(value)
    known = rounded(Estimate(value, error), dtype)
    for _ in range(20):
        other = stored((value + error * generator.uniform(-0.9, 0.9, value.shape)).astype(np.float32), dtype)
        off = np.abs(other.elements.astype(np.float64) - known.vectors.elements.astype(np.float64))
        if dtype == CODES:
            assert (off <= known.bound).all()
            assert (np.abs(other.scales - known.vectors.scales) <= known.scale_bound[..., 0]).all()
        else:
            assert (np.abs(other.values - known.vectors.values) <= known.bound).all()
        assert (np.abs(other.values - known.vectors.values) <= known.error).all()
    if dtype != np.float32 and relative_error == 1e-6:
        assert (known.bound == 0).mean() > 0.99


def test_a_span_holds_what_single_tokens_append() -> None:
    """Its own tokens are in the cache before it attends, in the places after the first."""
    before = new_tokens(LAYOUT, CODES, [20], norms=True, max_seq_len=32)
    span = in_cache(spans_of(before, [5]))
    (row,) = set(span.rows.tolist())
    single = before
    for lane, position in enumerate(span.positions.tolist()):
        single = replace(single, qkv=span.qkv[lane : lane + 1], positions=np.array([position], np.int32))
        after = append(single)
        single = replace(single, keys=after.keys, values=after.values)
    assert span.positions.tolist() == [20, 21, 22, 23, 24]
    assert single.keys.tobytes() == span.keys.tobytes()
    assert single.values.tobytes() == span.values.tobytes()
    assert np.isfinite(span.keys.values[row, :, :25]).all()
    assert np.isnan(span.keys.values[row, :, 25:]).all()


def test_unused_lanes_stay_as_they_are() -> None:
    tokens = with_unused_lanes(new_tokens(LAYOUT, DTYPES[0], [3, 7]))
    assert tokens.rows[[0, 3]].tolist() == [-1, -1]
    expected = attention.decode_case(tokens).expected["out"].values
    assert np.isnan(expected[[0, 3]]).all()
    assert np.isfinite(expected[[1, 2]]).all()
