"""gemv against float64 of the stored weights: formats, groups, norm, bias, epilogues; independent rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fenced import Fenced, assert_within, fenced, to_host
from uploaded import upload

from llmcli.errors import KernelCompileError
from llmcli.kernels.compiler import compile_kernels
from llmcli.kernels.device import Device
from llmcli.kernels.gemv import (
    STATIC_SHARED_BYTES,
    Epilogue,
    gemv,
    gemv_cost,
    gemv_name,
    plan_gemv,
    plan_passes,
)
from llmcli.kernels.sources import flatten
from llmcli.kernels.tiles import TileLayout, tile_layout
from llmcli.lab.cases.gemv import EPS, FORMATS, Case, make_case, swiglu_of_tiles
from llmcli.lab.matrices import random_matrix, tiles_of
from llmcli.lab.problem import ROUNDING


def run(
    device: Device, case: Case, epilogue: Epilogue = "store", rows: slice = slice(None), num_outputs: int | None = None
) -> Fenced:
    """The kernel's output for some rows, x at a distance and out between canaries."""
    import cupy

    x = cupy.full((len(case.x), case.x.shape[1] + 12), np.nan, dtype=np.float32)
    x[:, : case.x.shape[1]] = cupy.asarray(case.x)
    x = x[rows, : case.x.shape[1]]
    result = fenced((x.shape[0], num_outputs or case.stored.values.shape[0]), np.float32)
    if epilogue == "add":
        assert case.before is not None
        result.array[...] = cupy.asarray(case.before[rows])
    matrix = upload(tiles_of(case.stored))
    device.synchronize()  # gemv reads weights before earlier kernels end
    gemv(
        device,
        matrix=matrix,
        x=x,
        out=result.array,
        norm_weight=None if case.norm_weight is None else cupy.asarray(case.norm_weight),
        eps=EPS,
        bias=None if case.bias is None else cupy.asarray(case.bias),
        epilogue=epilogue,
    )
    device.synchronize()
    result.check()
    return result


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
@pytest.mark.parametrize("num_inputs", [384, 14336])
def test_scales_of_blocks_give_the_bits_of_a_scale_for_each_row(device: Device, num_rows: int, num_inputs: int) -> None:
    blocks = random_matrix(7, "fp8", 296, num_inputs, 128, "block")
    assert blocks.scales is not None
    rows = replace(blocks, scale_type="float32", scales=blocks.scales.repeat(8, axis=0))
    cases = [make_case(stored, num_rows) for stored in (blocks, rows)]
    of_blocks, of_rows = (to_host(run(device, case).array) for case in cases)
    assert np.array_equal(of_blocks.view(np.int32), of_rows.view(np.int32))


FORMAT_IDS = ["-".join(str(value) for value in form.values()) for form in FORMATS]


@pytest.mark.cuda
@pytest.mark.parametrize(("num_rows", "num_inputs"), [(16, 40), (35, 72), (48, 176), (100, 1001), (40, 2304)])
@pytest.mark.parametrize("form", FORMATS, ids=FORMAT_IDS)
def test_formats_and_tails(device: Device, form: dict[str, Any], num_rows: int, num_inputs: int) -> None:
    case = make_case(random_matrix(num_inputs, num_rows=num_rows, num_inputs=num_inputs, **form), num_rows=1)
    assert_within(run(device, case).array, *case.product())


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMATS, ids=FORMAT_IDS)
def test_a_row_ignores_the_others(device: Device, form: dict[str, Any]) -> None:
    """Eight rows are right, and each has the bits that it has in every smaller batch: one, three, five rows."""
    case = make_case(random_matrix(1, num_rows=40, num_inputs=600, **form), num_rows=8, has_norm=True)
    batch = run(device, case).array
    assert_within(batch, *case.product())
    together = to_host(batch).view(np.uint32)
    for size in (1, 3, 5):
        for begin in range(0, 8, size):
            alone = to_host(run(device, case, rows=slice(begin, begin + size)).array).view(np.uint32)
            np.testing.assert_array_equal(alone, together[begin : begin + size])


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", [2, 4, 8, 11])
@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[1], FORMATS[11], FORMATS[12], FORMATS[15], FORMATS[16]])
def test_every_epilogue(device: Device, form: dict[str, Any], num_rows: int) -> None:
    stored = random_matrix(2, num_rows=96, num_inputs=320, **form)
    case = make_case(stored, num_rows, has_norm=True, has_bias=True)
    y, bound = case.product()
    assert_within(run(device, case).array, y, bound)

    case.before = np.random.default_rng(3).standard_normal((num_rows, 96)).astype(np.float32)
    total = case.before + y
    assert_within(run(device, case, "add").array, total, bound + 2 * ROUNDING * np.abs(total))

    # 44 columns leave the last tile half used.
    expected, error = swiglu_of_tiles(y, bound, 44)
    assert_within(run(device, case, "swiglu", num_outputs=44).array, expected, error)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("form", "num_inputs", "num_rows"), [(FORMATS[0], 11008, 1), (FORMATS[1], 11008, 8), (FORMATS[8], 14336, 8)]
)
def test_long_rows(device: Device, form: dict[str, Any], num_inputs: int, num_rows: int) -> None:
    case = make_case(random_matrix(3, num_rows=64, num_inputs=num_inputs, **form), num_rows)
    assert_within(run(device, case).array, *case.product())


