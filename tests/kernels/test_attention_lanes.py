"""The common refusals of attention_rows and attention_span, and their common first arguments."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kv_codes import call_lane_by_lane
from test_attention_decode import F16, F32
from test_attention_decode_launch import Recorder, host

from llmcli.kernels.attention_rings import attention_rows, attention_span
from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.attention import CODES

I32 = np.dtype(np.int32)
OWN: dict[Any, dict[str, Any]] = {
    attention_rows: {"partials": host((264, 4, 3, 68), F32), "counters": host((264,), np.uint32)},
    attention_span: {"num_spans": 2, "partials": host((9, 8, 3, 68), F32), "counters": host((9, 8), np.uint32)},
}
CODED = {name: host((9, 2, 16, 64), CODES) for name in ("keys", "values")}
SCALES = {name: host((9, 2, 16), F32) for name in ("key_scales", "value_scales")}


def launch(kernel: Any, **changes: Any) -> dict[str, Any]:
    device = Recorder()
    device.num_multiprocessors = TYPICAL_CARD.num_multiprocessors
    device.shared_bytes_per_block = TYPICAL_CARD.shared_bytes_per_block
    arguments: dict[str, Any] = {
        "qkv": host((9, 768), F32),
        "layout": QkvLayout(8, 2, 64),
        "q_norm": None,
        "k_norm": None,
        "eps": 1e-5,
        "cos_sin": host((100, 32, 2), F32),
        "rows": host((9,), I32),
        "positions": host((9,), I32),
        "page_table": host((4, 7), I32),
        "keys": host((9, 2, 16, 64), F16),
        "values": host((9, 2, 16, 64), F16),
        "window": None,
        "out": host((9, 512), F32),
    }
    call_lane_by_lane(kernel, device, {**arguments, **OWN[kernel], **changes})
    (launched,) = device.launches
    return launched


def test_blocks_of_a_short_context_have_a_multiprocessor_each() -> None:
    """Two of them do not fit; with more blocks than multiprocessors, they take what they need."""
    room = TYPICAL_CARD.shared_bytes_per_block + 1024
    few = launch(attention_span)  # 3 splits of 2 heads, of up to 8 lanes of 4 query heads, in 2 rows
    many = launch(attention_span, partials=host((9, 8, 40, 68), F32), num_spans=9)
    assert few["grid"][0] <= TYPICAL_CARD.num_multiprocessors < many["grid"][0]
    assert room // 2 < few["shared_bytes"] + 1024 <= room
    assert 3 * (many["shared_bytes"] + 1024) <= room


def moved(array: Any, num_bytes: int) -> Any:
    return SimpleNamespace(**{**vars(array), "data": SimpleNamespace(ptr=array.data.ptr + num_bytes)})


@pytest.mark.parametrize("kernel", OWN)
def test_keys_and_values_of_a_row_lie_behind_its_queries(kernel: Any) -> None:
    qkv, keys, values, stride, *_ = launch(kernel)["arguments"]
    assert (qkv.shape, stride) == ((9, 768), 768)
    assert (keys.num_bytes, values.num_bytes) == (4 * 512, 4 * (512 + 128))
    scale = launch(kernel)["arguments"][7]
    assert scale == np.float32(math.log2(math.e) / 8)
    assert launch(kernel)["arguments"][12:14] == (9, 7)  # lanes, and pages of a row


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**CODED, **SCALES, "keys": moved(CODED["keys"], 8)}, "keys is not aligned to 16 bytes"),
        ({**CODED, **SCALES, "values": moved(CODED["values"], 8)}, "values is not aligned to 16 bytes"),
        ({**CODED}, "key_scales belong to keys and values of uint8"),
        ({"q_norm": host((32,), F32)}, r"q_norm is \[32\], expected \[64\]"),
        ({"k_norm": host((64,), F16)}, "k_norm"),
        ({"rows": host((8,), I32)}, r"rows is \[8\], expected \[9\]"),
        ({"cos_sin": host((113, 32, 2), F32)}, "113 positions, a row's pages have room for 112"),
        ({"layout": QkvLayout(8, 2, 68)}, "head_dim is 68"),
        ({"window": 0}, "a window of 0 tokens"),
        ({"out": host((9, 511), F32)}, r"out is \[9, 511\], expected \[9, 512\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(kernel: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch(kernel, **changes)


def test_a_span_has_lanes_of_its_own() -> None:
    for num_spans in (0, 10):
        with pytest.raises(ValueError, match=f"of as many rows at most, got 9, {num_spans}"):
            launch(attention_span, num_spans=num_spans)
    with pytest.raises(ValueError, match="too small for 9 lanes"):
        launch(attention_span, partials=host((8, 8, 3, 68), F32))
    with pytest.raises(ValueError, match="does not take"):
        launch(attention_span, **{name: host((9, 2, 16, 64), F32) for name in ("keys", "values")})
    with pytest.raises(ValueError, match="too small for 9 lanes"):
        launch(attention_span, counters=host((8, 8), np.uint32))
