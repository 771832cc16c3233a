"""append_tokens bit by bit: it writes what attention_decode appends, lane by lane, and queries where asked to."""

from typing import Any

import numpy as np
import pytest
from kv_codes import call_lane_by_lane, lane_inputs, layer_cache, upload_cache
from right import assert_right
from test_attention_decode import KINDS, LLAMA, cupy_array, run
from test_attention_decode_launch import F32, Recorder, host

from llmcli.kernels.attention_decode import append_tokens, append_tokens_cost
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.attention import EPS, NewTokens, new_tokens, paged, visible_table, with_unused_lanes
from llmcli.lab.cases.attention import append_case


def append(device: Device, problem: NewTokens, rows: np.ndarray) -> list[Any]:
    """Keys and values, in pages, after one call."""
    caches = [upload_cache(paged(cache, problem.table)) for cache in (problem.keys, problem.values)]
    arrays = {
        "k_norm": problem.k_norm,
        "cos_sin": problem.cos_sin,
        "rows": rows,
        "positions": problem.positions,
        "page_table": visible_table(problem.table, problem.rows, problem.positions),
    }
    on_card = {name: None if array is None else cupy_array(array) for name, array in arrays.items()}
    given = {"qkv": cupy_array(problem.qkv), "layout": problem.layout, "eps": EPS, "cache": layer_cache(*caches)}
    append_tokens(device, lane_inputs(**given, **on_card))
    device.synchronize()
    for cache in caches:
        cache.check()
    return [cache.download() for cache in caches]


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("head_dim", [8, 24, 48, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize(("norms", "rotary"), [(False, True), (True, True), (True, False), (False, False)])
def test_bits_are_those_of_attention_decode(
    device: Device, dtype: np.dtype, head_dim: int, norms: bool, rotary: bool
) -> None:
    layout = QkvLayout(9, 3, head_dim)
    problem = new_tokens(layout, dtype, [0, 15, 16, 200], norms=norms, rotary=rotary, magnitude=3.0)
    expected = run(device, problem)[0]
    keys, values = append(device, problem, problem.rows)
    assert keys.tobytes() == expected.keys.tobytes()
    assert values.tobytes() == expected.values.tobytes()


@pytest.mark.cuda
@KINDS
def test_unused_lanes_append_nothing(device: Device, dtype: np.dtype) -> None:
    problem = new_tokens(LLAMA, dtype, [3, 70, 0], norms=True)
    expected = run(device, problem.only([1]))[0]
    rows = np.where(np.arange(3) == 1, problem.rows, -1).astype(np.int32)
    keys, values = append(device, problem, rows)
    assert keys.tobytes() == expected.keys.tobytes()
    assert values.tobytes() == expected.values.tobytes()


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("num_parts", [1, 3, 4, 7])
@pytest.mark.parametrize("head_dim", [24, 64, 128, 256])
def test_parts(device: Device, dtype: np.dtype, head_dim: int, num_parts: int) -> None:
    layout = QkvLayout(9, 3, head_dim)
    assert_right(
        device, append_case(with_unused_lanes(new_tokens(layout, dtype, [0, 15, 16, 200], norms=True)), num_parts)
    )
    assert_right(device, append_case(new_tokens(layout, dtype, [16], norms=True), num_parts))


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 128, 256])
@pytest.mark.parametrize(("norms", "rotates"), [(True, False), (False, True), (True, True)])
def test_queries(device: Device, dtype: np.dtype, head_dim: int, norms: bool, rotates: bool) -> None:
    tokens = new_tokens(QkvLayout(9, 3, head_dim), dtype, [0, 15, 16, 200], norms=True)
    for num_parts in (0, 3):
        assert_right(device, append_case(tokens, num_parts, norms_queries=norms, rotates_queries=rotates))


def call(device: Any, **changes: Any) -> None:
    arguments: dict[str, Any] = {
        "qkv": host((2, LLAMA.width), F32),
        "layout": LLAMA,
        "k_norm": None,
        "eps": EPS,
        "cos_sin": host((100, 32, 2), F32),
        "rows": host((2,), np.int32),
        "positions": host((2,), np.int32),
        "page_table": host((3, 7), np.int32),
        "keys": host((9, 2, 16, 64), np.float16),
        "values": host((9, 2, 16, 64), np.float16),
    }
    call_lane_by_lane(append_tokens, device, {**arguments, **changes})


def test_launch() -> None:
    recorder = Recorder()
    call(recorder)
    (launch,) = recorder.launches
    assert (launch["name"], launch["grid"], launch["overlaps"]) == ("append_tokens<__half, 64>", (2, 1), True)
    call(recorder, parts=host((3, 2, LLAMA.width), F32))
    assert recorder.launches[-1]["grid"] == (2, (2 * 2 + LLAMA.num_attention_heads) // 4)
    for changes, is_needed in (
        ({"norms_queries": True}, False),
        ({"norms_queries": True, "q_norm": host((64,), F32)}, True),
        ({"rotates_queries": True}, True),
        ({"rotates_queries": True, "cos_sin": None}, False),
        ({"q_norm": host((64,), F32)}, False),
    ):
        call(recorder, **changes)
        launch = recorder.launches[-1]
        assert launch["grid"] == (2, 3 if is_needed else 1)
        assert launch["arguments"][-1] == ("rotates_queries" in changes)
    one = {"qkv": host((1, LLAMA.width), F32), "parts": host((3, 1, LLAMA.width), F32)}
    call(recorder, **one, rows=host((1,), np.int32), positions=host((1,), np.int32))
    assert recorder.launches[-1]["arguments"][3] == LLAMA.width  # from one part to the next


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_norm": host((32,), F32)}, r"append_tokens: k_norm is \[32\], expected \[64\]"),
        ({"parts": host((3, 2, 64), F32)}, rf"parts is \[3, 2, 64\], expected \[any, 2, {LLAMA.width}\]"),
        ({"positions": host((3,), np.int32)}, r"positions is \[3\], expected \[2\]"),
        ({"page_table": host((3, 6), np.int32)}, "cos_sin has 100 positions, a row's pages have room for 96"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Recorder(), **changes)


def test_cost() -> None:
    cost = append_tokens_cost(10, QkvLayout(8, 2, 64), 2)
    assert (cost.read_bytes, cost.written_bytes) == (2 * 10 * 128 * 4, 2 * 10 * 128 * 2)
    parts = append_tokens_cost(10, QkvLayout(8, 2, 64), 2, num_parts=3)
    assert parts.read_bytes == 10 * (8 + 2 + 2) * 64 * 4 * (1 + 3)
    assert parts.written_bytes == cost.written_bytes + 10 * 8 * 64 * 4
    queries = append_tokens_cost(10, QkvLayout(8, 2, 64), 2, has_queries=True)
    assert queries.read_bytes == cost.read_bytes + 10 * 8 * 64 * 4
    assert queries.written_bytes == parts.written_bytes
    assert append_tokens_cost(10, QkvLayout(8, 2, 64), 1).written_bytes == 2 * 10 * (128 + 2 * 4)