@pytest.mark.cuda
def test_fewer_tiles_than_blocks(device: Device) -> None:
    """The last of the tiles in work together do not exist, and one of two blocks finishes none."""
    case = make_case(random_matrix(8, num_rows=9, num_inputs=700, **FORMATS[1]), num_rows=8, has_norm=True)
    assert_within(run(device, case).array, *case.product())


class SmallCard:
    """A card with less shared memory, so that x comes in chunks, or few blocks, so that each has many tiles."""

    def __init__(self, device: Device, shared_bytes_per_block: int, num_multiprocessors: int):
        self._device = device
        self.shared_bytes_per_block = shared_bytes_per_block
        self.num_multiprocessors = num_multiprocessors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


@pytest.mark.cuda
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("form", "num_inputs", "num_rows"),
    [
        (FORMATS[0], 9000, 8),
        (FORMATS[1], 9000, 8),
        (FORMATS[8], 28672, 2),
        (FORMATS[10], 9000, 8),
        (FORMATS[14], 5000, 8),
        (FORMATS[15], 5000, 8),
        (FORMATS[16], 5000, 8),
    ],
)
def test_chunks_and_cards_change_no_bits(
    device: Device, form: dict[str, Any], num_inputs: int, num_rows: int, has_norm: bool
) -> None:
    case = make_case(random_matrix(4, num_rows=80, num_inputs=num_inputs, **form), num_rows, has_norm=has_norm)
    whole = run(device, case).array
    assert_within(whole, *case.product())
    small: Any = SmallCard(device, 99 * 1024, num_multiprocessors=3)
    np.testing.assert_array_equal(to_host(run(small, case).array).view("u4"), to_host(whole).view("u4"))


@pytest.mark.cuda
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
@pytest.mark.parametrize("form", [FORMATS[1], FORMATS[8], FORMATS[12], FORMATS[14], FORMATS[15], FORMATS[16]])
def test_buffers_of_sums_are_used_again(device: Device, form: dict[str, Any], num_rows: int, has_norm: bool) -> None:
    """56 tiles on five multiprocessors: more in turn than there are buffers, and not the same number everywhere."""
    case = make_case(random_matrix(10, num_rows=890, num_inputs=600, **form), num_rows, has_norm=has_norm)
    whole = run(device, case).array
    assert_within(whole, *case.product())
    small: Any = SmallCard(device, device.shared_bytes_per_block, num_multiprocessors=5)
    np.testing.assert_array_equal(to_host(run(small, case).array).view("u4"), to_host(whole).view("u4"))


@pytest.mark.cuda
@pytest.mark.parametrize("form", [FORMATS[1], FORMATS[8], FORMATS[15]])
def test_ten_runs_give_the_same_bits(device: Device, form: dict[str, Any]) -> None:
    case = make_case(random_matrix(5, num_rows=1040, num_inputs=1024, **form), num_rows=4, has_norm=True)
    first = to_host(run(device, case).array).view(np.uint32)
    for _ in range(9):
        np.testing.assert_array_equal(to_host(run(device, case).array).view(np.uint32), first)


@pytest.mark.cuda
def test_nan_shows_in_its_row_alone(device: Device) -> None:
    case = make_case(random_matrix(6, "int8", 16, 128), num_rows=2)
    case.x[0, 5] = np.nan
    result = to_host(run(device, case).array)
    assert np.isnan(result[0]).all()
    assert np.isfinite(result[1]).all()


@pytest.mark.cuda
@pytest.mark.parametrize("weight_type", ["int8", "int4"])
def test_magnitudes_at_the_ends_of_float32(device: Device, weight_type: str) -> None:
    """Right while a span's largest value has a quotient; NaN for infinity and its neighbours."""
    case = make_case(random_matrix(9, weight_type, 32, 256), num_rows=4)
    case.x[:] = np.random.default_rng(9).uniform(0.5, 1, case.x.shape)
    case.x *= np.float32([[2**-99.5], [2**-105.0], [2.0**-120], [2.0**100]])
    assert_within(run(device, case).array, *case.product())
    case.x[:, 3] = np.float32([np.inf, -np.inf, 2.0**127, 1])
    result = to_host(run(device, case).array)
    assert np.isnan(result[:3]).all()
    assert np.isfinite(result[3]).all()


