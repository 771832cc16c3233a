"""kv_append: each key and value rounded once, at its place, and nothing else written."""

import numpy as np
import pytest
from kv_codes import CODES, cache_arguments, fenced_cache, page_table, paged, stored

from llmcli.kernels.compiler import compile_kernels
from llmcli.kernels.device import Device
from llmcli.kernels.kv_append import kv_append, kv_append_cost
from llmcli.kernels.qkv import PAGE_TOKENS, QkvLayout
from llmcli.kernels.sources import flatten

KINDS = pytest.mark.parametrize(
    "dtype",
    [np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint16), CODES],
    ids=["fp32", "fp16", "bf16", "codes"],
)


def check(device: Device, layout: QkvLayout, dtype: np.dtype, positions: list[int], max_seq_len: int) -> None:
    import cupy

    row, num_rows = 1, 3
    generator = np.random.default_rng(len(positions))
    qkv = (10.0 ** generator.uniform(-6, 4, (len(positions), layout.width + 4))).astype(np.float32)
    qkv *= generator.choice([-1.0, 1.0], qkv.shape)
    qkv[0, layout.k_offset : layout.k_offset + layout.head_dim] = 0.0
    table = page_table(num_rows, max_seq_len)
    shape = (num_rows, layout.num_key_value_heads, max_seq_len, layout.head_dim)
    nothing = stored(np.zeros(shape, np.float32), dtype)
    nothing.poison((slice(None),))
    pages_shape = paged(nothing, table).elements.shape
    caches = [fenced_cache(pages_shape, dtype) for _ in range(2)]
    kv_append(
        device,
        qkv=cupy.asarray(qkv)[:, : layout.width],
        layout=layout,
        pages=cupy.asarray(table[row]),
        positions=cupy.asarray(np.array(positions, np.int32)),
        **cache_arguments(*caches),
    )
    device.synchronize()
    for cache, offset in zip(caches, (layout.k_offset, layout.v_offset), strict=True):
        cache.check()
        expected = nothing.copy()
        for index, position in enumerate(positions):
            token = qkv[index, offset : offset + layout.kv_size].reshape(-1, layout.head_dim)
            expected[row, :, position] = stored(token, dtype)
        assert cache.download().tobytes() == paged(expected, table).tobytes()


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("num_key_value_heads", [1, 3, 8])
def test_first_and_last_places(device: Device, dtype: np.dtype, head_dim: int, num_key_value_heads: int) -> None:
    check(device, QkvLayout(24, num_key_value_heads, head_dim), dtype, [0, 99], 100)


@pytest.mark.cuda
@KINDS
def test_a_chunk_of_prefill(device: Device, dtype: np.dtype) -> None:
    check(device, QkvLayout(8, 2, 64), dtype, list(range(7, 137)), 200)


@pytest.mark.usefixtures("nvrtc")
def test_host_and_kernels_agree_on_the_size_of_a_page() -> None:
    source = flatten("kv_append") + f'static_assert(PAGE_TOKENS == {PAGE_TOKENS}, "");\n'
    compile_kernels(source, "kv_append", ["kv_append<float, 64>"], "sm_90")


def test_cost() -> None:
    cost = kv_append_cost(10, QkvLayout(8, 2, 64), 2)
    assert (cost.read_bytes, cost.written_bytes) == (2 * 10 * 128 * 4, 2 * 10 * 128 * 2)
    assert kv_append_cost(10, QkvLayout(8, 2, 64), 1).written_bytes == 2 * 10 * (128 + 2 * 4)
