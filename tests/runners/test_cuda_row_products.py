"""Which kernels multiply rows: by their number, the matrix and the card; and which matrices share staged rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmcli.kernels.card_facts import TYPICAL_CARD, CardFacts
from llmcli.kernels.phantom import Phantom
from llmcli.kernels.tiles import TiledMatrix, TileLayout, tile_layout
from llmcli.lab.notes import Notes
from llmcli.runners.cuda.row_products import RowProducts, staged_bytes

NUM_INPUTS = 512
INT8 = tile_layout("int8", 48, NUM_INPUTS, 128, "bfloat16")
INT8_ZEROS = tile_layout("int8", 48, NUM_INPUTS, 128, "bfloat16", is_symmetric=False)
INT8_CHANNEL = tile_layout("int8", 48, NUM_INPUTS, None, "float32")
INT4 = tile_layout("int4", 48, NUM_INPUTS, 128, "bfloat16")
SMALL_GROUPS = tile_layout("int8", 48, NUM_INPUTS, 32, "bfloat16")
BF16 = tile_layout("bfloat16", 48, NUM_INPUTS)
FP16 = tile_layout("float16", 48, NUM_INPUTS)
FP8 = tile_layout("fp8", 48, NUM_INPUTS, 128, "float32")
FP8_CHANNEL = tile_layout("fp8", 48, NUM_INPUTS, None, "bfloat16")
FP32 = tile_layout("float32", 48, NUM_INPUTS)
NO_WGMMA = replace(TYPICAL_CARD, can_wgmma=False)


def matrix_of(layout: TileLayout) -> TiledMatrix:
    return layout.place(Phantom((layout.arena_bytes,), np.uint8, 1 << 20))


def launches(
    layouts: list[TileLayout], num_rows: int, card: CardFacts = TYPICAL_CARD, has_memory: bool = True
) -> list[Any]:
    """The launches of rows multiplied with these matrices one after the other."""
    notes: Any = Notes(card)
    digits = factors = None
    if has_memory:
        num_bytes = staged_bytes(TYPICAL_CARD, [(layout, 256) for layout in (INT8_ZEROS, INT4, FP16)])
        digits, factors = Phantom((num_bytes,), np.uint8, 1 << 30), Phantom((256,), np.float32, 1 << 31)
    x, out = (Phantom((num_rows, width), np.float32, place << 32) for width, place in ((NUM_INPUTS, 1), (48, 2)))
    norm_weight, bias = Phantom((NUM_INPUTS,), np.float32, 3 << 32), Phantom((48,), np.float32, 4 << 32)
    inputs = RowProducts(notes, digits, factors).inputs(x, norm_weight, 1e-5)
    for layout in layouts:
        inputs.multiply(matrix_of(layout), out, bias=bias, epilogue="add")
    return list(notes.launches)


def stems(*arguments: Any, **options: Any) -> list[str]:
    return [launch.stem for launch in launches(*arguments, **options)]


@pytest.mark.parametrize("layout", [INT8, INT8_ZEROS, INT8_CHANNEL, INT4])
def test_codes_become_digits_from_nine_rows_on(layout: TileLayout) -> None:
    for num_rows in (1, 2, 7, 8):
        assert stems([layout], num_rows) == ["gemv"]
    for num_rows in (9, 16, 64, 65, 256):
        assert stems([layout], num_rows) == ["stage_digits", "gemm_codes"]
        assert set(stems([layout], num_rows, NO_WGMMA)) == {"gemv"}
        assert set(stems([layout], num_rows, has_memory=False)) == {"gemv"}


@pytest.mark.parametrize("layout", [BF16, FP16, FP8, FP8_CHANNEL])
def test_floats_of_8_and_16_bits_multiply_pairs_from_nine_rows_on(layout: TileLayout) -> None:
    assert stems([layout], 8) == ["gemv"]
    for num_rows in (9, 16, 64, 65, 256):
        assert stems([layout], num_rows) == ["stage_halves", "gemm_halves"]
        assert set(stems([layout], num_rows, NO_WGMMA)) == {"gemv"}
        assert set(stems([layout], num_rows, has_memory=False)) == {"gemv"}


@pytest.mark.parametrize("layout", [SMALL_GROUPS, FP32])
def test_other_matrices_go_eight_rows_at_a_time(layout: TileLayout) -> None:
    assert stems([layout], 24) == ["gemv"] * 3


def test_matrices_that_take_rows_in_one_form_share_it() -> None:
    staged = [INT8, INT8_CHANNEL, FP32, INT8, INT8_ZEROS, INT4, INT4, BF16, BF16, FP16, INT8, FP8, FP8_CHANNEL]
    assert stems(staged, 16) == [
        *("stage_digits", "gemm_codes", "gemm_codes", "gemv", "gemv", "gemm_codes"),
        *("stage_digits", "gemm_codes", "stage_digits", "gemm_codes", "gemm_codes"),
        *("stage_halves", "gemm_halves", "gemm_halves", "stage_halves", "gemm_halves", "stage_digits", "gemm_codes"),
        *("stage_halves", "gemm_halves", "gemm_halves"),
    ]


def test_rows_that_others_have_taken_the_place_of_are_staged_again() -> None:
    """A layer may multiply its inputs in several orders, in turn."""
    notes: Any = Notes(TYPICAL_CARD)
    staged, factors = Phantom((10**6,), np.uint8, 1 << 30), Phantom((256,), np.float32, 1 << 31)
    x, out = (Phantom((16, width), np.float32, place << 32) for width, place in ((NUM_INPUTS, 1), (48, 2)))
    products = RowProducts(notes, staged, factors)
    first, second = products.inputs(x), products.inputs(x)
    for inputs in (first, first, second, first):
        inputs.multiply(matrix_of(INT8), out)
    assert [launch.stem == "stage_digits" for launch in notes.launches] == [True, False, False, *[True, False] * 2]


def test_both_kernels_get_the_same_pairs_and_factors() -> None:
    """And the norm goes to the first, bias and epilogue to the second."""
    staged, multiplied = launches([BF16], 20)
    x, norm_weight, image, factors, shape = staged.arguments
    assert (x.data.ptr, norm_weight.data.ptr, shape.num_rows) == (1 << 32, 3 << 32, 20)
    assert shape.eps == np.float32(1e-5)
    assert multiplied.arguments[2].data.ptr == image.data.ptr
    assert (multiplied.arguments[3].data.ptr, multiplied.arguments[3].shape) == (factors.data.ptr, (20,))
    assert multiplied.arguments[4].data.ptr == 4 << 32
    assert (multiplied.arguments[6].num_rows, multiplied.arguments[6].epilogue) == (20, 1)


def test_both_kernels_get_the_same_digits_and_factors() -> None:
    staged, multiplied = launches([INT8], 20)
    x, norm_weight, image, factors, shape = staged.arguments
    assert (x.data.ptr, norm_weight.data.ptr, shape.num_rows) == (1 << 32, 3 << 32, 20)
    assert shape.eps == np.float32(1e-5)
    assert multiplied.arguments[3].data.ptr == image.data.ptr
    assert (multiplied.arguments[4].data.ptr, multiplied.arguments[4].shape) == (factors.data.ptr, (20,))
    assert multiplied.arguments[5].data.ptr == 4 << 32
    assert (multiplied.arguments[7].num_rows, multiplied.arguments[7].epilogue) == (20, 1)


def test_memory_is_that_of_the_largest_staged_product() -> None:
    both = [(INT8, 16), (INT4, 100), (FP32, 1000), (SMALL_GROUPS, 1000), (INT8, 8)]
    assert staged_bytes(TYPICAL_CARD, [*both, (BF16, 100)]) == 128 * NUM_INPUTS * 4
    assert staged_bytes(TYPICAL_CARD, [(INT8, 256), (FP16, 17), (BF16, 8)]) == 256 * NUM_INPUTS // 128 * (2 * 128 + 4)
    assert staged_bytes(TYPICAL_CARD, [(FP16, 17)]) == 32 * NUM_INPUTS // 32 * (4 * 32 + 4)
    assert staged_bytes(TYPICAL_CARD, both) == 128 * NUM_INPUTS // 128 * (2 * 128 + 4)
    assert staged_bytes(TYPICAL_CARD, both[2:]) == 0
    assert staged_bytes(NO_WGMMA, both) == 0
