"""repack against the NumPy layout, bit by bit: every format, tail, alignment and placement."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fenced import fenced, to_host
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.kernels.repack import (
    NOT_FINITE,
    OUT_OF_RANGE,
    Segment,
    repack,
    repack_cost,
    repack_scales,
    repack_zero_points,
)
from llmcli.kernels.tiles import TiledMatrix, TileLayout, tile_layout
from llmcli.lab.cases.weights import repack_case
from llmcli.lab.matrices import DTYPES, StoredMatrix, random_matrix, tiles_of, to_storage
from llmcli.lab.problem import stored_values

SHAPES = [(16, 64), (1, 40), (35, 72), (40, 176), (100, 300), (33, 1001), (17, 7)]


def empty_matrix(layout: TileLayout) -> tuple[TiledMatrix, Any]:
    """A matrix of poison between canaries."""
    fence = fenced((layout.arena_bytes,), np.uint8)
    return layout.place(fence.array), fence


def shifted(array: np.ndarray, num_bytes: int) -> Any:
    """The bytes on the card, at an offset from an aligned address."""
    import cupy

    memory = cupy.zeros(array.nbytes + 16, dtype=np.uint8)
    memory[num_bytes : num_bytes + array.nbytes] = cupy.asarray(array)
    return memory[num_bytes : num_bytes + array.nbytes]


def fill(device: Device, stored: StoredMatrix, matrix: TiledMatrix, segment: Segment, shift: int = 0) -> int:
    """All tensors of a stored matrix into their segment; returns the flags."""
    import cupy

    flags = cupy.zeros(2, dtype=np.int32)  # the second: of the largest scale
    source = shifted(stored.source, shift)
    repack(device, source=source, source_type=stored.weight_type, segment=segment, matrix=matrix, flags=flags)
    group_size = stored.group_size
    if stored.scales is not None:
        scales = cupy.asarray(stored.scales)
        repack_scales(device, source=scales, group_size=group_size, segment=segment, matrix=matrix, flags=flags)
    if stored.zero_points is not None:
        packed = cupy.asarray(stored.packed_zero_points)
        repack_zero_points(device, source=packed, group_size=group_size, segment=segment, matrix=matrix)
    return int(to_host(flags)[0])


def assert_equal(matrix: TiledMatrix, expected: TiledMatrix, tiles: slice = slice(None)) -> None:
    for name in ("tiles", "scales", "zero_points"):
        have, want = getattr(matrix, name), getattr(expected, name)
        assert (have is None) == (want is None)
        if want is not None:
            bits = f"u{want.dtype.itemsize}"
            np.testing.assert_array_equal(to_host(have)[tiles].view(bits), want.view(bits), err_msg=name)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight_type", ["int8", "int4", "float16", "bfloat16", "float32"])
def test_weights(device: Device, weight_type: str, shape: tuple[int, int]) -> None:
    assert_right(device, repack_case(random_matrix(1, weight_type, *shape)))


@pytest.mark.cuda
@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("weight_type", ["int8", "int4", "bfloat16", "float32"])
def test_sources_of_any_alignment(device: Device, weight_type: str, shift: int) -> None:
    itemsize = {"bfloat16": 2, "float32": 4}.get(weight_type, 1)
    stored = random_matrix(2, weight_type, 20, 200)
    matrix, fence = empty_matrix(stored.layout)
    fill(device, stored, matrix, Segment(20), shift=-(-shift // itemsize) * itemsize)
    assert_equal(matrix, tiles_of(stored))
    fence.check()


@pytest.mark.cuda
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("scale_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("weight_type", "group_size"), [("int8", 32), ("int8", 96), ("int4", 64), ("int4", 256)])
def test_groups(device: Device, weight_type: str, group_size: int, scale_type: str, is_symmetric: bool) -> None:
    assert_right(device, repack_case(random_matrix(3, weight_type, 45, 1000, group_size, scale_type, is_symmetric)))


@pytest.mark.cuda
@pytest.mark.parametrize("weight_type", ["int8", "int4"])
@pytest.mark.parametrize("scale_type", ["float16", "bfloat16"])
@pytest.mark.parametrize("group_size", [128, 512, None])
def test_scales_of_codes_are_lifted(device: Device, weight_type: str, scale_type: str, group_size: int | None) -> None:
    stored = random_matrix(9, weight_type, 45, 1000, group_size, scale_type)
    assert stored.widening == "lifted"
    for exponent in (-12, 0, 9):
        assert stored.scales is not None
        scales = to_storage(np.ldexp(stored_values(stored.scales), exponent), stored.scales.dtype)
        assert_right(device, repack_case(replace(stored, scales=scales)))


@pytest.mark.cuda
@pytest.mark.parametrize("weight_type", ["int8", "int4"])
def test_one_asymmetric_group_a_row(device: Device, weight_type: str) -> None:
    assert_right(device, repack_case(random_matrix(4, weight_type, 20, 300, None, "float16", is_symmetric=False)))


@pytest.mark.cuda
def test_segments_beside_and_between_each_other(device: Device) -> None:
    parts = [random_matrix(seed, "int8", 40, 200, 32, "bfloat16") for seed in (5, 6)]
    layout = tile_layout("int8", 96, 200, 32, "bfloat16")
    matrix, fence = empty_matrix(layout)
    fill(device, parts[0], matrix, Segment(40))
    fill(device, parts[1], matrix, Segment(40, 6))
    assert_equal(matrix, tiles_of(parts[0]), slice(0, 3))
    assert_equal(matrix, tiles_of(parts[1]), slice(3, 6))
    fence.check()


@pytest.mark.cuda
@pytest.mark.parametrize(("weight_type", "is_symmetric"), [("int8", True), ("int4", False), ("bfloat16", True)])
def test_two_tensors_in_the_halves_of_tiles(device: Device, weight_type: str, is_symmetric: bool) -> None:
    """Five halves each, the last one padded: rows are eight of one tensor and eight of the other in turn."""
    form = (64, "bfloat16", is_symmetric) if weight_type != "bfloat16" else ()
    parts = [random_matrix(seed, weight_type, 37, 200, *form) for seed in (5, 6)]
    layout = tile_layout(weight_type, 80, 200, *form)
    matrix, fence = empty_matrix(layout)
    for first_half, part in enumerate(parts):
        fill(device, part, matrix, Segment(37, first_half, 2))
    fence.check()
    for first_half, part in enumerate(parts):
        alone = tiles_of(part)
        halves = slice(first_half, None, 2)
        np.testing.assert_array_equal(half_tiles(matrix.tiles)[halves], half_tiles(alone.tiles)[:5])
        for name in ("scales", "zero_points"):
            if getattr(alone, name) is not None:
                have, want = (half_groups(getattr(one, name)) for one in (matrix, alone))
                np.testing.assert_array_equal(have[halves], want[:5], err_msg=name)


def half_tiles(tiles: Any) -> np.ndarray:
    """Shapes: tiles [num_tiles, num_units, 1024]; result [2 * num_tiles, num_units, 512]."""
    bits = to_host(tiles)
    return np.asarray(bits.reshape(*bits.shape[:2], 2, 512).swapaxes(1, 2).reshape(-1, bits.shape[1], 512))


def half_groups(values: Any) -> np.ndarray:
    """Shapes: values [num_tiles, groups, 16]; result the same bits [2 * num_tiles, groups, 8]."""
    bits = to_host(values)
    bits = bits.view(f"u{bits.dtype.itemsize}")
    return np.asarray(bits.reshape(*bits.shape[:2], 2, 8).swapaxes(1, 2).reshape(-1, bits.shape[1], 8))


@pytest.mark.cuda
@pytest.mark.parametrize("target", sorted(DTYPES))
@pytest.mark.parametrize("source", sorted(DTYPES))
def test_conversions(device: Device, source: str, target: str) -> None:
    """Widening is exact, rounding goes to the nearest even, as torch does it."""
    import torch

    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    values = torch.randn(24, 72, generator=torch.Generator().manual_seed(7)).to(dtypes[source])
    converted = values.to(dtypes[target])
    bits = {"float32": torch.int32}
    stored = StoredMatrix(source, values.view(bits.get(source, torch.int16)).numpy().view(DTYPES[source]))
    expected = StoredMatrix(target, converted.view(bits.get(target, torch.int16)).numpy().view(DTYPES[target]))
    matrix, fence = empty_matrix(expected.layout)
    assert fill(device, stored, matrix, Segment(24)) == 0
    assert_equal(matrix, tiles_of(expected))
    fence.check()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("value", "source", "target", "flags"),
    [
        (np.nan, "float32", "float32", NOT_FINITE),
        (-np.inf, "float16", "float16", NOT_FINITE),
        (np.inf, "float32", "float16", NOT_FINITE),
        (1e6, "float32", "float16", OUT_OF_RANGE),
        (1e6, "float32", "float32", 0),
    ],
)
@pytest.mark.parametrize("place", [(0, 0), (19, 70)])
def test_flags(device: Device, value: float, source: str, target: str, flags: int, place: tuple[int, int]) -> None:
    values = np.ones((20, 71), DTYPES[source])
    values[place] = value
    matrix, _ = empty_matrix(tile_layout(target, 20, 71))
    assert fill(device, StoredMatrix(source, values), matrix, Segment(20)) == flags


@pytest.mark.cuda
def test_flags_of_scales(device: Device) -> None:
    stored = random_matrix(8, "int8", 20, 128, 64, "float16")
    assert stored.scales is not None
    stored.scales[19, 1] = np.nan
    matrix, _ = empty_matrix(stored.layout)
    assert fill(device, stored, matrix, Segment(20)) == NOT_FINITE


@pytest.mark.parametrize("segment", [Segment(0), Segment(17, 2), Segment(16, -1), Segment(17, 0, 2), Segment(1, 0, 0)])
def test_segments_outside_are_refused(segment: Segment) -> None:
    with pytest.raises(ValueError, match="does not lie in 2 tiles"):
        segment.check_fits(tile_layout("int8", 32, 64, None, "float32"))


def test_a_segment_alone_fills_whole_tiles_and_one_of_two_only_halves() -> None:
    assert [Segment(rows).num_halves for rows in (1, 16, 17)] == [2, 2, 4]
    assert [Segment(rows, 1, 2).num_halves for rows in (1, 16, 17)] == [1, 2, 3]


def test_cost() -> None:
    cost = repack_cost(source_type="int4", segment=Segment(20), layout=tile_layout("int4", 20, 100, None, "float32"))
    assert (cost.read_bytes, cost.written_bytes) == (20 * 52, 2 * 1024)
