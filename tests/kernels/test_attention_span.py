"""attention_span: the bits of append_tokens and attention_decode for several tokens a row, in one launch."""

from dataclasses import replace

import numpy as np
import pytest
from test_attention_decode import BF16, F16, LLAMA, run, verify

from llmcli.kernels.attention_span import MAX_SPAN, SpanPlan
from llmcli.kernels.card_facts import TYPICAL_CARD
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.kv_cache import CODES
from llmcli.lab.new_tokens import NewTokens, new_tokens, spans_of

KINDS = pytest.mark.parametrize("dtype", [F16, BF16, CODES], ids=["fp16", "bf16", "codes"])


def assert_same(device: Device, lanes: NewTokens, num_spans: int) -> None:
    """Output and cache have the bits of attention_decode behind append_tokens, twice on one workspace."""
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
        assert form.blocks * (form.shared_bytes + 1024) <= TYPICAL_CARD.shared_bytes_per_block + 1024
    small = SpanPlan(replace(TYPICAL_CARD, shared_bytes_per_block=99 * 1024), layout, 2)
    assert (small.form(8).columns, small.is_possible) == (8, True)
    assert not SpanPlan(TYPICAL_CARD, layout, 4).is_possible


@pytest.mark.cuda
@KINDS
def test_against_float64(device: Device, dtype: np.dtype) -> None:
    problem = spans_of(new_tokens(LLAMA, dtype, [140], norms=True, max_seq_len=160), [8])
    verify(problem, run(device, problem, num_spans=1)[0])