@pytest.mark.cuda
def test_wrong_arrays_are_refused(device: Device) -> None:
    import cupy

    matrix = upload(tiles_of(random_matrix(7, "int8", 40, 128)))
    x, out = cupy.zeros((1, 128), dtype=np.float32), cupy.zeros((1, 40), dtype=np.float32)
    with pytest.raises(ValueError, match=r"gemv: x is \[1, 64\], expected"):
        gemv(device, matrix=matrix, x=x[:, :64], out=out)
    with pytest.raises(ValueError, match="out has 16 columns, expected 3 tiles"):
        gemv(device, matrix=matrix, x=x, out=out[:, :16])
    with pytest.raises(ValueError, match="out has 40 columns"):
        gemv(device, matrix=matrix, x=x, out=out, epilogue="swiglu")
    with pytest.raises(ValueError, match="bias is"):
        gemv(device, matrix=matrix, x=x, out=out, bias=x[0, :40])


# Multiprocessors, shared memory a block, clusters; half an H100 looks like a partitioned card.
CARDS = {
    "H200": (132, 232448, True),
    "half an H100": (61, 232448, True),
    "A100": (108, 166912, False),
    "RTX 4090": (128, 101376, False),
    "RTX 5090": (170, 101376, True),
    "RTX 3050": (20, 101376, False),
}
LAYOUTS = [
    tile_layout("int8", 12288, 4096, 128, "bfloat16"),
    tile_layout("int8", 4096, 14336, None, "float32"),
    tile_layout("int4", 28672, 8192, 32, "float32", is_symmetric=False),
    tile_layout("bfloat16", 128256, 4096),
    tile_layout("float32", 2048, 28672),
    *(tile_layout("int8", 16 * num_tiles, 512, 64, "float16") for num_tiles in (1, 9, 131)),
]


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: f"{layout.weight_type}-{layout.num_tiles}-{layout.num_inputs}"
)
def test_plans_fit_their_card(layout: TileLayout, card: str) -> None:
    multiprocessors, shared_bytes, can_cluster = CARDS[card]
    for num_rows in range(1, 9):
        plan = plan_gemv(
            layout,
            num_rows,
            num_multiprocessors=multiprocessors,
            shared_bytes_per_block=shared_bytes,
            can_cluster=can_cluster,
        )
        assert 1 <= plan.num_rows <= num_rows
        assert plan.shared_bytes + STATIC_SHARED_BYTES <= shared_bytes
        assert plan.cluster == (2 if can_cluster and plan.num_rows > 2 else 1)
        assert plan.num_blocks % plan.cluster == 0
        assert 1 <= plan.num_blocks <= layout.num_tiles * plan.cluster
        if layout.num_tiles < multiprocessors:
            assert plan.num_blocks >= layout.num_tiles, "one tile a block"
        assert plan.chunk_spans == layout.num_spans or plan.chunk_spans % 16 == 0


def test_one_row_of_a_usual_model_is_never_cut() -> None:
    for layout in LAYOUTS[:2]:
        plan = plan_gemv(layout, 1, num_multiprocessors=128, shared_bytes_per_block=101376, can_cluster=False)
        assert plan.chunk_spans == layout.num_spans


def test_cost_counts_the_matrix_once_for_eight_rows() -> None:
    layout = tile_layout("int8", 4096, 4096, 128, "float16")
    assert layout.num_bytes == 4096 * 4096 + 4096 * 32 * 2
    card = {"num_multiprocessors": 132, "shared_bytes_per_block": 227 * 1024, "can_cluster": True}
    one, eight, nine = ([gemv_cost(plan, layout) for plan in plan_passes(layout, rows, **card)] for rows in (1, 8, 9))
    assert [cost.read_bytes for cost in one] == [layout.num_bytes + 4 * 4096]
    assert [cost.read_bytes for cost in eight] == [layout.num_bytes + 8 * 4 * 4096]
    assert [cost.read_bytes for cost in nine] == [eight[0].read_bytes, one[0].read_bytes]
    assert {cost.stored_bytes for cost in nine} == {layout.num_bytes}
    bias = gemv_cost(nine[1].plan, layout, epilogue="add", has_norm=True, has_bias=True)
    assert bias.stored_bytes == layout.num_bytes + 2 * 4 * 4096
    assert bias.read_bytes == bias.stored_bytes + 2 * 4 * 4096
    assert one[0].written_bytes == 4 * 4096
    assert one[0].flops == 2 * 4096 * 4096


@pytest.mark.parametrize("place", range(5))
def test_the_compiler_refuses_other_sizes_than_the_kernels(place: int, nvrtc: None) -> None:
    layout = tile_layout("int8", 4096, 4096, 128, "bfloat16")
    start, _, sizes = gemv_name(layout, 8, 2).partition("HostSizes<")
    numbers = [int(number) for number in sizes.rstrip(">").split(", ")]
    numbers[place] *= 2
    wrong = f"{start}HostSizes<{', '.join(map(str, numbers))}>>"
    with pytest.raises(KernelCompileError, match=r"gemv\.py plans other sizes"):
        compile_kernels(flatten("gemv"), "gemv", [wrong], "sm_90")
