"""attention_span: the bits of append_tokens and attention_decode for several tokens a row, in one launch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import COMPILER, EmulatedDevice, can_emulate, solve
from fenced import to_host
from kv_codes import lane_inputs
from test_attention_decode import BF16, F16, F32, LLAMA, run, verify

import llmcli.kernels.attention_rings as attention_span_launcher
from llmcli.kernels.attention_decode import PARTIAL_EXTRA, append_tokens, attention_decode, grid_heads, max_splits
from llmcli.kernels.attention_rings import MAX_SPAN, SpanPlan, attention_span
from llmcli.kernels.device import Device
from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.kernels.qkv import PAGE_TOKENS, QkvLayout
from llmcli.lab.attention import CODES, NewTokens, new_tokens, spans_of
from llmcli.lab.cases.attention import span_case
from llmcli.lab.problem import find_mismatch
from llmcli.runners.cuda.step.lanes import StepGraphs

KINDS = pytest.mark.parametrize("dtype", [F16, BF16, CODES], ids=["fp16", "bf16", "codes"])


def assert_same(device: Device, lanes: NewTokens, num_spans: int) -> None:
    """Output and cache have the bits of attention_decode after append_tokens, twice on one workspace."""
    expected = run(device, replace(lanes, is_cached=True))[0]
    for result in run(device, lanes, repeats=2, num_spans=num_spans):
        assert result.keys.tobytes() == expected.keys.tobytes()
        assert result.values.tobytes() == expected.values.tobytes()
        different = np.flatnonzero((result.out.view(np.uint32) != expected.out.view(np.uint32)).any(-1))
        assert not len(different), (different.tolist(), lanes.positions[different].tolist())


def check(
    device: Device,
    layout: QkvLayout,
    dtype: np.dtype,
    starts: list[int],
    lengths: list[int],
    window: int | None = None,
    num_splits: int = 3,
) -> None:
    longest = max(start + length for start, length in zip(starts, lengths, strict=True))
    problem = new_tokens(
        layout, dtype, starts, norms=True, window=window, num_splits=num_splits, max_seq_len=longest + 1
    )
    assert_same(device, spans_of(problem, lengths), len(starts))


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 112, 128])
@pytest.mark.parametrize("group", [1, 4])
def test_head_dims(device: Device, dtype: np.dtype, head_dim: int, group: int) -> None:
    check(device, QkvLayout(2 * group, 2, head_dim), dtype, [0, 13, 297], [8, 5, 8])


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 9, 16, 24])
def test_groups_whose_columns_fill_one_tile_or_several(device: Device, dtype: np.dtype, group: int) -> None:
    check(device, QkvLayout(2 * group, 2, 64), dtype, [250, 7], [8, 3])


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("length", range(1, MAX_SPAN + 1))
@pytest.mark.parametrize("start", [0, 120, 121, 127, 128, 380, 500, 1017])
def test_lengths_across_pages_and_splits(device: Device, dtype: np.dtype, start: int, length: int) -> None:
    for layout in (LLAMA, QkvLayout(3, 3, 128)):
        check(device, layout, dtype, [start], [length], num_splits=9)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("num_splits", [1, 2, 3])
@pytest.mark.parametrize("start", [505, 763, 764, 1020, 1530])
def test_splits_that_grow_between_two_tokens(device: Device, dtype: np.dtype, start: int, num_splits: int) -> None:
    for layout in (LLAMA, QkvLayout(3, 3, 64)):
        check(device, layout, dtype, [start], [8], num_splits=num_splits)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 100, 513, 5000])
def test_windows(device: Device, dtype: np.dtype, window: int) -> None:
    for start in (0, 11, 99, 700, 1021):
        check(device, LLAMA, dtype, [start], [8], window=window)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize(("window", "start", "num_splits"), [(130, 143, 3), (133, 143, 1), (514, 813, 16)])
def test_windows_that_leave_a_page_within_the_span(
    device: Device, dtype: np.dtype, window: int, start: int, num_splits: int
) -> None:
    """Splits of the later tokens begin a page later, so that an earlier split holds new tokens."""
    check(device, LLAMA, dtype, [start], [8], window=window, num_splits=num_splits)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("lengths", [[1] * 8, [4, 4], [1, 6, 1], [2, 1, 5], [8] * 4])
def test_spans_of_several_rows(device: Device, dtype: np.dtype, lengths: list[int]) -> None:
    starts = [300, 0, 129, 640, 15, 16, 17, 1000][: len(lengths)]
    check(device, LLAMA, dtype, starts, lengths, num_splits=5)


@pytest.mark.cuda
@KINDS
def test_unused_lanes_are_neither_read_nor_written(device: Device, dtype: np.dtype) -> None:
    used = spans_of(new_tokens(LLAMA, dtype, [700, 5], norms=True, max_seq_len=720), [3, 2])
    lanes = [1, 2, 3, 5, 6]
    qkv = np.full((9, LLAMA.width), np.nan, np.float32)
    rows, positions = np.full(9, -1, np.int32), np.full(9, 2**30, np.int32)
    qkv[lanes], rows[lanes], positions[lanes] = used.qkv, used.rows, used.positions
    assert_same(device, replace(used, qkv=qkv, rows=rows, positions=positions), 4)


@pytest.mark.cuda
@KINDS
def test_a_long_row(device: Device, dtype: np.dtype) -> None:
    """Each block goes around its ring of tiles many times."""
    for layout in (QkvLayout(2, 2, 128), QkvLayout(8, 2, 128)):
        check(device, layout, dtype, [9000], [8], num_splits=4)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("window", [None, 150])
def test_large_blocks_with_several_pieces(device: Device, dtype: np.dtype, window: int | None) -> None:
    """More splits than blocks: a block goes from head to head, and from row to row."""
    check(device, QkvLayout(64, 16, 64), dtype, [900, 1100, 3, 700], [8, 5, 8, 3], window=window, num_splits=7)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("start", [130, 260, 600, 2500])
def test_items_of_8_16_and_32_columns(device: Device, dtype: np.dtype, start: int) -> None:
    check(device, QkvLayout(32, 8, 128), dtype, [start], [8], num_splits=49)


@pytest.mark.cuda
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize(
    "layout", [QkvLayout(32, 8, 128), QkvLayout(8, 8, 128), QkvLayout(32, 8, 64)], ids=["8B", "own_keys", "1B"]
)
def test_launch_after_launch_in_a_graph_behind_32_000_tokens(device: Device, layout: QkvLayout, count: int) -> None:
    """Launches overlap on one workspace; each block goes through several splits, and many times around its ring."""
    import cupy

    depth, launches = 32_005, 20
    num_pages, num_splits = (depth + count) // PAGE_TOKENS + 1, max_splits(132, layout, 2, depth + count)
    heads, rng = layout.num_attention_heads, np.random.default_rng(0)
    shape = (num_pages, layout.num_key_value_heads, PAGE_TOKENS, layout.head_dim)
    keys, values = (cupy.random.standard_normal(shape, dtype=F32).astype(F16) for _ in range(2))
    given: dict[str, Any] = {
        "layout": layout,
        "eps": 1e-5,
        "qkv": cupy.asarray(rng.standard_normal((count, layout.width), F32)),
        "k_norm": None,
        "cos_sin": None,
        "rows": cupy.zeros(count, np.int32),
        "positions": cupy.asarray(np.arange(depth, depth + count, dtype=np.int32)),
        "page_table": cupy.asarray(rng.permutation(num_pages).astype(np.int32)[None]),
        "keys": keys,
        "values": values,
    }
    lanes = lane_inputs(**given)
    partials = cupy.empty((count, heads, num_splits, layout.head_dim + PARTIAL_EXTRA), F32)
    outs, expected = cupy.full((launches, count, layout.q_size), np.nan, F32), cupy.empty((count, layout.q_size), F32)
    counters = cupy.zeros((count, heads), np.uint32)
    of_decode = cupy.zeros((count, grid_heads(layout, 2)), np.uint32)

    def launch(_: int) -> None:
        for out in outs:
            attention_span(device, lanes, num_spans=1, partials=partials, counters=counters, out=out)

    graphs = StepGraphs(device, uses_graphs=True)
    for _ in range(3):
        graphs.start("spans", 0, launch)
    append_tokens(device, lanes)
    attention_decode(device, lanes, is_cached=True, partials=partials, counters=of_decode, out=expected)
    device.synchronize()
    bits = to_host(outs).view(np.uint32)
    assert [i for i in range(launches) if (bits[i] != to_host(expected).view(np.uint32)).any()] == []
    assert not to_host(counters).any()


@pytest.mark.skipif(not can_emulate(), reason=f"no {COMPILER} that knows _Float16 and ucontext.h")
def test_a_large_block_with_a_short_ring_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads run in a random order, and copies land late: some warps are a whole ring ahead of others."""
    monkeypatch.setattr(attention_span_launcher, "_MAX_SPAN_STAGES", 7)
    device = EmulatedDevice(tmp_path)
    device.is_late, device.num_multiprocessors = True, 1
    tokens = new_tokens(QkvLayout(4, 1, 64), F16, [700], num_splits=2, max_seq_len=708)
    problem = span_case(spans_of(tokens, [8]), 1)
    device.compile_for([problem])
    for device.seed in range(1, 6):
        assert find_mismatch(problem, solve(device, problem)) is None


