"""gemm_wide, and gemm_narrow for few tokens, against float64 of dequantize's weights; on cards with wgmma."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fenced import assert_launches_agree, fenced, to_host
from right import assert_right
from uploaded import upload

from llmcli.kernels import gemm_wide as launcher
from llmcli.kernels.device import Device
from llmcli.kernels.gemm_wide import SPEC, STATIC_SHARED_BYTES, gemm_wide, gemm_wide_cost, gemm_wide_swiglu
from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.kernels.phantom import Phantom
from llmcli.kernels.stage_wide import IMAGE_TOKENS, WIDE_TOKENS, image_bytes
from llmcli.kernels.tiles import TileLayout, tile_layout
from llmcli.kernels.wide_plan import NarrowPlan, WidePlan, _plan, narrow_forms, plan_form, plan_wide, takes
from llmcli.lab.cases.gemm import (
    FORMATS,
    HALF_FORMATS,
    activations,
    swiglu_case,
    wide_case,
    with_model_scales,
    with_small_scales,
)
from llmcli.lab.matrices import DTYPES, StoredMatrix, random_matrix, tiles_of, to_storage
from llmcli.lab.notes import Notes
from llmcli.lab.rows import image_of


@pytest.fixture(params=WIDE_TOKENS, ids="blocks of {}".format)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of this many tokens, even if another form is faster; of 256 if an image has as many.

    gemm_narrow's forms with the smallest and the largest blocks.
    """

    def plan_few(layout: TileLayout, num_tokens: int, num_multiprocessors: int, num_parts: int) -> NarrowPlan:
        form = narrow_forms(num_tokens)[0 if request.param == min(WIDE_TOKENS) else -1]
        return plan_form(layout, form, num_multiprocessors, num_parts)

    def plan(layout: TileLayout, num_tokens: int, num_multiprocessors: int, num_parts: int) -> WidePlan:
        tokens = request.param if num_tokens > IMAGE_TOKENS else min(request.param, IMAGE_TOKENS)
        return _plan(layout, num_tokens, num_multiprocessors, tokens, num_parts)

    monkeypatch.setattr(launcher, "plan_wide", plan)
    monkeypatch.setattr(launcher, "plan_narrow", plan_few)


@pytest.mark.cuda
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(16, 40), (35, 72), (48, 176), (100, 1001), (272, 2304), (40011, 200), (64, 14336)]
)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_types_and_tails(wgmma_card: Device, form: dict[str, Any], num_outputs: int, num_inputs: int) -> None:
    stored = random_matrix(num_inputs, num_rows=num_outputs, num_inputs=num_inputs, **form)
    for num_tokens in (12, 20, 50, 70, 150):
        assert_right(wgmma_card, wide_case(stored, num_tokens))


@pytest.mark.cuda
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(16, 128), (100, 1152), (40011, 256), (64, 14336)])
@pytest.mark.parametrize("form", HALF_FORMATS, ids=str)
def test_weights_of_16_bits(wgmma_card: Device, form: dict[str, Any], num_outputs: int, num_inputs: int) -> None:
    stored = random_matrix(num_inputs, num_rows=num_outputs, num_inputs=num_inputs, **form)
    for num_tokens in (12, 20, 50, 70, 150, 300):
        assert_right(wgmma_card, wide_case(stored, num_tokens, has_bias=True))


@pytest.mark.cuda
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("num_parts", [2, 3, 4, 8, 18])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 33, 64, 65, 128, 129, 200, 257])
@pytest.mark.parametrize("form", [*FORMATS, *HALF_FORMATS], ids=str)
def test_products_in_parts(wgmma_card: Device, form: dict[str, Any], num_tokens: int, num_parts: int) -> None:
    stored = random_matrix(8, num_rows=300, num_inputs=2304, **form)
    assert_right(wgmma_card, wide_case(stored, num_tokens, "add", has_bias=True, num_parts=num_parts))


@pytest.mark.cuda
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    "num_tokens", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 600]
)
@pytest.mark.parametrize("form", FORMATS[:5], ids=str)
def test_any_number_of_tokens(wgmma_card: Device, form: dict[str, Any], num_tokens: int) -> None:
    stored = random_matrix(2, num_rows=300, num_inputs=712, **form)
    assert_right(wgmma_card, wide_case(stored, num_tokens, has_bias=True))
    assert_right(wgmma_card, wide_case(stored, num_tokens, "add", has_bias=True))


@pytest.mark.cuda
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("num_tokens", [5, 20, 64, 70, 128, 129, 300])
@pytest.mark.parametrize("num_outputs", [8, 60, 100, 128, 130, 1000])
@pytest.mark.parametrize("down_type", ["int8", "int4", "bfloat16"])
@pytest.mark.parametrize("form", [*FORMATS, *HALF_FORMATS], ids=str)
def test_swiglu_for_every_format_of_down(
    wgmma_card: Device, form: dict[str, Any], down_type: str, num_outputs: int, num_tokens: int
) -> None:
    assert_right(wgmma_card, swiglu_case(form, num_tokens, num_outputs, 256, down_type))


