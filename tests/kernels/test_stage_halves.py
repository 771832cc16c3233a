"""stage_halves against pairs by NumPy, byte for byte: odd sizes, and the ends of float32."""

import numpy as np
import pytest
from fenced import Fenced, fenced, to_host
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.kernels.stage_halves import image_bytes, stage_halves, stage_halves_cost, tokens_of
from llmcli.kernels.tiles import TileLayout, tile_layout
from llmcli.lab.cases.stage_digits import make_rows
from llmcli.lab.cases.stage_halves import TYPES, problem_of
from llmcli.lab.rows import halves_of


def stage(device: Device, layout: TileLayout, x: np.ndarray) -> Fenced:
    """The image between canaries; unwritten bytes are 0xFF."""
    import cupy

    image, factors = fenced(image_bytes(layout, len(x)), np.uint8), fenced(len(x), np.float32)
    stage_halves(device, layout=layout, x=cupy.asarray(x), image=image.array, factors=factors.array)
    device.synchronize()
    image.check()
    factors.check()
    return image


@pytest.mark.cuda
@pytest.mark.parametrize("num_inputs", [8, 31, 65, 1000, 14336])
@pytest.mark.parametrize("weight_type", TYPES)
def test_tails_of_units(device: Device, weight_type: str, num_inputs: int) -> None:
    assert_right(device, problem_of(tile_layout(weight_type, 16, num_inputs, scale_type=TYPES[weight_type]), 9))


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", [9, 15, 16, 17, 32, 33, 63, 64, 65, 128, 129, 257])
@pytest.mark.parametrize("weight_type", TYPES)
def test_numbers_of_rows(device: Device, weight_type: str, num_rows: int) -> None:
    assert_right(device, problem_of(tile_layout(weight_type, 16, 520, scale_type=TYPES[weight_type]), num_rows))


@pytest.mark.cuda
def test_what_is_no_number_stays_in_its_row(device: Device) -> None:
    layout = tile_layout("bfloat16", 16, 64)
    x = make_rows(9, 64)
    x[4:6, 5] = np.float32([np.nan, np.inf])
    pairs = to_host(stage(device, layout, x).array).view(np.uint16).reshape(2, 4, 16, 2, 4, 2)[:, :, :9]
    not_finite = (pairs & 0x7F80) == 0x7F80  # of [unit, piece, row, half, t, 2]
    assert not_finite[:, :, 4:6].any()
    assert not np.delete(not_finite, [4, 5], axis=2).any()


@pytest.mark.cuda
def test_wrong_arrays_are_refused(device: Device) -> None:
    import cupy

    layout = tile_layout("bfloat16", 16, 128)
    x, factors = cupy.zeros((17, 128), np.float32), cupy.zeros(17, np.float32)
    image = cupy.zeros(image_bytes(layout, 17), np.uint8)
    with pytest.raises(ValueError, match=r"x is \[17, 64\]"):
        stage_halves(device, layout=layout, x=x[:, :64], image=image, factors=factors)
    with pytest.raises(ValueError, match="image has"):
        stage_halves(device, layout=layout, x=x, image=image[:-1], factors=factors)
    with pytest.raises(ValueError, match=r"factors is \[16\]"):
        stage_halves(device, layout=layout, x=x, image=image, factors=factors[:16])


def test_the_image_has_whole_blocks_of_rows() -> None:
    bf16, fp16 = (tile_layout(weight_type, 16, 130) for weight_type in ("bfloat16", "float16"))
    expected = [16, 16, 32, 32, 64, 64, 128, 128, 128]
    counts = (9, 16, 17, 32, 33, 64, 65, 128, 257)
    assert [tokens_of(bf16, count) for count in counts] == expected
    fp8 = tile_layout("fp8", 16, 130, scale_type="float32")
    assert [tokens_of(fp8, count) for count in counts] == [min(tokens, 64) for tokens in expected]
    # Two numbers of two bytes for each of 32 inputs, five units; a float as well with fp16.
    assert image_bytes(bf16, 9) == 5 * 16 * 4 * 32
    assert image_bytes(bf16, 129) == 2 * 5 * 128 * 4 * 32
    assert image_bytes(fp16, 9) == 5 * 16 * (4 * 32 + 4)
    assert image_bytes(fp8, 65) == 2 * 4 * 64 * (4 * 64 + 4)  # two units for each of two spans


@pytest.mark.parametrize(("weight_type", "error"), [("float16", 2.0**-22), ("bfloat16", 2.0**-17)])
def test_the_reference_splits_into_pairs_near_the_numbers(weight_type: str, error: float) -> None:
    """And its image holds both numbers at the places that wgmma reads."""
    layout = tile_layout(weight_type, 16, 100)
    x = make_rows(20, 100)
    halves = halves_of(layout, x)
    largest = np.abs(np.pad(x, ((0, 0), (0, 28)))).reshape(20, 4, 32).max(axis=2).repeat(32, axis=1)[:, :100]
    assert (np.abs(halves.values - x) <= error * np.abs(x) + 2.0**-39 * largest).all()
    image = halves.image(unused=0xFF)
    assert image.size == image_bytes(layout, 20)
    # Input 32 + 8 * 2 + 5 of row 3: the second unit, lane t = 2, its third pair of inputs, the second of them.
    unit_bytes = 32 * (4 * 32 + (4 if weight_type == "float16" else 0))
    for column, half in ((6, halves.hi), (7, halves.lo)):
        place = unit_bytes + 2 * 16 * 64 + column * 16 + 4 * 2 + 2
        assert image[place : place + 2].tobytes() == half[3, 1, 21].tobytes()
    assert (image[unit_bytes - 48 : unit_bytes] == 0xFF).all()  # of rows from 20 on


def test_the_reference_splits_into_pairs_for_8_bit_floats() -> None:
    """One scale for the two units of a span; a unit's part is half of a lane's sixteen inputs."""
    layout = tile_layout("fp8", 16, 200, scale_type="float32")
    x = make_rows(20, 200)
    halves = halves_of(layout, x)
    largest = np.abs(np.pad(x, ((0, 0), (0, 56)))).reshape(20, 2, 128).max(axis=2).repeat(128, axis=1)[:, :200]
    assert (np.abs(halves.values - x) <= 2.0**-22 * np.abs(x) + 2.0**-39 * largest).all()
    assert (halves.inverses[:, 0] == halves.inverses[:, 1]).all()
    image = halves.image(unused=0xFF)
    assert image.size == image_bytes(layout, 20)
    # Input 64 + 16 * 2 + 8 + 5 of row 3: the second unit, lane t = 2, its second part, its third pair of inputs.
    place = 32 * (4 * 64 + 4) + (4 + 2) * 16 * 64 + 6 * 16 + 4 * 2 + 2
    assert image[place : place + 2].tobytes() == halves.hi[3, 1, 45].tobytes()


def test_cost_counts_rows_once_and_four_bytes_an_input() -> None:
    layout = tile_layout("bfloat16", 64, 4096)
    cost = stage_halves_cost(layout, 16, has_norm=True)
    assert (cost.read_bytes, cost.stored_bytes, cost.written_bytes) == (17 * 4 * 4096, 4 * 4096, 16 * 4 * 4096)
