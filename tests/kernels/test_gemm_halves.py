"""gemm_halves against float64 of pairs and weights, and against gemv bit for bit; on cards with wgmma."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fenced import assert_launches_agree, assert_same_bits, fenced, to_host
from right import assert_right
from uploaded import upload

from llmcli.kernels.card_facts import TYPICAL_CARD
from llmcli.kernels.device import Device
from llmcli.kernels.gemm_halves import (
    SPEC,
    STATIC_SHARED_BYTES,
    choose_stages,
    gemm_halves,
    gemm_halves_cost,
    kernel_name,
    plan_halves,
    takes,
)
from llmcli.kernels.gemv import Epilogue, gemv
from llmcli.kernels.phantom import Phantom
from llmcli.kernels.stage_halves import TOKENS, image_bytes, stage_halves
from llmcli.kernels.tiles import tile_layout
from llmcli.lab.cases.gemm_halves import FORMATS, problem_of
from llmcli.lab.cases.gemv import EPS, Case, make_case
from llmcli.lab.matrices import matrix_of, random_matrix, tiles_of
from llmcli.lab.notes import Notes

FEW_OUTPUTS, MANY_OUTPUTS = 96, 20000  # blocks share the inputs of a few, and stay for many


@pytest.fixture
def wgmma_card(device: Device) -> Device:
    if not device.can_wgmma:
        pytest.skip("the card has no wgmma")
    return device


def run(device: Device, case: Case, way: str, epilogue: Epilogue = "store", num_outputs: int | None = None) -> Any:
    """The output of all rows by `way`: pairs or gemv. x at a distance, and out between canaries."""
    import cupy

    num_rows, num_inputs = case.x.shape
    wide = cupy.full((num_rows, num_inputs + 12), np.nan, dtype=np.float32)
    wide[:, :num_inputs] = cupy.asarray(case.x)
    x = wide[:, :num_inputs]
    result = fenced((num_rows, num_outputs or case.stored.values.shape[0]), np.float32)
    if epilogue == "add":
        result.array[...] = cupy.asarray(case.before)
    norm_weight = None if case.norm_weight is None else cupy.asarray(case.norm_weight)
    common: dict[str, Any] = {
        "matrix": upload(tiles_of(case.stored)),
        "out": result.array,
        "bias": None if case.bias is None else cupy.asarray(case.bias),
        "epilogue": epilogue,
    }
    device.synchronize()  # both read weights before earlier kernels end
    if way == "gemv":
        gemv(device, x=x, norm_weight=norm_weight, eps=EPS, **common)
    else:
        layout = case.stored.layout
        image, factors = fenced(image_bytes(layout, num_rows), np.uint8), fenced(num_rows, np.float32)
        staged: dict[str, Any] = {"image": image.array, "factors": factors.array}
        stage_halves(device, layout=layout, x=x, norm_weight=norm_weight, eps=EPS, **staged)
        gemm_halves(device, **staged, **common)
        image.check()
    device.synchronize()
    result.check()
    return to_host(result.array)


def assert_bits_of_gemv(
    device: Device, case: Case, epilogue: Epilogue = "store", num_outputs: int | None = None
) -> None:
    pairs, expected = (run(device, case, way, epilogue, num_outputs) for way in ("pairs", "gemv"))
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(pairs.view(np.uint32), expected.view(np.uint32))


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(16, 40), (35, 72), (48, 176), (100, 1001), (272, 2304), (20011, 200)]
)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_types_and_tails(wgmma_card: Device, form: dict[str, Any], num_outputs: int, num_inputs: int) -> None:
    stored = random_matrix(num_inputs, num_rows=num_outputs, num_inputs=num_inputs, **form)
    assert_right(wgmma_card, problem_of(stored, 9))
    assert_bits_of_gemv(wgmma_card, make_case(stored, 9))


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", [9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 256, 257])
@pytest.mark.parametrize("num_outputs", [FEW_OUTPUTS, MANY_OUTPUTS])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_any_number_of_rows_has_the_bits_of_gemv(
    wgmma_card: Device, form: dict[str, Any], num_outputs: int, num_rows: int
) -> None:
    """Rows of zeros, of one number, with an outlier; normed, with a bias, and by every epilogue."""
    case = make_case(
        random_matrix(2, num_rows=num_outputs, num_inputs=712, **form), num_rows, has_norm=True, has_bias=True
    )
    case.before = np.random.default_rng(3).standard_normal((num_rows, num_outputs)).astype(np.float32)
    assert_bits_of_gemv(wgmma_card, case)
    assert_bits_of_gemv(wgmma_card, case, "add")
    assert_bits_of_gemv(wgmma_card, case, "swiglu", num_outputs // 2 - 4)  # which leaves the last tile half used


@pytest.mark.cuda
@pytest.mark.parametrize("num_inputs", [11008, 14336])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_long_rows(wgmma_card: Device, form: dict[str, Any], num_inputs: int) -> None:
    assert_bits_of_gemv(wgmma_card, make_case(random_matrix(3, num_rows=64, num_inputs=num_inputs, **form), 40))


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_sums_of_numbers_far_apart(wgmma_card: Device, form: dict[str, Any]) -> None:
    """Where the tensor cores drop the ends of small numbers, both kernels drop the same."""
    case = make_case(random_matrix(4, num_rows=80, num_inputs=2048, **form), 24)
    case.x *= np.exp2(np.random.default_rng(5).integers(-14, 14, case.x.shape)).astype(np.float32)
    assert_bits_of_gemv(wgmma_card, case)


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_real_shape_with_equal_bits(wgmma_card: Device, form: dict[str, Any]) -> None:
    case = make_case(random_matrix(5, num_rows=4096, num_inputs=4096, **form), 64, has_norm=True)
    assert_bits_of_gemv(wgmma_card, case)
    assert_same_bits(lambda: run(wgmma_card, case, "pairs"))


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_every_launch_of_a_whole_product_has_the_bits_of_gemv(wgmma_card: Device, form: dict[str, Any]) -> None:
    """256 rows: a buffer that is filled again too early shows in one launch of ten."""
    import cupy

    case = make_case(random_matrix(7, num_rows=8192, num_inputs=4096, **form), 256)
    layout = case.stored.layout
    matrix, image = upload(tiles_of(case.stored)), cupy.empty(image_bytes(layout, 256), dtype=np.uint8)
    factors = cupy.empty(256, dtype=np.float32)
    stage_halves(wgmma_card, layout=layout, x=cupy.asarray(case.x), image=image, factors=factors)
    wgmma_card.synchronize()
    assert_launches_agree(
        lambda out: gemm_halves(wgmma_card, matrix=matrix, image=image, factors=factors, out=out),
        run(wgmma_card, case, "gemv"),
        60,
    )


@pytest.mark.cuda
@pytest.mark.parametrize("num_outputs", [32, MANY_OUTPUTS])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_nan_shows_in_its_row_alone(wgmma_card: Device, form: dict[str, Any], num_outputs: int) -> None:
    case = make_case(random_matrix(6, num_rows=num_outputs, num_inputs=128, **form), num_rows=20)
    case.x[4, 5] = np.nan
    result = run(wgmma_card, case, "pairs")
    assert np.isnan(result[4]).all()
    assert np.isfinite(np.delete(result, 4, axis=0)).all()


# Without a card


def arguments(num_rows: int = 9, num_outputs: int = 40) -> dict[str, Any]:
    layout = tile_layout("bfloat16", num_outputs, 128)
    return {
        "matrix": layout.place(Phantom((layout.arena_bytes,), np.uint8, 1 << 20)),
        "image": Phantom((image_bytes(layout, num_rows),), np.uint8, 2 << 20),
        "factors": Phantom((num_rows,), np.float32, 3 << 20),
        "out": Phantom((num_rows, num_outputs), np.float32, 4 << 20),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": Phantom((16,), np.uint8, 1 << 30)}, "image has 16 bytes"),
        ({"factors": Phantom((8,), np.float32, 1 << 30)}, r"factors is \[8\]"),
        ({"out": Phantom((9, 16), np.float32, 1 << 30)}, "out has 16 columns, expected 3 tiles of 16"),
        ({"epilogue": "swiglu"}, "out has 40 columns, expected 3 tiles of 8"),
        ({"bias": Phantom((40,), np.float32, 1 << 30)}, r"bias is \[40\], expected \[48\]"),
    ],
)
def test_wrong_arrays_are_refused(change: dict[str, Any], message: str) -> None:
    notes: Any = Notes()
    gemm_halves(notes, **arguments())
    (launch,) = notes.launches
    assert launch.grid == (4,)
    with pytest.raises(ValueError, match=message):
        gemm_halves(notes, **{**arguments(), **change})


def test_matrices_and_cards_that_it_is_not_for_are_refused() -> None:
    other: Any = Notes(replace(TYPICAL_CARD, can_wgmma=False))
    with pytest.raises(ValueError, match="the card has no wgmma"):
        gemm_halves(other, **arguments())
    matrix = matrix_of(tile_layout("float32", 40, 128), {"tiles": None})
    with pytest.raises(ValueError, match="does not take"):
        gemm_halves(other, **{**arguments(), "matrix": matrix})
    assert [arch for arch in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120") if SPEC.runs_on(arch)] == ["sm_90"]
    assert [takes(tile_layout(kind, 64, 4096)) for kind in ("float16", "bfloat16", "float32")] == [True, True, False]
    assert not takes(tile_layout("int8", 64, 4096, 128, "bfloat16"))


@pytest.mark.parametrize("num_rows", [9, 16, 17, 64, 100, 128, 257])
@pytest.mark.parametrize("num_inputs", [32, 4096, 14336])
@pytest.mark.parametrize("num_outputs", [16, 1000, 4096, 28672, 128256])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_plans(form: dict[str, Any], num_outputs: int, num_inputs: int, num_rows: int) -> None:
    """Every output of every row belongs to a block; few kernels serve any number of rows, with three stages or more."""
    layout = tile_layout(num_rows=num_outputs, num_inputs=num_inputs, **form)
    for num_multiprocessors in (66, 114, 132):
        plan = plan_halves(layout, num_rows, num_multiprocessors)
        chosen = plan.form
        row_blocks = -(-num_rows // plan.tokens)
        tile_groups, rest = divmod(plan.num_items, row_blocks)
        assert rest == 0
        assert (tile_groups - 1) * chosen.sharers * chosen.tiles < layout.num_tiles
        assert tile_groups * chosen.sharers * chosen.tiles >= layout.num_tiles
        # Blocks that share inputs have one piece of work; others take more, and all of them run at once.
        if chosen.quarters == 4:
            assert plan.num_clusters == plan.num_items
        else:
            assert 1 <= plan.num_clusters <= plan.num_items
            assert plan.num_clusters * chosen.cluster <= num_multiprocessors
        stages = choose_stages(layout, plan, TYPICAL_CARD.shared_bytes_per_block)
        assert stages >= 3
        if (layout.group_size, layout.scale_type) in ((None, None), (None, "bfloat16"), (128, "float32")):
            assert kernel_name(layout, plan, stages) in SPEC.variants
        alike = plan.tokens if num_rows <= plan.tokens else 128
        assert plan_halves(layout, alike, num_multiprocessors).form == chosen


@pytest.mark.parametrize("num_rows", TOKENS)
@pytest.mark.parametrize("num_outputs", [40, 4096, 40000])
def test_a_block_has_the_shared_memory_that_it_asks_for(num_outputs: int, num_rows: int) -> None:
    notes: Any = Notes()
    gemm_halves(notes, **arguments(num_rows, num_outputs))
    assert notes.launches[0].shared_bytes + STATIC_SHARED_BYTES <= TYPICAL_CARD.shared_bytes_per_block


def test_cost_counts_the_matrix_once_for_all_rows() -> None:
    layout = tile_layout("float16", 4096, 4096)
    for num_rows in (16, 256):
        cost = gemm_halves_cost(layout, num_rows)
        assert cost.stored_bytes == layout.num_bytes
        assert cost.read_bytes == layout.num_bytes + image_bytes(layout, num_rows)
        assert cost.written_bytes == 4 * num_rows * 4096
        assert cost.flops == 2 * num_rows * 4096 * 4096
    added = gemm_halves_cost(layout, 16, epilogue="add", has_bias=True)
    assert added.stored_bytes == layout.num_bytes + 4 * 4096
    assert added.read_bytes == added.stored_bytes + image_bytes(layout, 16) + 4 * 16 * 4096
    assert gemm_halves_cost(layout, 16, epilogue="swiglu").written_bytes == 4 * 16 * 2048