@pytest.mark.skipif(not can_emulate(), reason=f"no {COMPILER} that knows _Float16 and ucontext.h")
@pytest.mark.parametrize(
    ("layout", "dtype", "window", "max_stages"),
    [(QkvLayout(8, 2, 32), F16, None, 8), (QkvLayout(8, 1, 64), CODES, 1150, 4)],
    ids=["fp16", "codes, a window, two tiles of columns a head"],
)
def test_large_blocks_share_out_the_parts_of_splits_on_the_cpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: QkvLayout,
    dtype: np.dtype,
    window: int | None,
    max_stages: int,
) -> None:
    """All blocks run at once, some slower than others. Up to 5 have parts of a head, and some have parts of three.

    After 1,280 tokens the splits of the new ones grow, without a window. The shorter row has so few that the last
    block joins them. The ring has room for 8 parts.
    """
    monkeypatch.setattr(attention_span_launcher, "_MAX_SPAN_STAGES", max_stages)
    device, bits = EmulatedDevice(tmp_path), set()
    tokens = new_tokens(layout, dtype, [130, 1276], window=window, num_splits=10, max_seq_len=1284)
    problem = span_case(spans_of(tokens, [3, 8]), 2)
    device.compile_for([problem])
    for device.num_multiprocessors in (1, 3, 10):
        outputs = solve(device, problem)  # counters among them
        assert find_mismatch(problem, outputs) is None
        bits.add(outputs["out"].tobytes())
    assert len(bits) == 1


