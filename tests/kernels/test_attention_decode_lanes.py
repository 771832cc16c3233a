"""attention_decode with rows in any pages, unused lanes, and several lanes of one row."""

from dataclasses import replace

import numpy as np
import pytest
from kv_codes import in_rows
from test_attention_decode import KINDS, LLAMA, among_unused, run, verify

from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.attention import new_tokens, page_table


@pytest.mark.cuda
@KINDS
def test_a_row_has_the_same_bits_in_any_pages(device: Device, dtype: np.dtype) -> None:
    problem = new_tokens(LLAMA, dtype, [700, 300, 64, 129], norms=True, shared_pages=4)
    first = run(device, problem)[0]
    verify(problem, first)
    moved = replace(problem, table=page_table(len(problem.table), problem.keys.elements.shape[2], seed=99))
    assert run(device, moved)[0].out.tobytes() == first.out.tobytes()


@pytest.mark.cuda
@KINDS
def test_what_the_window_has_left_is_not_seen(device: Device, dtype: np.dtype) -> None:
    """Tiles lie as pages do and begin before the window; NaN in front of it must not reach the sums."""
    problem = new_tokens(LLAMA, dtype, [200, 41, 5], window=23)
    expected = run(device, problem)[0].out
    for row, position in zip(problem.rows, problem.positions, strict=True):
        for cache in (problem.keys, problem.values):
            cache.poison((row, slice(None), slice(0, max(0, position + 1 - 23))))
    assert run(device, problem)[0].out.tobytes() == expected.tobytes()


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("is_cached", [False, True])
def test_unused_lanes_are_neither_read_nor_written(device: Device, dtype: np.dtype, is_cached: bool) -> None:
    used, lanes = replace(new_tokens(LLAMA, dtype, [700, 0, 129], norms=True), is_cached=is_cached), [1, 2, 4]
    expected = run(device, used)[0]
    for result in run(device, among_unused(used, lanes, 6), repeats=2):
        assert result.out[lanes].tobytes() == expected.out.tobytes()
        assert (result.out[[0, 3, 5]].view(np.uint32) == 0xFFFFFFFF).all()
        assert result.keys.tobytes() == expected.keys.tobytes()
        assert result.values.tobytes() == expected.values.tobytes()
    nobody = replace(used, rows=np.full(3, -1, np.int32))
    assert (run(device, nobody)[0].out.view(np.uint32) == 0xFFFFFFFF).all()


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("layout", [LLAMA, QkvLayout(16, 1, 128)], ids=["group of 4", "group of 16"])
def test_a_span_has_the_bits_of_single_steps(
    device: Device, dtype: np.dtype, layout: QkvLayout, window: int | None
) -> None:
    """Spans of 8, 1 and 3 tokens in one launch, across the end of a page; a split ends between two of the tokens."""
    starts, lengths = [125, 300, 6], [8, 1, 3]
    problem = new_tokens(layout, dtype, starts, norms=True, window=window, max_seq_len=320)
    generator = np.random.default_rng(3)
    qkv = generator.normal(size=(sum(lengths), layout.width)).astype(np.float32)
    rows = np.repeat(problem.rows, lengths)
    positions = np.concatenate([start + np.arange(length) for start, length in zip(starts, lengths, strict=True)])
    lanes = replace(problem, qkv=qkv, rows=rows, positions=positions.astype(np.int32))
    together = run(device, replace(lanes, is_cached=True))[0]
    seq_len = problem.keys.elements.shape[2]
    for lane in range(len(rows)):
        single = run(device, lanes.only([lane]))[0]
        assert together.out[lane].tobytes() == single.out.tobytes(), (int(rows[lane]), int(positions[lane]))
        keys, values = (in_rows(pages, problem.table, seq_len) for pages in (single.keys, single.values))
        lanes = replace(lanes, keys=keys, values=values)
    assert together.keys.tobytes() == single.keys.tobytes()
    assert together.values.tobytes() == single.values.tobytes()
