"""attention_decode against float64: every stage in one call, its cache in pages, its splits and its batches."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from fenced import Fenced, assert_within, fenced, to_host
from kv_codes import in_rows, layer_cache, upload_cache

from llmcli.kernels.attention_decode import (
    PARTIAL_EXTRA,
    LaneInputs,
    append_tokens,
    attention_decode,
    attention_decode_cost,
    grid_heads,
    head_tile,
    max_splits,
)
from llmcli.kernels.attention_rings import RowsPlan, attention_rows, attention_span
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.attention import CODES, EPS, NewTokens, Stored, append, new_tokens, paged, visible_table

F32, F16, BF16 = (np.dtype(kind) for kind in (np.float32, np.float16, np.uint16))
KINDS = pytest.mark.parametrize("dtype", [F32, F16, BF16, CODES], ids=["fp32", "fp16", "bf16", "codes"])
LLAMA = QkvLayout(8, 2, 64)


@dataclass(frozen=True)
class Result:
    """Pages as the kernel leaves them."""

    out: np.ndarray
    keys: Stored
    values: Stored


def upload(array: np.ndarray) -> Fenced:
    fence = fenced(array.shape, array.dtype)
    fence.array[...] = cupy_array(array)
    return fence


def cupy_array(array: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(array)


def run(
    device: Device,
    problem: NewTokens,
    repeats: int = 1,
    num_blocks: int | None = None,
    num_spans: int | None = None,
) -> list[Result]:
    """Call the kernel `repeats` times on the same workspace, each time on a fresh cache; check everything around it.

    With `num_blocks` the kernel is attention_rows, on as many blocks at most; with `num_spans` it is attention_span.
    """
    layout, num_rows, itemsize = problem.layout, len(problem.rows), problem.keys.dtype.itemsize
    padded = np.full((num_rows, layout.width + 16), np.nan, np.float32)
    padded[:, : layout.width] = problem.qkv
    qkv = cupy_array(padded)
    unchanged = {
        name: array if array is None else upload(array)
        for name, array in (
            ("q_norm", problem.q_norm),
            ("k_norm", problem.k_norm),
            ("cos_sin", problem.cos_sin),
            ("rows", problem.rows),
            ("positions", problem.positions),
            ("page_table", visible_table(problem.table, problem.rows, problem.positions)),
        )
    }
    given = {name: None if fence is None else fence.array for name, fence in unchanged.items()}
    before = {name: None if array is None else to_host(array) for name, array in given.items()}
    how: dict[str, Any] = {"is_cached": problem.is_cached}
    if num_blocks is None:
        kernel = attention_decode
        if num_spans is not None:
            kernel, how = attention_span, {"num_spans": num_spans}
        heads = layout.num_attention_heads
        partials = fenced((num_rows, heads, problem.num_splits, layout.head_dim + PARTIAL_EXTRA), F32)
        of_row = grid_heads(layout, itemsize) if num_spans is None else heads
        counters = upload(np.zeros((num_rows, of_row), np.uint32))
    else:
        kernel, how = attention_rows, {}
        plan = RowsPlan(device, layout, itemsize)
        partials = fenced((num_blocks, *plan.partials_shape(problem.num_splits)[1:]), F32)
        counters = upload(np.zeros(num_blocks, np.uint32))
    results = []
    for _ in range(repeats):
        keys, values = (upload_cache(paged(cache, problem.table)) for cache in (problem.keys, problem.values))
        out = fenced((num_rows, layout.q_size), F32)
        device.synchronize()  # it reads the cache before earlier kernels end
        lanes = LaneInputs(
            qkv=qkv[:, : layout.width],
            layout=layout,
            eps=EPS,
            cache=layer_cache(keys, values),
            window=problem.window,
            **given,
        )
        if problem.is_cached:
            append_tokens(device, lanes)
        kernel(device, lanes, partials=partials.array, counters=counters.array, out=out.array, **how)
        device.synchronize()
        for fence in (keys, values, out, partials, counters):
            fence.check()
        assert not to_host(counters.array).any(), "counters must be ready for the next launch"
        results.append(Result(to_host(out.array), keys.download(), values.download()))
    np.testing.assert_array_equal(to_host(qkv), padded)
    for name, fence in unchanged.items():
        if fence is not None:
            fence.check()
            np.testing.assert_array_equal(to_host(fence.array), before[name])
    return results


def verify(problem: NewTokens, result: Result) -> None:
    """The appended token against float64, the rest of the cache against what it was, the output against float64.

    The expected output uses the appended keys, whichever way they were rounded.
    """
    expected, query = append(problem), problem.query()
    keys, values = expected.keys.copy(), expected.values
    actual = in_rows(result.keys, problem.table, keys.elements.shape[2])
    for _, row, position in problem.used():
        place = (row, slice(None), position)
        appended = actual[place]
        assert_within(appended.values, expected.keys[place].values, expected.key_error[place])
        keys[place] = appended
    assert result.keys.tobytes() == paged(keys, problem.table).tobytes()
    assert result.values.tobytes() == paged(values, problem.table).tobytes()
    for lane, row, _ in problem.used():
        out = problem.attention(lane, query, keys[row,], values[row,])
        assert_within(result.out[lane : lane + 1], out.value, out.error)


def among_unused(problem: NewTokens, lanes: list[int], count: int) -> NewTokens:
    """The problem in some of `count` lanes; the others have no row."""
    qkv = np.full((count, problem.layout.width), np.nan, np.float32)
    rows, positions = np.full(count, -1, np.int32), np.full(count, 2**30, np.int32)
    qkv[lanes], rows[lanes], positions[lanes] = problem.qkv, problem.rows, problem.positions
    return replace(problem, qkv=qkv, rows=rows, positions=positions)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256])
def test_head_dims(device: Device, dtype: np.dtype, head_dim: int) -> None:
    problem = new_tokens(QkvLayout(6, 2, head_dim), dtype, [0, 1, 37, 300], norms=True)
    verify(problem, run(device, problem)[0])


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize(
    "layout",
    [
        QkvLayout(group * kv_heads, kv_heads, 64)
        for group, kv_heads in ((1, 3), (2, 1), (7, 2), (8, 2), (9, 1), (16, 2), (24, 1))
    ],
    ids=lambda layout: f"{layout.num_attention_heads}-{layout.num_key_value_heads}",
)
def test_groups(device: Device, dtype: np.dtype, layout: QkvLayout) -> None:
    problem = new_tokens(layout, dtype, [200, 5])
    verify(problem, run(device, problem)[0])


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize(("norms", "rotary"), [(False, True), (True, True), (True, False), (False, False)])
def test_norms_and_rotary(device: Device, dtype: np.dtype, norms: bool, rotary: bool) -> None:
    problem = new_tokens(LLAMA, dtype, [0, 130], norms=norms, rotary=rotary, magnitude=3.0)
    verify(problem, run(device, problem)[0])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [F32, BF16, CODES], ids=["fp32", "bf16", "codes"])
@pytest.mark.parametrize("num_splits", [1, 2, 5, 33])
def test_split_edges(device: Device, dtype: np.dtype, num_splits: int) -> None:
    positions = [15, 16, 17, 63, 64, 65, 127, 128]
    verify(first := new_tokens(LLAMA, dtype, positions, num_splits=num_splits), run(device, first)[0])
    positions = [129, 255, 256, 257, 511, 640, 641, 1000]
    verify(second := new_tokens(LLAMA, dtype, positions, num_splits=num_splits), run(device, second)[0])


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("window", [1, 2, 7, 16, 17, 100, 513, 5000])
def test_windows(device: Device, dtype: np.dtype, window: int) -> None:
    problem = new_tokens(LLAMA, dtype, [0, 1, 99, 100, 101, 700], window=window)
    verify(problem, run(device, problem)[0])


@pytest.mark.cuda
@KINDS
def test_long_rows(device: Device, dtype: np.dtype) -> None:
    problem = new_tokens(QkvLayout(4, 1, 128), dtype, [4095, 2500], num_splits=50, max_seq_len=4096)
    verify(problem, run(device, problem)[0])


@pytest.mark.cuda
@KINDS
def test_large_scores_and_outliers(device: Device, dtype: np.dtype) -> None:
    problem = new_tokens(LLAMA, dtype, [260, 300], magnitude=8.0)
    problem.qkv[0, 5] = 300.0  # one dimension that drowns the others
    problem.qkv[1] = 0.0  # all weights equal
    verify(problem, run(device, problem)[0])


@pytest.mark.cuda
@KINDS
def test_a_row_has_the_same_bits_alone_and_in_any_batch(device: Device, dtype: np.dtype) -> None:
    problem = new_tokens(LLAMA, dtype, [700, 0, 128, 129, 300, 15, 511, 640], norms=True)
    together = run(device, problem)[0].out
    for batch in ([0], [3], [7], [4, 0], [6, 5, 1], [0, 1, 2, 3], [7, 6, 5, 4, 3, 2, 1]):
        alone = run(device, problem.only(batch))[0].out
        assert alone.tobytes() == together[batch].tobytes(), batch


@pytest.mark.cuda
@KINDS
def test_ten_runs_are_equal(device: Device, dtype: np.dtype) -> None:
    problem = new_tokens(QkvLayout(8, 8, 128), dtype, [900, 300], norms=True, num_splits=7)
    first, *others = run(device, problem, repeats=10)
    for other in others:
        for name in ("out", "keys", "values"):
            assert getattr(first, name).tobytes() == getattr(other, name).tobytes()


def test_splits_fill_the_card_once_and_are_not_small() -> None:
    assert max_splits(132, QkvLayout(32, 8, 128), 2, 32768) == 3 * (132 // 8)
    assert max_splits(132, QkvLayout(32, 8, 128), 2, 512) == 4
    assert max_splits(132, QkvLayout(32, 32, 128), 2, 32768) == 12
    assert max_splits(132, QkvLayout(8, 1, 64), 2, 1 << 20) == 256
    assert max_splits(28, QkvLayout(64, 64, 256), 2, 4096) == 1
    assert max_splits(132, QkvLayout(32, 8, 128), 1, 32768) == 4 * (132 // 8)
    assert max_splits(28, QkvLayout(32, 32, 128), 2, 32768) == 3 * 28 // 32


def test_groups_wider_than_a_tile_take_several() -> None:
    assert [head_tile(QkvLayout(group, 1, 128), 2) for group in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 16]
    assert grid_heads(QkvLayout(34, 2, 128), 2) == 4
    assert grid_heads(QkvLayout(32, 2, 256), 2) == 4
    assert grid_heads(QkvLayout(12, 2, 64), 4) == 4
    assert grid_heads(QkvLayout(12, 2, 136), 4) == 6


def test_cost_counts_keys_and_values_once_for_a_group() -> None:
    cost = attention_decode_cost([32769], QkvLayout(32, 8, 128), 2)
    assert cost.read_bytes == 2 * 8 * 32768 * 128 * 2 + 4 * (32 + 8 + 8) * 128
    assert cost.flops == 4 * 32769 * 32 * 128
    codes = attention_decode_cost([32769], QkvLayout(32, 8, 128), 1)
    assert codes.read_bytes == 2 * 8 * 32768 * (128 + 4) + 4 * (32 + 8 + 8) * 128
    assert codes.written_bytes == 2 * 32 * 128 + 2 * 8 * (128 + 4)
    added = attention_decode_cost([32769], QkvLayout(32, 8, 128), 1, num_parts=3)
    assert added.read_bytes - codes.read_bytes == 3 * 4 * (32 + 8 + 8) * 128
