"""gemm_packed against float64 of the stored weights: formats, numbers of tokens, tails; and equal bits."""

from typing import Any

import numpy as np
import pytest
from fenced import assert_same_bits, fenced
from right import assert_right
from uploaded import upload

from llmcli.kernels.device import Device
from llmcli.kernels.gemm_packed import choose_tiling, gemm_packed, gemm_packed_cost, takes
from llmcli.kernels.tiles import tile_layout
from llmcli.lab.cases.gemm import PACKED_FORMATS, activations, packed_case
from llmcli.lab.matrices import StoredMatrix, random_matrix, tiles_of


def run(device: Device, stored: StoredMatrix, x: np.ndarray) -> Any:
    import cupy

    matrix = upload(tiles_of(stored))
    wide = cupy.full((len(x), x.shape[1] + 8), np.nan, dtype=np.float16)  # what follows a row is not read
    wide[:, : x.shape[1]] = cupy.asarray(x)
    result = fenced((len(x), stored.values.shape[0]), np.float32)
    gemm_packed(device, matrix=matrix, x=wide[:, : x.shape[1]], out=result.array)
    device.synchronize()
    result.check()
    return result.array


@pytest.mark.cuda
@pytest.mark.parametrize(("num_rows", "num_inputs"), [(16, 40), (35, 72), (100, 176), (130, 1000)])
@pytest.mark.parametrize("form", PACKED_FORMATS, ids=lambda form: "-".join(str(value) for value in form.values()))
def test_formats_and_tails(device: Device, form: dict[str, Any], num_rows: int, num_inputs: int) -> None:
    assert_right(device, packed_case(random_matrix(1, num_rows=num_rows, num_inputs=num_inputs, **form), 5))


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 8, 16, 17, 32, 33, 64, 65, 130])
@pytest.mark.parametrize("form", [PACKED_FORMATS[1], PACKED_FORMATS[4], PACKED_FORMATS[6]])
def test_numbers_of_tokens(device: Device, form: dict[str, Any], num_tokens: int) -> None:
    assert_right(device, packed_case(random_matrix(2, num_rows=72, num_inputs=520, **form), num_tokens))


@pytest.mark.cuda
@pytest.mark.parametrize("form", [PACKED_FORMATS[1], PACKED_FORMATS[5]])
def test_a_real_shape_with_equal_bits(device: Device, form: dict[str, Any]) -> None:
    stored = random_matrix(3, num_rows=512, num_inputs=4096, **form)
    assert_right(device, packed_case(stored, 64))
    x = activations(40, 4096)
    assert_same_bits(lambda: run(device, stored, x))


@pytest.mark.cuda
@pytest.mark.parametrize("form", PACKED_FORMATS, ids=lambda form: "-".join(str(value) for value in form.values()))
def test_a_tokens_bits_do_not_depend_on_the_others(device: Device, form: dict[str, Any]) -> None:
    stored = random_matrix(5, num_rows=80, num_inputs=1160, **form)
    x = activations(64, 1160)
    whole = run(device, stored, x).get()
    for num_tokens in range(1, 64):
        for begin in {0, 64 - num_tokens}:
            part = run(device, stored, x[begin : begin + num_tokens]).get()
            assert part.tobytes() == whole[begin : begin + num_tokens].tobytes(), (num_tokens, begin)


@pytest.mark.cuda
def test_wrong_arrays_are_refused(device: Device) -> None:
    import cupy

    matrix = upload(tiles_of(random_matrix(4, "int8", 32, 64)))
    x, out = cupy.zeros((2, 68), dtype=np.float16), cupy.zeros((2, 32), dtype=np.float32)
    with pytest.raises(ValueError, match="rows of x are 136 bytes apart"):
        gemm_packed(device, matrix=matrix, x=x[:, :64], out=out)
    with pytest.raises(ValueError, match="out has 16 columns"):
        gemm_packed(device, matrix=matrix, x=cupy.zeros((2, 64), dtype=np.float16), out=out[:, :16])
    small = upload(tiles_of(random_matrix(4, "int8", 32, 64, 32)))
    with pytest.raises(ValueError, match="does not take"):
        gemm_packed(device, matrix=small, x=x[:, :64], out=out)


def test_what_it_takes() -> None:
    assert takes(tile_layout("int8", 64, 4096, 64, "float16"))
    assert takes(tile_layout("int4", 64, 4096, None, "float16", is_symmetric=False))
    assert not takes(tile_layout("int4", 64, 4096, 64, "float16"))
    assert not takes(tile_layout("int8", 64, 1001, None, "float16"))
    assert not takes(tile_layout("float16", 64, 4096))


@pytest.mark.parametrize("shared_bytes", [101376, 166912, 232448])
@pytest.mark.parametrize("weight_type", ["int8", "int4"])
def test_tilings_fit_their_card(weight_type: str, shared_bytes: int) -> None:
    layout = tile_layout(weight_type, 4096, 4096, 128, "float32", is_symmetric=False)
    for num_tokens in (1, 16, 17, 64, 65, 2048):
        tiles, stages = choose_tiling(layout, num_tokens, shared_bytes)
        assert stages >= 2
        assert tiles == (2 if num_tokens <= 16 else 4 if num_tokens <= 64 else 8)


def test_cost() -> None:
    layout = tile_layout("int8", 4096, 4096, 128, "float16")
    cost = gemm_packed_cost(layout=layout, num_tokens=32)
    assert cost.read_bytes == layout.num_bytes + 2 * 32 * 4096
    assert cost.flops == 2 * 32 * 4096 * 4096
