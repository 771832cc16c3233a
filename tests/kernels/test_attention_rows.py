"""attention_rows: attention_decode's bits for many lanes, on any number of blocks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kv_codes import call_lane_by_lane
from test_attention_decode import BF16, F16, F32, LLAMA, among_unused, run, verify
from test_attention_decode_launch import Recorder, host

from llmcli.kernels.attention_rings import MAX_LANES, RowsPlan, attention_rows
from llmcli.kernels.device import Device
from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.kernels.qkv import QkvLayout
from llmcli.kernels.stage_wide import ImageRows
from llmcli.lab.attention import CODES, NewTokens, new_tokens

KINDS = pytest.mark.parametrize("dtype", [F16, BF16, CODES], ids=["fp16", "bf16", "codes"])
ALL_BLOCKS = 264


def assert_same(device: Device, problem: NewTokens, num_blocks: int = ALL_BLOCKS) -> None:
    """Output and cache have the bits of attention_decode, twice on one workspace."""
    expected = run(device, problem)[0]
    for result in run(device, problem, repeats=2, num_blocks=num_blocks):
        assert result.out.tobytes() == expected.out.tobytes()
        assert result.keys.tobytes() == expected.keys.tobytes()
        assert result.values.tobytes() == expected.values.tobytes()


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("head_dim", [8, 24, 40, 64, 80, 96, 112, 128, 192, 256])
def test_head_dims(device: Device, dtype: np.dtype, head_dim: int) -> None:
    problem = new_tokens(QkvLayout(6, 2, head_dim), dtype, [0, 1, 37, 300], norms=True)
    verify(problem, run(device, problem, num_blocks=ALL_BLOCKS)[0])
    assert_same(device, problem, 3)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("group", [1, 2, 5, 7, 8, 9, 16, 24])
def test_groups(device: Device, dtype: np.dtype, group: int) -> None:
    assert_same(device, new_tokens(QkvLayout(2 * group, 2, 64), dtype, [200, 5, 640]), 5)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("num_blocks", [1, 2, 7, 100, ALL_BLOCKS])
def test_rows_of_any_length_on_any_number_of_blocks(device: Device, dtype: np.dtype, num_blocks: int) -> None:
    """Rows of one tile and of 20 splits; more than eight splits are merged in turns, and blocks share long rows."""
    positions = [0, 1, 15, 16, 17, 2500, 127, 128, 129, 130, 255, 256, 257, 1023, 1024, 1025, 1152, 3, 64, 2047]
    assert_same(device, new_tokens(LLAMA, dtype, positions, norms=True, num_splits=25), num_blocks)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("num_splits", [1, 2, 5, 9])
def test_splits_longer_than_the_shortest(device: Device, dtype: np.dtype, num_splits: int) -> None:
    assert_same(device, new_tokens(LLAMA, dtype, [700, 2000, 40, 1300], num_splits=num_splits), 11)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("window", [1, 2, 16, 17, 100, 513, 5000])
def test_windows(device: Device, dtype: np.dtype, window: int) -> None:
    assert_same(device, new_tokens(LLAMA, dtype, [0, 1, 99, 100, 101, 700], window=window), 9)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("num_lanes", [9, 64, 255, MAX_LANES])
def test_many_lanes(device: Device, dtype: np.dtype, num_lanes: int) -> None:
    positions = np.random.default_rng(num_lanes).integers(0, 400, num_lanes).tolist()
    assert_same(device, new_tokens(LLAMA, dtype, positions, norms=True, shared_pages=0))


@pytest.mark.cuda
@KINDS
def test_shared_pages(device: Device, dtype: np.dtype) -> None:
    assert_same(device, new_tokens(LLAMA, dtype, [700, 300, 64, 129], norms=True, shared_pages=4), 13)


@pytest.mark.cuda
@KINDS
def test_unused_lanes_are_neither_read_nor_written(device: Device, dtype: np.dtype) -> None:
    used = new_tokens(LLAMA, dtype, [700, 0, 129], norms=True)
    assert_same(device, among_unused(used, [1, 2, 40], 70), 5)
    nobody = replace(used, rows=np.full(3, -1, np.int32))
    assert (run(device, nobody, num_blocks=5)[0].out.view(np.uint32) == 0xFFFFFFFF).all()


@pytest.mark.cuda
@KINDS
def test_ten_runs_are_equal(device: Device, dtype: np.dtype) -> None:
    problem = new_tokens(QkvLayout(8, 2, 128), dtype, [900, 300, 2000], norms=True, num_splits=20)
    first, *others = run(device, problem, repeats=10, num_blocks=ALL_BLOCKS)
    for other in others:
        for name in ("out", "keys", "values"):
            assert getattr(first, name).tobytes() == getattr(other, name).tobytes()


def call(device: Recorder, **changes: Any) -> None:
    arguments: dict[str, Any] = {
        "qkv": host((40, 768), F32),
        "layout": QkvLayout(8, 2, 64),
        "q_norm": None,
        "k_norm": None,
        "eps": 1e-5,
        "cos_sin": host((100, 32, 2), F32),
        "rows": host((40,), np.int32),
        "positions": host((40,), np.int32),
        "page_table": host((40, 7), np.int32),
        "keys": host((9, 2, 16, 64), F16),
        "values": host((9, 2, 16, 64), F16),
        "window": None,
        "partials": host((264, 4, 3, 68), F32),
        "counters": host((264,), np.uint32),
        "out": host((40, 512), F32),
    }
    call_lane_by_lane(attention_rows, device, {**arguments, **changes})


PARTS = host((3, 40, 768), F32)
IMAGE = host((128 * 512 * 2,), np.uint8)


def recorder(shared_bytes: int = TYPICAL_CARD.shared_bytes_per_block) -> Recorder:
    device = Recorder()
    device.num_multiprocessors = 132
    device.shared_bytes_per_block = shared_bytes
    return device


def test_the_grid_fills_the_card_and_never_exceeds_its_workspace() -> None:
    device = recorder()
    call(device)
    call(device, partials=host((20, 4, 3, 68), F32), counters=host((20,), np.uint32))
    assert [launch["grid"] for launch in device.launches] == [(264,), (20,)]
    assert all(launch["overlaps"] for launch in device.launches)


def test_outputs_in_an_image_and_parts_that_are_added() -> None:
    device = recorder()
    call(device, out=ImageRows(IMAGE, 3, 32), parts=PARTS)
    call(device)
    (image, is_float, units, first, parts, *sizes), (_, *plain) = (one["arguments"][-7:] for one in device.launches)
    assert (image is IMAGE, is_float, units, first, parts is PARTS, sizes) == (True, 0, 32, 3, True, [3, 40 * 768])
    assert plain == [1, 0, 0, None, 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({name: host((9, 2, 16, 64), F32) for name in ("keys", "values")}, "does not take"),
        ({"qkv": host((257, 768), F32)}, "takes 256 lanes at most, got 257"),
        ({"partials": host((264, 8, 3, 68), F32)}, r"partials is \[264, 8, 3, 68\], expected \[any, 4, 3, 68\]"),
        ({"counters": host((263,), np.uint32)}, r"counters is \[263\], expected \[264\]"),
        ({"window": 0}, "a window of 0 tokens"),
        ({"rows": host((3,), np.int32)}, r"rows is \[3\], expected \[40\]"),
        ({"parts": host((3, 39, 768), F32)}, r"parts is \[3, 39, 768\], expected \[any, 40, 768\]"),
        ({"out": ImageRows(IMAGE, 0, 16)}, r"units have 16 inputs, expected one of \(64, 128, 32\)"),
        ({"out": ImageRows(IMAGE, 100, 64)}, "out has 131072 bytes, expected 262144"),
        (
            {
                **{name: host((9, 1, 16, 64), F16) for name in ("keys", "values")},
                **{"layout": QkvLayout(3, 1, 64), "qkv": host((40, 320), F32), "out": ImageRows(IMAGE, 0, 64)},
            },
            "rows of 192 inputs, expected a multiple of 128",
        ),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(recorder(), **changes)


def test_a_block_needs_room_for_four_tiles() -> None:
    layout = QkvLayout(32, 8, 128)
    plan = RowsPlan(TYPICAL_CARD, layout, 2)
    assert (plan.num_blocks, plan.stages, plan.is_possible) == (264, 7, True)
    small = replace(TYPICAL_CARD, shared_bytes_per_block=99 * 1024)
    assert (RowsPlan(small, layout, 2).num_blocks, RowsPlan(small, layout, 2).is_possible) == (132, True)
    assert not RowsPlan(small, QkvLayout(128, 8, 128), 2).is_possible
    assert not RowsPlan(TYPICAL_CARD, layout, 4).is_possible
    for group_size, head_dim in ((1, 8), (4, 128), (8, 128), (2, 256), (8, 256), (16, 128), (24, 64)):
        plan = RowsPlan(TYPICAL_CARD, QkvLayout(group_size, 1, head_dim), 2)
        blocks = plan.num_blocks // TYPICAL_CARD.num_multiprocessors
        assert blocks * (plan.shared_bytes + 1024) <= TYPICAL_CARD.shared_bytes_per_block + 1024