def product(device: Device, stored: StoredMatrix, x: np.ndarray) -> np.ndarray:
    import cupy

    result = fenced((len(x), stored.layout.num_rows), np.float32)
    gemm_wide(
        device,
        matrix=upload(tiles_of(stored)),
        image=cupy.asarray(image_of(x, stored.layout.unit_inputs)).view(np.uint8),
        row_scales=cupy.ones(len(x), np.float32),
        out=result.array,
    )
    device.synchronize()
    result.check()
    return to_host(result.array)


@pytest.mark.cuda
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("form", [*FORMATS, *HALF_FORMATS], ids=str)
def test_a_tokens_bits_are_the_same_beside_any_number_of_others(wgmma_card: Device, form: dict[str, Any]) -> None:
    """Also in another place of the block, and in gemm_narrow. More than 128 tokens take blocks as the fixture says."""
    stored = random_matrix(3, num_rows=272, num_inputs=4096, **form)
    x = activations(700, 4096)
    expected = product(wgmma_card, stored, x)
    for begin, end in ((0, 1), (5, 21), (0, 32), (3, 64), (0, 128), (3, 130), (100, 400), (256, 512), (699, 700)):
        found = product(wgmma_card, stored, x[begin:end])
        np.testing.assert_array_equal(found.view(np.uint32), expected[begin:end].view(np.uint32))


@pytest.mark.cuda
@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[3], FORMATS[6], HALF_FORMATS[1]], ids=str)
def test_every_launch_of_a_whole_product_has_the_same_bits(wgmma_card: Device, form: dict[str, Any]) -> None:
    """A buffer for tokens that is filled again too early shows in one launch of many."""
    import cupy

    stored = random_matrix(4, num_rows=8192, num_inputs=4096, **form)
    x = activations(1000, 4096)
    matrix = upload(tiles_of(stored))
    image = cupy.asarray(image_of(x, stored.layout.unit_inputs)).view(np.uint8)
    row_scales = cupy.ones(len(x), np.float32)
    assert_launches_agree(
        lambda out: gemm_wide(wgmma_card, matrix=matrix, image=image, row_scales=row_scales, out=out),
        product(wgmma_card, stored, x),
        60,
    )


@pytest.mark.cuda
@pytest.mark.parametrize("with_scales", [with_model_scales, with_small_scales])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_weights_are_exact(
    wgmma_card: Device, form: dict[str, Any], with_scales: Callable[[StoredMatrix], StoredMatrix]
) -> None:
    """Bit for bit, also where fp16 does not have the scale or has the product below its normal numbers."""
    stored = with_scales(random_matrix(7, num_rows=72, num_inputs=144, **form))
    x = np.eye(144, dtype=np.float16)  # a token's results are the weights of one input
    np.testing.assert_array_equal(product(wgmma_card, stored, x), stored.halves.T)


@pytest.mark.cuda
@pytest.mark.parametrize("form", HALF_FORMATS, ids=str)
def test_weights_of_16_bits_are_exact(wgmma_card: Device, form: dict[str, Any]) -> None:
    """Also where fp16 has no such number."""
    stored = random_matrix(7, num_rows=72, num_inputs=256, **form)
    sizes = 2.0 ** np.random.default_rng(1).integers(-30, 24, stored.values.shape)
    values = (stored.weights * sizes).astype(np.float32)
    if form["weight_type"] == "float16":
        values = np.clip(values, -65504, 65504)
    stored = replace(stored, values=to_storage(values, DTYPES[form["weight_type"]]))
    x = np.eye(256, dtype=np.float16)
    weights = np.clip(stored.weights, -65504, 65504).astype(np.float32).astype(np.float16)
    np.testing.assert_array_equal(product(wgmma_card, stored, x), weights.T.astype(np.float32))


@pytest.mark.cuda
def test_nan_shows_in_its_token_alone(wgmma_card: Device) -> None:
    x = activations(20, 256)
    x[4, 5] = np.nan
    result = product(wgmma_card, random_matrix(6, num_rows=64, num_inputs=256, **FORMATS[0]), x)
    assert np.isnan(result[4]).all()
    assert np.isfinite(np.delete(result, 4, axis=0)).all()


# Without a card


def arguments(num_tokens: int = 90, num_outputs: int = 40) -> dict[str, Any]:
    layout = tile_layout("int8", num_outputs, 128, 64, "bfloat16")
    return {
        "matrix": layout.place(Phantom((layout.arena_bytes,), np.uint8, 1 << 20)),
        "image": Phantom((image_bytes(128, num_tokens),), np.uint8, 2 << 20),
        "row_scales": Phantom((num_tokens,), np.float32, 3 << 20),
        "out": Phantom((num_tokens, num_outputs), np.float32, 4 << 20),
    }


