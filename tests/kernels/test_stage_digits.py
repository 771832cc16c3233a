"""stage_digits against digits by NumPy, byte for byte: odd sizes, and the ends of float32."""

import numpy as np
import pytest
from fenced import Fenced, fenced, to_host
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.kernels.stage_digits import image_bytes, stage_digits, stage_digits_cost, tokens_of
from llmcli.kernels.tiles import TileLayout, tile_layout
from llmcli.lab.cases.stage_digits import make_rows, problem_of
from llmcli.lab.rows import digits_of


def stage(device: Device, layout: TileLayout, x: np.ndarray) -> tuple[Fenced, Fenced]:
    """Image and factors between canaries; unwritten bytes are 0xFF."""
    import cupy

    image, factors = fenced(image_bytes(layout, len(x)), np.uint8), fenced(len(x), np.float32)
    stage_digits(device, layout=layout, x=cupy.asarray(x), image=image.array, factors=factors.array)
    device.synchronize()
    image.check()
    factors.check()
    return image, factors


@pytest.mark.cuda
@pytest.mark.parametrize("num_inputs", [8, 63, 129, 1000, 14336])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("weight_type", ["int8", "int4"])
def test_tails_of_spans(device: Device, weight_type: str, is_symmetric: bool, num_inputs: int) -> None:
    layout = tile_layout(weight_type, 16, num_inputs, 128, "float16", is_symmetric)
    assert_right(device, problem_of(layout, 9))


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", [9, 15, 16, 17, 32, 33, 63, 64, 65, 128, 257])
def test_numbers_of_rows(device: Device, num_rows: int) -> None:
    assert_right(device, problem_of(tile_layout("int8", 16, 520, 128, "bfloat16"), num_rows))


@pytest.mark.cuda
def test_rows_without_a_quotient_have_scales_of_nan(device: Device) -> None:
    layout = tile_layout("int8", 16, 64, 64, "bfloat16")
    x = make_rows(9, 64)
    x[4:7, 5] = np.float32([np.nan, np.inf, 2.0**127])
    image, _ = stage(device, layout, x)
    scales = to_host(image.array)[2 * 128 * 16 :].view(np.float32)[:9]
    assert np.isnan(scales[4:7]).all()
    assert np.isfinite(np.delete(scales, [4, 5, 6])).all()


@pytest.mark.cuda
def test_wrong_arrays_are_refused(device: Device) -> None:
    import cupy

    layout = tile_layout("int8", 16, 128, 64, "bfloat16")
    x, factors = cupy.zeros((17, 128), np.float32), cupy.zeros(17, np.float32)
    image = cupy.zeros(image_bytes(layout, 17), np.uint8)
    with pytest.raises(ValueError, match=r"x is \[17, 64\]"):
        stage_digits(device, layout=layout, x=x[:, :64], image=image, factors=factors)
    with pytest.raises(ValueError, match="image has"):
        stage_digits(device, layout=layout, x=x, image=image[:-1], factors=factors)
    with pytest.raises(ValueError, match=r"factors is \[16\]"):
        stage_digits(device, layout=layout, x=x, image=image, factors=factors[:16])


def test_the_image_has_whole_blocks_of_rows() -> None:
    int8 = tile_layout("int8", 16, 130, 64, "bfloat16")
    with_zeros = tile_layout("int4", 16, 256, 128, "bfloat16", is_symmetric=False)
    assert [tokens_of(int8, count) for count in (9, 16, 17, 32, 33, 64, 65, 256)] == [16, 16, 32, 32, 64, 64, 64, 64]
    assert [tokens_of(with_zeros, count) for count in (16, 33, 256)] == [16, 32, 32]
    # Two digits of 128 inputs and a float, two spans; of 65 rows two blocks of 64.
    assert image_bytes(int8, 9) == 2 * 16 * (2 * 128 + 4)
    assert image_bytes(int8, 65) == 2 * 2 * 64 * (2 * 128 + 4)
    int4 = tile_layout("int4", 16, 130, None, "float16", is_symmetric=False)
    assert image_bytes(int4, 32) == 2 * 32 * (2 * 128 + 8)


# Input 17 of a span. int8: lane t = 1 has the inputs 16 to 31, four in each piece. int4: lane 0 has 0 to 31, and the
# sixth piece 17, 19, 21 and 23, the odd ones of the eighth that begins at 16.
@pytest.mark.parametrize(("weight_type", "piece", "byte"), [("int8", 0, 5), ("int4", 6, 0)])
def test_the_reference_splits_into_digits_near_the_numbers(weight_type: str, piece: int, byte: int) -> None:
    """Within half of an integer; the image holds the digits of each row at the places that wgmma reads."""
    layout = tile_layout(weight_type, 16, 300, 128, "bfloat16")
    x = make_rows(20, 300)
    digits = digits_of(layout, x)
    largest = np.repeat(np.abs(digits.values).max(axis=1, keepdims=True), 300, axis=1)
    assert (np.abs(digits.values - x) <= largest / 65000).all()
    assert np.abs(digits.integers).max() == 32639
    image = digits.image(unused=0xFF)
    assert image.size == image_bytes(layout, 20)
    span_bytes, place = 32 * (2 * layout.span_inputs + 4), piece * 32 * 16 + 3 * 16 + byte
    high, low = (image[digit * 32 * layout.span_inputs + place] for digit in (0, 1))
    value = 256 * int(np.int8(high)) + int(np.int8(low))
    assert value == digits.integers[3, 0, 17]
    assert (image[span_bytes - 4 * 12 : span_bytes] == 0xFF).all()  # scales of the rows 20 to 31


def test_cost_counts_rows_once_and_two_digits_an_input() -> None:
    layout = tile_layout("int8", 64, 4096, 128, "bfloat16")
    cost = stage_digits_cost(layout, 16, has_norm=True)
    assert (cost.read_bytes, cost.stored_bytes, cost.written_bytes) == (17 * 4 * 4096, 4 * 4096, 16 * 2 * 4096)