def test_forms() -> None:
    """One multiprocessor has three small blocks or a large one, with room for their shared memory."""
    layout = QkvLayout(32, 8, 128)
    plan = SpanPlan(TYPICAL_CARD, layout, 2)
    assert [plan.form(lanes).columns for lanes in (1, 2, 3, 8)] == [8, 8, 32, 32]
    assert [SpanPlan(TYPICAL_CARD, QkvLayout(8, 8, 128), 2).form(lanes).columns for lanes in (1, 8)] == [8, 8]
    assert (plan.form(2).blocks, plan.form(8).blocks) == (3, 1)
    assert plan.num_blocks(plan.form(2), 2, 1, 49, 8) == 49 * 8  # a block for each split
    assert plan.num_blocks(plan.form(8), 8, 1, 49, 8) == TYPICAL_CARD.num_multiprocessors
    assert plan.num_blocks(plan.form(8), 8, 1, 2, 8) == 2 * 8 * 4
    for head_dim, columns in ((32, 32), (64, 32), (128, 32), (80, 8), (256, 8)):
        form = SpanPlan(TYPICAL_CARD, QkvLayout(8, 2, head_dim), 2).form(8)
        assert form.columns == columns
        assert columns == 8 or form.stages % 4 == 0  # four warps copy, each into its own stages
        assert form.blocks * (form.shared_bytes + 1024) <= TYPICAL_CARD.shared_bytes_per_block + 1024
    small = SpanPlan(replace(TYPICAL_CARD, shared_bytes_per_block=99 * 1024), layout, 2)
    assert (small.form(8).columns, small.is_possible) == (8, True)
    assert not SpanPlan(TYPICAL_CARD, layout, 4).is_possible


@pytest.mark.cuda
@KINDS
def test_against_float64(device: Device, dtype: np.dtype) -> None:
    problem = spans_of(new_tokens(LLAMA, dtype, [140], norms=True, max_seq_len=160), [8])
    verify(problem, run(device, problem, num_spans=1)[0])
