"""A layer of a decode step: references against torch, their bounds against faults, tiles, launches, least bytes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from llmcli.kernels.tiles import tile_layout
from llmcli.lab.catalogue import make_problem
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.problem import Problem, find_mismatch

HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
CACHE = {**HEADS, "position": 300}
ATTENTION = {"hidden_size": 208, **CACHE}
FLOATS = pytest.mark.parametrize("position", [0, 5, 300])


def tensor(problem: Problem, name: str, dtype: torch.dtype) -> Any:
    return torch.from_numpy(problem.inputs[name]).to(dtype)


def attend(problem: Problem, qkv: Any, lost_tokens: int = 0, is_turned: bool = True) -> dict[str, np.ndarray]:
    """Hugging Face's LlamaAttention of one token, from its projections to the input of o."""
    dtype, position = qkv.dtype, problem.sizes["position"]
    heads, kv_heads = (problem.sizes[name] for name in HEADS)
    query, key, value = qkv.reshape(-1, 128).split([heads, kv_heads, kv_heads])
    cosine, sine = tensor(problem, "cos_sin", dtype)[position].T.repeat(1, 2)

    def turn(x: Any) -> Any:
        return x * cosine + torch.cat((-x[:, 64:], x[:, :64]), dim=1) * sine if is_turned else x

    table = problem.inputs["page_table"][0]
    tokens = np.arange(position + 1)
    after, seen = {}, []
    for name, new in (("keys", turn(key)), ("values", value)):
        pages = problem.inputs[f"cached_{name}"].copy()
        pages[table[position // 16], :, position % 16] = new.to(torch.float16).numpy()
        after[name] = pages
        cached = pages[table[tokens // 16], :, tokens % 16]  # [tokens, kv_heads, 128]
        rows = torch.from_numpy(cached).to(dtype).transpose(0, 1).clone()
        if dtype == torch.float64:
            rows[:, -1] = new
        seen.append(rows.repeat_interleave(heads // kv_heads, dim=0)[:, lost_tokens:])
    mixed = torch.nn.functional.scaled_dot_product_attention(turn(query)[:, None], *seen)
    return {**after, "mixed": mixed.reshape(-1).numpy()}


def norm(inputs: Mapping[str, np.ndarray], dtype: torch.dtype) -> tuple[Any, Any]:
    """The hidden state, and it after LlamaRMSNorm."""
    hidden, weight = (torch.from_numpy(inputs[name]).to(dtype) for name in ("before", "norm_weight"))
    return hidden, torch.nn.functional.rms_norm(hidden, hidden.shape, weight, eps=float(np.float32(1e-5)))


def layer(problem: Problem, dtype: torch.dtype, **changed: np.ndarray) -> dict[str, np.ndarray]:
    """LlamaRMSNorm and LlamaAttention, with the residual."""
    inputs = {**problem.inputs, **changed}

    def weights(name: str) -> Any:
        codes, scales = (torch.from_numpy(inputs[f"{name}_{part}"]).to(dtype) for part in ("codes", "scales"))
        return (codes - 128) * scales[:, None]

    hidden, normed = norm(inputs, dtype)
    results = attend(problem, torch.cat([weights(name) @ normed for name in "qkv"]))
    return {**results, "hidden": (hidden + weights("o") @ torch.from_numpy(results["mixed"])).numpy()}


@FLOATS
def test_the_cache_s_reference_is_torch_s(position: int) -> None:
    problem = make_problem("decode_cache", {**HEADS, "position": position})
    mixed = attend(problem, tensor(problem, "qkv", torch.float64))["mixed"]
    np.testing.assert_allclose(problem.expected["mixed"].values, mixed, rtol=1e-10, atol=1e-12)


@FLOATS
def test_the_layer_s_reference_is_torch_s(position: int) -> None:
    problem = make_problem("decode_attention", {**ATTENTION, "position": position})
    hidden = layer(problem, torch.float64)["hidden"]
    np.testing.assert_allclose(problem.expected["hidden"].values, hidden, rtol=1e-10, atol=1e-12)


@FLOATS
def test_float32_is_right(position: int) -> None:
    cache = make_problem("decode_cache", {**HEADS, "position": position})
    assert find_mismatch(cache, attend(cache, tensor(cache, "qkv", torch.float32))) is None
    attention = make_problem("decode_attention", {**ATTENTION, "position": position})
    assert find_mismatch(attention, layer(attention, torch.float32)) is None


def test_a_lost_token_and_a_forgotten_turn_are_found() -> None:
    problem = make_problem("decode_cache", CACHE)
    qkv = tensor(problem, "qkv", torch.float32)
    right = attend(problem, qkv)
    lost = {**right, "mixed": attend(problem, qkv, lost_tokens=1)["mixed"]}
    assert str(find_mismatch(problem, lost)).startswith("mixed")
    straight = attend(problem, qkv, is_turned=False)
    assert str(find_mismatch(problem, {**right, "mixed": straight["mixed"]})).startswith("mixed")
    assert str(find_mismatch(problem, {**right, "keys": straight["keys"]})).startswith("keys")


def test_a_cache_without_the_new_token_or_with_another_changed_is_found() -> None:
    problem = make_problem("decode_cache", CACHE)
    right = attend(problem, tensor(problem, "qkv", torch.float32))
    assert find_mismatch(problem, {**right, "values": problem.inputs["cached_values"]}) is not None
    keys = right["keys"].copy()
    keys[problem.inputs["page_table"][0, 3], 1, 7, 5] *= np.float16(1.001)
    assert find_mismatch(problem, {**right, "keys": keys}) is not None


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
@pytest.mark.parametrize("sizes", [ATTENTION, {"hidden_size": 2064, **HEADS, "position": 700}])
def test_a_lost_pack_of_weights_is_found(name: str, sizes: dict[str, int]) -> None:
    """16 columns, as one load brings them, of one row of o, or of all rows of the others."""
    problem = make_problem("decode_attention", sizes)
    codes = problem.inputs[f"{name}_codes"].copy()
    codes[0 if name == "o" else slice(None), -16:] = 128
    assert find_mismatch(problem, layer(problem, torch.float32, **{f"{name}_codes": codes})) is not None


def test_the_parts_are_the_fused_matrix() -> None:
    inputs = make_problem("decode_attention", ATTENTION).inputs
    for part in ("codes", "scales"):
        assert np.array_equal(np.concatenate([inputs[f"{name}_{part}"] for name in "qkv"]), inputs[f"qkv_{part}"])


def test_what_no_token_fills_is_nan() -> None:
    """So a kernel that reads past the tokens is wrong."""
    inputs = make_problem("decode_cache", CACHE).inputs
    filled = inputs["cached_keys"][inputs["page_table"][0, 300 // 16]]
    assert np.isnan(filled[:, 300 % 16 :]).all()
    assert not np.isnan(filled[:, : 300 % 16]).any()


def test_the_engine_launches_attention_once() -> None:
    stems = {}
    for name, sizes in (("decode_attention", ATTENTION), ("decode_cache", CACHE)):
        problem = make_problem(name, sizes)
        for solver, solve in problem.solvers.items():
            notes: Any = Notes()
            solve(notes, phantoms_of(problem))
            stems[name, solver] = [launch.stem for launch in notes.launches]
    assert stems == {
        ("decode_attention", "llmcli"): ["stage_wide", "gemv", "attention_decode", "stage_wide", "gemv"],
        ("decode_attention", "attention"): ["attention_decode"],
        ("decode_cache", "llmcli"): ["attention_decode"],
    }


def test_the_least_bytes_are_weights_cache_and_hidden() -> None:
    problem = make_problem("decode_attention", ATTENTION)
    inputs = problem.inputs
    weights = sum(inputs[f"{name}_{part}"].nbytes for name in ("qkv", "o") for part in ("codes", "scales"))
    token = 2 * 2 * 128 * 2  # keys and values of two heads in halves
    assert problem.cost.read_bytes == weights + 300 * token + 2 * 208 * 4
    assert problem.cost.written_bytes == token + 208 * 4


MLP = {"hidden_size": 208, "intermediate_size": 1040}


def mlp(problem: Problem, dtype: torch.dtype, **changed: np.ndarray) -> Any:
    """Hugging Face's LlamaRMSNorm and LlamaMLP, with the halves as weights."""
    inputs = {**problem.inputs, **changed}
    gate, up, down = (torch.from_numpy(inputs[name]).to(dtype) for name in ("gate", "up", "down"))
    hidden, normed = norm(inputs, dtype)
    return (hidden + down @ (torch.nn.functional.silu(gate @ normed) * (up @ normed))).numpy()


def test_the_mlp_s_reference_is_torch_s() -> None:
    problem = make_problem("decode_mlp", MLP)
    np.testing.assert_allclose(problem.expected["hidden"].values, mlp(problem, torch.float64), rtol=1e-10, atol=1e-12)


def test_an_mlp_in_float32_is_right_and_a_norm_without_its_weight_is_not() -> None:
    problem = make_problem("decode_mlp", MLP)
    assert find_mismatch(problem, {"hidden": mlp(problem, torch.float32)}) is None
    ones = np.ones_like(problem.inputs["norm_weight"])
    assert find_mismatch(problem, {"hidden": mlp(problem, torch.float32, norm_weight=ones)}) is not None


@pytest.mark.parametrize("name", ["gate", "up", "down"])
@pytest.mark.parametrize("sizes", [MLP, {"hidden_size": 2096, "intermediate_size": 4240}])
def test_a_lost_pack_of_the_mlp_is_found(name: str, sizes: dict[str, int]) -> None:
    """Eight columns, as one load brings them, of one row of down, or of all rows of gate or of up."""
    problem = make_problem("decode_mlp", sizes)
    weights = problem.inputs[name].copy()
    weights[0 if name == "down" else slice(None), -8:] = 0
    assert find_mismatch(problem, {"hidden": mlp(problem, torch.float32, **{name: weights})}) is not None


def test_codes_are_the_halves() -> None:
    inputs = make_problem("decode_mlp", MLP).inputs
    for name in ("gate", "up", "down"):
        weights = (inputs[f"{name}_codes"].astype(np.float64) - 128) * inputs[f"{name}_scales"][:, None]
        assert np.array_equal(weights, inputs[name].astype(np.float64))


def test_tiles_have_eight_rows_of_gate_and_eight_of_up() -> None:
    inputs = make_problem("decode_mlp", MLP).inputs
    layout = tile_layout("int8", 2080, 208, None, "float32")
    assert inputs["gate_up_tiles"].shape == (layout.num_tiles, layout.num_units, 1024)
    row, column = np.indices((1040, 208))
    begin = (row % 8 * 4 + column % 64 // 16) * 16 + column % 16
    for name, half in (("gate", 0), ("up", 512)):
        assert np.array_equal(inputs["gate_up_tiles"][row // 8, column // 64, half + begin], inputs[f"{name}_codes"])
        scales = inputs["gate_up_tile_scales"][:, 0, half // 64 : half // 64 + 8]
        assert np.array_equal(scales.reshape(-1), inputs[f"{name}_scales"])


def test_the_engine_needs_two_products_for_an_mlp() -> None:
    problem, notes = make_problem("decode_mlp", MLP), Notes()
    problem.solvers["llmcli"](notes, phantoms_of(problem))  # type: ignore[arg-type]
    assert [launch.stem for launch in notes.launches] == ["stage_wide", "gemv", "gemv"]
    assert ["true" in launch.name for launch in notes.launches[1:]] == [True, False]  # SwiGLU
    assert [launch.arguments[-1].adds for launch in notes.launches[1:]] == [0, 1]
