"""attention_decode against float64: every stage in one call, its cache in pages, its splits and its batches."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from fenced import Fenced, assert_within, fenced, to_host
from kv_codes import cache_arguments, upload_cache

from llmcli.kernels.append_tokens import append_tokens
from llmcli.kernels.attention_decode import (
    PARTIAL_EXTRA,
    attention_decode,
    attention_decode_cost,
    grid_heads,
    head_tile,
    max_splits,
)
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab import attention as reference
from llmcli.lab.bounds import sum_bound
from llmcli.lab.kv_cache import CODES, Stored, in_rows, page_table, paged, share_pages, stored, visible_table

F32, F16, BF16 = (np.dtype(kind) for kind in (np.float32, np.float16, np.uint16))
KINDS = pytest.mark.parametrize("dtype", [F32, F16, BF16, CODES], ids=["fp32", "fp16", "bf16", "codes"])
EPS = 1e-5
LLAMA = QkvLayout(8, 2, 64)


@dataclass(frozen=True)
class Problem:
    """One call's inputs on the host; lane i has the row `rows[i]`, whose tokens `keys` and `values` hold in order.

    With `is_cached` append_tokens appends them in a launch of its own.
    """

    layout: QkvLayout
    qkv: np.ndarray
    q_norm: np.ndarray | None
    k_norm: np.ndarray | None
    cos_sin: np.ndarray | None
    rows: np.ndarray
    positions: np.ndarray
    keys: Stored
    values: Stored
    window: int | None
    num_splits: int
    table: np.ndarray
    is_cached: bool = False

    def only(self, batch: list[int]) -> "Problem":
        """The same cache with some of the lanes."""
        return replace(self, qkv=self.qkv[batch], rows=self.rows[batch], positions=self.positions[batch])


def make(
    layout: QkvLayout,
    dtype: np.dtype,
    positions: list[int],
    *,
    window: int | None = None,
    norms: bool = False,
    rotary: bool = True,
    num_splits: int = 3,
    max_seq_len: int | None = None,
    magnitude: float = 1.0,
    shared_pages: int = 0,
) -> Problem:
    """Normal values; whatever no token of a row may see yet is NaN. All rows begin with as many `shared_pages`."""
    generator = np.random.default_rng(len(positions) + layout.head_dim)
    num_rows = len(positions) + 1
    max_seq_len = max_seq_len or max(positions) + 1
    head_dim = layout.head_dim
    rows = generator.permutation(num_rows)[: len(positions)].astype(np.int32)
    shape = (num_rows, layout.num_key_value_heads, max_seq_len, head_dim)
    keys, values = (stored(generator.normal(size=shape), dtype) for _ in range(2))
    table = page_table(num_rows, max_seq_len, len(positions))
    for cache in (keys, values):
        share_pages(cache, table, rows.tolist(), shared_pages)
    for row, position in zip(rows, positions, strict=True):
        for cache in (keys, values):
            cache.poison((row, slice(None), slice(position, None)))
    weights = generator.uniform(0.5, 2.0, (2, head_dim)).astype(np.float32)
    return Problem(
        layout,
        (magnitude * generator.normal(size=(len(positions), layout.width))).astype(np.float32),
        weights[0] if norms else None,
        weights[1] if norms else None,
        reference.cos_sin_table(max_seq_len, head_dim) if rotary else None,
        rows,
        np.array(positions, np.int32),
        keys,
        values,
        window,
        num_splits,
        table,
    )


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


def run(device: Device, problem: Problem, repeats: int = 1) -> list[Result]:
    """Call the kernel `repeats` times on the same workspace, each time on a fresh cache; check everything around it."""
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
    partials = fenced((num_rows, layout.num_attention_heads, problem.num_splits, layout.head_dim + PARTIAL_EXTRA), F32)
    counters = upload(np.zeros((num_rows, grid_heads(layout, itemsize)), np.uint32))
    results = []
    for _ in range(repeats):
        keys, values = (upload_cache(paged(cache, problem.table)) for cache in (problem.keys, problem.values))
        out = fenced((num_rows, layout.q_size), F32)
        device.synchronize()  # it reads the cache before the kernels in front of it have ended
        if problem.is_cached:
            appended = {name: array for name, array in given.items() if name != "q_norm"}
            append_tokens(
                device,
                qkv=qkv[:, : layout.width],
                layout=layout,
                eps=EPS,
                **cache_arguments(keys, values),
                **appended,
            )
        attention_decode(
            device,
            qkv=qkv[:, : layout.width],
            layout=layout,
            eps=EPS,
            **cache_arguments(keys, values),
            window=problem.window,
            is_cached=problem.is_cached,
            partials=partials.array,
            counters=counters.array,
            out=out.array,
            **given,
        )
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


def heads(x: np.ndarray, head_dim: int) -> reference.Estimate:
    return reference.exact(x.reshape(len(x), -1, head_dim))


def verify(problem: Problem, result: Result) -> None:
    """The appended token against float64, the rest of the cache against what it was, the output against float64."""
    layout, dtype, positions = problem.layout, problem.keys.dtype, problem.positions
    head_dim = layout.head_dim
    query = heads(problem.qkv[:, : layout.q_size], head_dim)
    key = heads(problem.qkv[:, layout.k_offset : layout.k_offset + layout.kv_size], head_dim)
    value = problem.qkv[:, layout.v_offset : layout.v_offset + layout.kv_size]
    if problem.q_norm is not None and problem.k_norm is not None:
        query = reference.normalize(query, problem.q_norm, EPS)
        key = reference.normalize(key, problem.k_norm, EPS)
    if problem.cos_sin is not None:
        query = reference.rotate(query, problem.cos_sin, positions)
        key = reference.rotate(key, problem.cos_sin, positions)

    expected_keys, expected_values = problem.keys.copy(), problem.values.copy()
    seq_len = expected_keys.elements.shape[2]
    keys, values = (in_rows(pages, problem.table, seq_len) for pages in (result.keys, result.values))
    for index, (row, position) in enumerate(zip(problem.rows, positions, strict=True)):
        appended = keys[row, :, position]
        assert_within(appended.values, key.value[index], rounding_bound(key.value[index], key.error[index], dtype))
        expected_keys[row, :, position] = appended
        expected_values[row, :, position] = stored(value[index].reshape(-1, head_dim), dtype)
    assert result.keys.tobytes() == paged(expected_keys, problem.table).tobytes()
    assert result.values.tobytes() == paged(expected_values, problem.table).tobytes()

    for index, (row, position) in enumerate(zip(problem.rows, positions, strict=True)):
        seen = slice(0, position + 1)
        expected = reference.attend(
            reference.Estimate(query.value[index : index + 1], query.error[index : index + 1]),
            keys[row, :, seen].values,
            values[row, :, seen].values,
            positions[index : index + 1],
            problem.window,
            query_error=reference.SPLIT[dtype],
            query_floor=reference.FLOOR[dtype],
            weight_error=reference.SPLIT[dtype],
            tensor_cores=dtype != F32,
            value_scales=values[row, :, seen].scales,
        )
        assert_within(result.out[index : index + 1], expected.value, expected.error)


def rounding_bound(x: np.ndarray, error: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """How far a stored vector may be from x, which is itself known within `error`."""
    if dtype != CODES:
        return sum_bound(x, np.zeros(1), 1, dtype) / 2 + error
    # Half a step; the scale and what is multiplied with it are each rounded twice.
    step = (np.abs(x) + error).max(-1, keepdims=True) / 127
    return step / 2 + error + 4 * reference.U32 * (np.abs(x) + step)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256])
def test_head_dims(device: Device, dtype: np.dtype, head_dim: int) -> None:
    problem = make(QkvLayout(6, 2, head_dim), dtype, [0, 1, 37, 300], norms=True)
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
    problem = make(layout, dtype, [200, 5])
    verify(problem, run(device, problem)[0])


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize(("norms", "rotary"), [(False, True), (True, True), (True, False), (False, False)])
def test_norms_and_rotary(device: Device, dtype: np.dtype, norms: bool, rotary: bool) -> None:
    problem = make(LLAMA, dtype, [0, 130], norms=norms, rotary=rotary, magnitude=3.0)
    verify(problem, run(device, problem)[0])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [F32, BF16, CODES], ids=["fp32", "bf16", "codes"])
@pytest.mark.parametrize("num_splits", [1, 2, 5, 33])
def test_split_edges(device: Device, dtype: np.dtype, num_splits: int) -> None:
    positions = [15, 16, 17, 63, 64, 65, 127, 128]
    verify(first := make(LLAMA, dtype, positions, num_splits=num_splits), run(device, first)[0])
    positions = [129, 255, 256, 257, 511, 640, 641, 1000]
    verify(second := make(LLAMA, dtype, positions, num_splits=num_splits), run(device, second)[0])


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("window", [1, 2, 7, 16, 17, 100, 513, 5000])
def test_windows(device: Device, dtype: np.dtype, window: int) -> None:
    problem = make(LLAMA, dtype, [0, 1, 99, 100, 101, 700], window=window)
    verify(problem, run(device, problem)[0])


@pytest.mark.cuda
@KINDS
def test_long_rows(device: Device, dtype: np.dtype) -> None:
    problem = make(QkvLayout(4, 1, 128), dtype, [4095, 2500], num_splits=50, max_seq_len=4096)
    verify(problem, run(device, problem)[0])


@pytest.mark.cuda
@KINDS
def test_large_scores_and_outliers(device: Device, dtype: np.dtype) -> None:
    problem = make(LLAMA, dtype, [260, 300], magnitude=8.0)
    problem.qkv[0, 5] = 300.0  # one dimension that drowns the others
    problem.qkv[1] = 0.0  # all weights equal
    verify(problem, run(device, problem)[0])


@pytest.mark.cuda
@KINDS
def test_a_row_has_the_same_bits_alone_and_in_any_batch(device: Device, dtype: np.dtype) -> None:
    problem = make(LLAMA, dtype, [700, 0, 128, 129, 300, 15, 511, 640], norms=True)
    together = run(device, problem)[0].out
    for batch in ([0], [3], [7], [4, 0], [6, 5, 1], [0, 1, 2, 3], [7, 6, 5, 4, 3, 2, 1]):
        alone = run(device, problem.only(batch))[0].out
        assert alone.tobytes() == together[batch].tobytes(), batch


@pytest.mark.cuda
@KINDS
def test_ten_runs_are_equal(device: Device, dtype: np.dtype) -> None:
    problem = make(QkvLayout(8, 8, 128), dtype, [900, 300], norms=True, num_splits=7)
    first, *others = run(device, problem, repeats=10)
    for other in others:
        for name in ("out", "keys", "values"):
            assert getattr(first, name).tobytes() == getattr(other, name).tobytes()


def test_splits_fill_the_card_once_and_are_not_small() -> None:
    assert max_splits(132, QkvLayout(32, 8, 128), 2, 32768) == 3 * 132 // 8
    assert max_splits(132, QkvLayout(32, 8, 128), 2, 512) == 4
    assert max_splits(132, QkvLayout(32, 32, 128), 2, 32768) == 12
    assert max_splits(132, QkvLayout(8, 1, 64), 2, 1 << 20) == 256
    assert max_splits(28, QkvLayout(64, 64, 256), 2, 4096) == 1
    assert max_splits(132, QkvLayout(32, 8, 128), 1, 32768) == 4 * 132 // 8


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
    assert codes.written_bytes == 4 * 32 * 128 + 2 * 8 * (128 + 4)