def swiglu_arguments() -> dict[str, Any]:
    return {
        **arguments(),
        "down": tile_layout("int4", 64, 24, None, "float32"),
        "out": Phantom((image_bytes(24, 90),), np.uint8, 4 << 20),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": Phantom((16,), np.uint8, 1 << 30)}, "image has 16 bytes"),
        ({"row_scales": Phantom((80,), np.float32, 1 << 30)}, r"out is \[90, 40\], expected \[80, 40\]"),
        ({"out": Phantom((90, 16), np.float32, 1 << 30)}, r"out is \[90, 16\]"),
        ({"bias": Phantom((40,), np.float32, 1 << 30)}, r"bias is \[40\], expected \[48\]"),
        ({"others": Phantom((1, 80, 40), np.float32, 1 << 30)}, r"others is \[1, 80, 40\], expected \[any, 90, 40\]"),
        ({"others": Phantom((1, 90, 40), np.float32, 1 << 30)}, "cannot cut 128 inputs into 2 parts of 128 or more"),
    ],
)
def test_wrong_arrays_are_refused(change: dict[str, Any], message: str) -> None:
    notes: Any = Notes()
    gemm_wide(notes, **arguments())
    (launch,) = notes.launches
    assert launch.grid == (2,)
    assert launch.name in SPEC.variants
    with pytest.raises(ValueError, match=message):
        gemm_wide(notes, **{**arguments(), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": Phantom((16,), np.uint8, 1 << 30)}, "out has 16 bytes"),
        ({"row_scales": Phantom((90,), np.float16, 1 << 30)}, "row_scales is float16"),
        ({"down": tile_layout("int8", 64, 100, None, "float32")}, "3 tiles do not give 100 outputs"),
    ],
)
def test_wrong_arrays_of_swiglu_are_refused(change: dict[str, Any], message: str) -> None:
    notes: Any = Notes()
    gemm_wide_swiglu(notes, **swiglu_arguments())
    assert [one.name in SPEC.variants for one in notes.launches] == [True]
    with pytest.raises(ValueError, match=message):
        gemm_wide_swiglu(notes, **{**swiglu_arguments(), **change})


def test_other_cards_take_another_kernel_and_other_matrices_are_refused() -> None:
    other: Any = Notes(replace(TYPICAL_CARD, can_wgmma=False))
    gemm_wide(other, **arguments())
    assert [launch.stem for launch in other.launches] == ["gemm_mma"]
    layout = tile_layout("int8", 40, 128, 8, "bfloat16")
    notes: Any = Notes()
    matrix = layout.place(Phantom((layout.arena_bytes,), np.uint8, 1 << 20))
    with pytest.raises(ValueError, match="does not take"):
        gemm_wide(notes, **{**arguments(), "matrix": matrix})
    assert [arch for arch in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120") if SPEC.runs_on(arch)] == ["sm_90"]
    assert takes(tile_layout("bfloat16", 64, 4032))
    assert not takes(tile_layout("float32", 64, 4096))
    assert takes(tile_layout("int4", 64, 4096, 16, "float16"))


@pytest.mark.parametrize("num_tokens", [65, 128, 129, 2048])
def test_a_block_has_the_shared_memory_that_it_asks_for(num_tokens: int) -> None:
    notes: Any = Notes()
    gemm_wide(notes, **arguments(num_tokens))
    assert notes.launches[0].shared_bytes + STATIC_SHARED_BYTES <= TYPICAL_CARD.shared_bytes_per_block


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "num_tokens", "tokens", "clusters"),
    [
        (256, 128, 128, 128, 1),
        (4096, 14336, 300, 128, 48),  # 32 pieces of 256 tokens would leave half of the card idle
        (4096, 4096, 2048, 256, 66),
        (28672, 4096, 2048, 256, 66),
    ],
)
def test_blocks_that_take_the_least_time(
    num_outputs: int, num_inputs: int, num_tokens: int, tokens: int, clusters: int
) -> None:
    layout = tile_layout("int8", num_outputs, num_inputs, 64, "bfloat16")
    plan = plan_wide(layout, num_tokens, 132)
    assert (plan.tokens, plan.num_clusters) == (tokens, clusters)
    assert plan.num_items == -(-num_tokens // tokens) * -(-num_outputs // 256)


def test_cost_and_what_idle_blocks_take() -> None:
    layout = tile_layout("int8", 4096, 4096, 128, "bfloat16")
    cost = gemm_wide_cost(layout, 2048, "add")
    assert cost.stored_bytes == layout.num_bytes
    assert cost.read_bytes == layout.num_bytes + 2 * 2048 * 4096 + 4 * 2048 * 4096
    assert cost.written_bytes == 4 * 2048 * 4096
    assert cost.flops == 2 * 2048 * 4096 * 4096
    # 128 pieces of work for 66 clusters take two waves. 48 pieces of 300 tokens take one, faster as others idle.
    assert plan_wide(layout, 2048, 132).library_flops == pytest.approx(cost.flops * 132 / 128 / 0.91)
    few, share = 2 * 66 * 256 * 128 * 4096, 0.74 * (1 + 0.5 * (1 - 48 / 66))
    assert plan_wide(layout, 300, 132).library_flops == pytest.approx(few / share)
    assert gemm_wide_cost(layout, 2048, "swiglu").written_bytes == 2 * 2048 * 2048
