"""dequantize against float64 of the stored weights, and its rounding bit by bit."""

from typing import Any

import numpy as np
import pytest
from fenced import assert_within, fenced, to_float64, to_host
from tiled import random_matrix, tiles_of, upload

from llmcli.kernels.dequantize import ACTIVATION_DTYPES, dequantize, dequantize_cost
from llmcli.kernels.device import Device
from llmcli.kernels.tiles import tile_layout

FORMATS: list[dict[str, Any]] = [
    {"weight_type": "int8", "scale_type": "float32"},
    {"weight_type": "int8", "scale_type": "bfloat16", "group_size": 32},
    {"weight_type": "int8", "scale_type": "float16", "group_size": 8, "is_symmetric": False},
    {"weight_type": "int8", "scale_type": "float16", "is_symmetric": False},
    {"weight_type": "int4", "scale_type": "float16", "group_size": 128},
    {"weight_type": "int4", "scale_type": "float32", "group_size": 16, "is_symmetric": False},
    {"weight_type": "int4", "scale_type": "bfloat16"},
    {"weight_type": "float16"},
    {"weight_type": "bfloat16"},
    {"weight_type": "float32"},
]


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(16, 40), (35, 72), (48, 176), (40, 1001), (16, 7)])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: "-".join(str(value) for value in form.values()))
def test_all_tiles(device: Device, form: dict[str, Any], shape: tuple[int, int]) -> None:
    stored = random_matrix(1, num_rows=shape[0], num_inputs=shape[1], **form)
    matrix = upload(tiles_of(stored))
    dtype = ACTIVATION_DTYPES[form["weight_type"]]
    result = fenced((matrix.layout.padded_rows, shape[1]), dtype)
    dequantize(device, matrix=matrix, first_tile=0, num_tiles=matrix.layout.num_tiles, out=result.array)
    device.synchronize()
    result.check()
    rows = to_host(result.array)
    if form["weight_type"] in ("float16", "float32"):
        assert np.array_equal(rows[: shape[0]], stored.values)
    elif form["weight_type"] == "bfloat16":
        values = to_float64(stored.values)
        # The 8 bits of bfloat16 fit into float16, but below its smallest normal number they become fewer.
        assert_within(rows[: shape[0]], values, np.where(np.abs(values) < 2.0**-17, 2.0**-25, 0))
    else:
        weights = stored.weights
        # Half an ulp, also below the smallest normal number; then the rounding to float32 in front of it.
        assert_within(rows[: shape[0]], weights, (2.0**-11 + 2.0**-23) * np.abs(weights) + 2.0**-25)
    assert not to_float64(rows[shape[0] :]).any()


@pytest.mark.cuda
def test_bfloat16_as_it_is(device: Device) -> None:
    stored = random_matrix(3, num_rows=40, num_inputs=72, weight_type="bfloat16")
    result = fenced((48, 72), np.uint16)
    dequantize(device, matrix=upload(tiles_of(stored)), first_tile=0, num_tiles=3, out=result.array)
    device.synchronize()
    result.check()
    assert np.array_equal(to_host(result.array)[:40], stored.values)


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMATS[:7:3])
def test_some_tiles_into_wider_rows(device: Device, form: dict[str, Any]) -> None:
    stored = random_matrix(2, num_rows=96, num_inputs=100, **form)
    matrix = upload(tiles_of(stored))
    whole, part = fenced((96, 100), np.float16), fenced((32, 104), np.float16)
    dequantize(device, matrix=matrix, first_tile=0, num_tiles=6, out=whole.array)
    dequantize(device, matrix=matrix, first_tile=3, num_tiles=2, out=part.array[:, :100])
    device.synchronize()
    part.check()
    rows = to_host(part.array).view(np.uint16)
    np.testing.assert_array_equal(rows[:, :100], to_host(whole.array).view(np.uint16)[48:80])
    assert (rows[:, 100:] == 0xFFFF).all()  # untouched


@pytest.mark.cuda
def test_wrong_arrays_are_refused(device: Device) -> None:
    import cupy

    matrix = upload(tiles_of(random_matrix(3, "int8", 32, 64)))
    out = cupy.zeros((16, 64), dtype=np.float32)
    with pytest.raises(ValueError, match="dequantize: out is float32, expected float16"):
        dequantize(device, matrix=matrix, first_tile=0, num_tiles=1, out=out)
    with pytest.raises(ValueError, match="tiles 1 to 3 of 2"):
        dequantize(device, matrix=matrix, first_tile=1, num_tiles=2, out=out)


def test_cost() -> None:
    layout = tile_layout("int4", 64, 256, 128, "float16")
    cost = dequantize_cost(layout=layout, num_tiles=2, itemsize=2)
    assert cost.read_bytes == 2 * (2 * 1024 + 2 * 16 * 2)
    assert cost.written_bytes == 32 * 256 * 2
