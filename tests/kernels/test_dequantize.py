"""dequantize against float64 of the stored weights, and its rounding bit by bit."""

from typing import Any

import numpy as np
import pytest
from fenced import fenced, to_host
from right import assert_right
from uploaded import upload

from llmcli.kernels.dequantize import dequantize, dequantize_cost
from llmcli.kernels.device import Device
from llmcli.kernels.tiles import tile_layout
from llmcli.lab.cases.weights import FORMATS, dequantize_case
from llmcli.lab.matrices import random_matrix, tiles_of


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(16, 40), (35, 72), (48, 176), (40, 1001), (16, 7)])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: "-".join(str(value) for value in form.values()))
def test_all_tiles(device: Device, form: dict[str, Any], shape: tuple[int, int]) -> None:
    assert_right(device, dequantize_case(form, *shape))


@pytest.mark.cuda
def test_bfloat16_as_it_is(device: Device) -> None:
    form = {"weight_type": "bfloat16"}
    assert_right(device, dequantize_case(form, 40, 72, dtype=np.uint16))


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
