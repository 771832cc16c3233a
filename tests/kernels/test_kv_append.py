"""kv_append: each key and value rounded once, at its place, and nothing else written."""

import numpy as np
import pytest
from right import assert_right

from llmcli.kernels.compiler import compile_kernels
from llmcli.kernels.device import Device
from llmcli.kernels.kv_append import kv_append_cost
from llmcli.kernels.qkv import PAGE_TOKENS, QkvLayout
from llmcli.kernels.sources import flatten
from llmcli.lab.cases.kv_append import case
from llmcli.lab.kv_cache import CODES

KINDS = pytest.mark.parametrize(
    "dtype",
    [np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint16), CODES],
    ids=["fp32", "fp16", "bf16", "codes"],
)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("num_key_value_heads", [1, 3, 8])
def test_first_and_last_places(device: Device, dtype: np.dtype, head_dim: int, num_key_value_heads: int) -> None:
    assert_right(device, case(QkvLayout(24, num_key_value_heads, head_dim), dtype, [0, 99], 100))


@pytest.mark.cuda
@KINDS
def test_a_chunk_of_prefill(device: Device, dtype: np.dtype) -> None:
    assert_right(device, case(QkvLayout(8, 2, 64), dtype, list(range(7, 137)), 200))


@pytest.mark.usefixtures("nvrtc")
def test_host_and_kernels_agree_on_the_size_of_a_page() -> None:
    source = flatten("kv_append") + f'static_assert(PAGE_TOKENS == {PAGE_TOKENS}, "");\n'
    compile_kernels(source, "kv_append", ["kv_append<float, 64>"], "sm_90")


def test_cost() -> None:
    cost = kv_append_cost(10, QkvLayout(8, 2, 64), 2)
    assert (cost.read_bytes, cost.written_bytes) == (2 * 10 * 128 * 4, 2 * 10 * 128 * 2)
    assert kv_append_cost(10, QkvLayout(8, 2, 64), 1).written_bytes == 2 * 10 * (128 + 2 * 4)
