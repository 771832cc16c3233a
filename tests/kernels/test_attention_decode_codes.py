"""attention_decode with a cache of codes: scales of any size, vectors of zeros, NaN."""

import numpy as np
import pytest
from kv_codes import in_rows
from test_attention_decode import LLAMA, Result, run, verify

from llmcli.kernels.device import Device
from llmcli.lab.attention import CODES, NewTokens, Stored, new_tokens, stored


def caches(problem: NewTokens, result: Result) -> list[Stored]:
    """Keys and values of each row, in order."""
    seq_len = problem.keys.elements.shape[2]
    return [in_rows(pages, problem.table, seq_len) for pages in (result.keys, result.values)]


@pytest.mark.cuda
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e3, 1e6])
def test_scales_of_any_size(device: Device, magnitude: float) -> None:
    """Values of codes from too small for fp16 to the largest that it holds; larger ones are cut off."""
    problem = new_tokens(LLAMA, CODES, [260, 3], rotary=False)
    problem.qkv[:, LLAMA.k_offset :] *= np.float32(magnitude)
    assert problem.values.scales is not None
    problem.values.scales[...] *= np.float32(min(magnitude, 1e4))
    result = run(device, problem)[0]
    assert np.isfinite(result.out).all()
    if magnitude <= 1e3:
        verify(problem, result)
        return
    keys, values = caches(problem, result)
    for index, (row, position) in enumerate(zip(problem.rows, problem.positions, strict=True)):
        for cache, offset in ((keys, LLAMA.k_offset), (values, LLAMA.v_offset)):
            new = problem.qkv[index, offset : offset + LLAMA.kv_size].reshape(-1, LLAMA.head_dim)
            assert cache[row, :, position].tobytes() == stored(new, CODES).tobytes()


@pytest.mark.cuda
def test_a_vector_of_zeros_has_the_scale_zero(device: Device) -> None:
    problem = new_tokens(LLAMA, CODES, [40, 0])
    problem.qkv[:, LLAMA.k_offset :] = 0.0
    result = run(device, problem)[0]
    verify(problem, result)
    keys, values = caches(problem, result)
    for row, position in zip(problem.rows, problem.positions, strict=True):
        assert not keys[row, :, position].scales.any()
        assert not values[row, :, position].values.any()


@pytest.mark.cuda
@pytest.mark.parametrize("offset", [LLAMA.k_offset, LLAMA.v_offset], ids=["key", "value"])
def test_nan_is_not_hidden_by_codes(device: Device, offset: int) -> None:
    problem = new_tokens(LLAMA, CODES, [40, 7], rotary=False)
    problem.qkv[0, offset + 3] = np.nan
    out = run(device, problem)[0].out.reshape(2, LLAMA.num_attention_heads, -1)
    assert np.isnan(out[0, : LLAMA.group_size]).all()
    assert np.isfinite(out[0, LLAMA.group_size :]).all()
    assert np.isfinite(out[1]).all()
