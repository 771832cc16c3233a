"""stage_wide against rounded rows by NumPy, plain or in the order of wide_image.cuh; without a norm bit for bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fenced import fenced, to_host
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.kernels.phantom import Phantom
from llmcli.kernels.stage_wide import SPEC, UNIT_INPUTS, image_bytes, num_steps, stage_wide, stage_wide_cost
from llmcli.lab.cases.gemm import EPS, stage_case
from llmcli.lab.notes import Notes
from llmcli.lab.rows import image_of


@pytest.mark.cuda
@pytest.mark.parametrize("num_inputs", [1, 8, 31, 64, 65, 127, 128, 129, 1000, 4096, 14336])
@pytest.mark.parametrize("unit_inputs", [0, *UNIT_INPUTS])
def test_tails_of_steps(device: Device, unit_inputs: int, num_inputs: int) -> None:
    for has_norm in (True, False):
        for num_parts in (0, 3):
            assert_right(device, stage_case(unit_inputs, 6, num_inputs, has_norm, num_parts))
    assert_right(device, stage_case(unit_inputs, 6, num_inputs, has_norm=False, dtype=np.float16))


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 2, 127, 128, 129, 255, 256, 257, 513])
@pytest.mark.parametrize("unit_inputs", [0, *UNIT_INPUTS])
def test_numbers_of_tokens(device: Device, unit_inputs: int, num_tokens: int) -> None:
    assert_right(device, stage_case(unit_inputs, num_tokens, 520))
    assert_right(device, stage_case(unit_inputs, num_tokens, 520, num_parts=1))


@pytest.mark.cuda
def test_what_is_no_number_stays_in_its_token(device: Device) -> None:
    import cupy

    x = np.ones((9, 128), np.float32)
    x[4:6, 5] = np.float32([np.nan, np.inf])
    image, row_scales = fenced(image_bytes(128, 9), np.uint8), fenced(9, np.float32)
    stage_wide(device, x=cupy.asarray(x), unit_inputs=64, out=image.array, row_scales=row_scales.array, eps=EPS)
    device.synchronize()
    image.check()
    values = to_host(image.array).view(np.float16).reshape(2, 128, 64)[:, :9]
    assert not np.isfinite(values[:, 4:6]).all(axis=(0, 2)).any()
    assert np.isfinite(np.delete(values, [4, 5], axis=1)).all()


# Without a card


@pytest.mark.parametrize("unit_inputs", UNIT_INPUTS)
@pytest.mark.parametrize("num_tokens", [1, 128, 129, 300])
def test_every_input_of_a_token_has_a_place_of_its_own(unit_inputs: int, num_tokens: int) -> None:
    """Each eight tokens of a step fill all banks of shared memory: their 16 bytes number i lie in eight places."""
    num_inputs = 200
    numbers = np.arange(1, num_tokens * num_inputs + 1, dtype=np.float64).reshape(num_tokens, num_inputs)
    image = image_of(numbers, unit_inputs, np.float64)
    assert len(image) == image_bytes(num_inputs, num_tokens) // 2
    assert sorted(image[image > 0]) == sorted(numbers.reshape(-1))
    first = image.reshape(-1, 128, 64)[0, : min(num_tokens, 8)]
    pieces = [int(np.flatnonzero(row == numbers[token, 0])[0]) // 8 for token, row in enumerate(first)]
    assert len(set(pieces)) == len(pieces)


@pytest.mark.parametrize(
    ("unit_inputs", "first_input"),
    [
        (64, lambda half, s, t: 64 * half + 16 * t + 4 * s),
        (128, lambda half, s, t: 32 * t + 16 * half + 4 * s),
        (32, lambda half, s, t: 64 * half + s // 2 * 32 + 8 * t + s % 2 * 4),
    ],
)
def test_a_lane_of_the_tensor_cores_finds_its_weights_inputs(
    unit_inputs: int, first_input: Callable[[int, int, int], int]
) -> None:
    """The k-step s gives lane t the positions 2t, 2t + 1, 2t + 8 and 2t + 9; tiles give it these inputs."""
    rows = np.arange(1, 129, dtype=np.float64)[None]
    steps = image_of(rows, unit_inputs, np.float64).reshape(2, 128, 64)[:, 0] - 1
    for half in range(2):
        for s in range(4):
            for t in range(4):
                found = steps[half, 16 * s + np.array([2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9])]
                assert found.tolist() == [first_input(half, s, t) + i for i in range(4)]


def test_images_have_whole_blocks_of_tokens_and_whole_spans() -> None:
    assert [num_steps(count) for count in (1, 128, 129, 4096)] == [2, 2, 4, 64]
    assert image_bytes(100, 128) == 128 * 128 * 2
    assert image_bytes(100, 129) == 256 * 128 * 2
    assert image_bytes(4096, 2048) == 2048 * 4096 * 2


def arguments() -> dict[str, Any]:
    return {
        "x": Phantom((9, 200), np.float32, 1 << 20),
        "unit_inputs": 64,
        "out": Phantom((image_bytes(200, 9),), np.uint8, 2 << 20),
        "row_scales": Phantom((9,), np.float32, 3 << 20),
        "norm_weight": Phantom((200,), np.float32, 4 << 20),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": Phantom((16,), np.uint8, 1 << 30)}, "out has 16 bytes"),
        ({"out": Phantom((9, 200), np.float16, 1 << 30), "unit_inputs": 0}, r"out is \[9, 200\], expected \[9, 256\]"),
        ({"row_scales": Phantom((8,), np.float32, 1 << 30)}, r"row_scales is \[8\]"),
        ({"norm_weight": Phantom((100,), np.float32, 1 << 30)}, r"norm_weight is \[100\]"),
        ({"parts": Phantom((2, 9, 100), np.float32, 1 << 30)}, r"parts is \[2, 9, 100\]"),
        (
            {"x": Phantom((9, 200), np.float16, 1 << 30), "parts": Phantom((2, 9, 200), np.float32, 1 << 30)},
            "x is float16",
        ),
    ],
)
def test_wrong_arrays_are_refused(change: dict[str, Any], message: str) -> None:
    notes: Any = Notes()
    stage_wide(notes, **arguments())
    assert notes.launches[0].grid == (9,)
    assert notes.launches[0].name in SPEC.variants
    with pytest.raises(ValueError, match=message):
        stage_wide(notes, **{**arguments(), **change})


def test_cost() -> None:
    cost = stage_wide_cost(num_tokens=3, num_inputs=200, has_norm=True)
    assert (cost.read_bytes, cost.written_bytes, cost.stored_bytes) == (4 * 800, 3 * (2 * 256 + 4), 800)
    parts = stage_wide_cost(num_tokens=3, num_inputs=200, has_norm=True, num_parts=2)
    assert (parts.read_bytes - cost.read_bytes, parts.written_bytes - cost.written_bytes) == (4 * 2 * 600, 4 * 600)
