"""The launches and refusals of attention_decode, without a card."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kv_codes import call_lane_by_lane

from llmcli.kernels.attention_decode import attention_decode
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.attention import CODES

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
LLAMA = QkvLayout(8, 2, 64)


class Recorder:
    """A stand-in for a card: records launches."""

    def __init__(self, num_multiprocessors: int = 132) -> None:
        self.num_multiprocessors = num_multiprocessors
        self.launches: list[dict[str, Any]] = []

    def launch(self, stem: str, name: str, **details: Any) -> None:
        self.launches.append({"stem": stem, "name": name, **details})


def host(shape: tuple[int, ...], dtype: Any) -> Any:
    array = np.zeros(shape, dtype)
    address = SimpleNamespace(ptr=4096)
    return SimpleNamespace(dtype=array.dtype, shape=shape, strides=array.strides, nbytes=array.nbytes, data=address)


def call(device: Any, **changes: Any) -> None:
    arguments: dict[str, Any] = {
        "qkv": host((2, LLAMA.width), F32),
        "layout": LLAMA,
        "q_norm": None,
        "k_norm": None,
        "eps": 1e-5,
        "cos_sin": host((100, 32, 2), F32),
        "rows": host((2,), np.int32),
        "positions": host((2,), np.int32),
        "page_table": host((3, 7), np.int32),
        "keys": host((9, 2, 16, 64), F16),
        "values": host((9, 2, 16, 64), F16),
        "window": None,
        "is_cached": False,
        "partials": host((4, 8, 3, 68), F32),
        "counters": host((4, 2), np.uint32),
        "out": host((2, 512), F32),
    }
    call_lane_by_lane(attention_decode, device, {**arguments, **changes})


def test_launch() -> None:
    recorder = Recorder()
    call(recorder)
    scales = {name: host((9, 2, 16), F32) for name in ("key_scales", "value_scales")}
    call(recorder, **{name: host((9, 2, 16, 64), CODES) for name in ("keys", "values")}, **scales)
    assert [launch["name"] for launch in recorder.launches] == [
        "attention_decode<__half, 64, 8, 3>",
        "attention_decode<KvCode, 64, 8, 4>",
    ]
    for launch, threads in zip(recorder.launches, (384, 512), strict=True):
        assert (launch["grid"], launch["block"]) == ((3, 2, 2), threads)  # a long row has a split a block
        assert launch["shared_bytes"] == threads // 32 * 8 * 66 * 4
        assert launch["overlaps"]


def test_blocks_have_one_split_where_lanes_and_heads_would_not_fit_the_card() -> None:
    fits, does_not = Recorder(num_multiprocessors=4), Recorder(num_multiprocessors=3)
    for recorder in (fits, does_not):  # two lanes of two heads
        call(recorder)
    assert (fits.launches[0]["grid"], fits.launches[0]["block"]) == ((1, 2, 2), 384)  # three splits in one block
    assert (does_not.launches[0]["grid"], does_not.launches[0]["block"]) == ((3, 2, 2), 128)
    assert does_not.launches[0]["name"] == "attention_decode<__half, 64, 8, 1>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": QkvLayout(8, 3, 64)}, "8 query heads do not share 3"),
        ({"layout": QkvLayout(8, 2, 66)}, "head_dim is 66"),
        ({"window": 0}, "a window of 0 tokens"),
        ({"cos_sin": host((113, 32, 2), F32)}, "cos_sin has 113 positions, a row's pages have room for 112"),
        ({"cos_sin": host((100, 31, 2), F32)}, r"cos_sin is \[100, 31, 2\]"),
        ({"keys": host((9, 2, 32, 64), F16)}, r"keys is \[9, 2, 32, 64\], expected \[any, 2, 16, 64\]"),
        ({"page_table": host((3, 7), np.int64)}, "page_table is int64"),
        ({"values": host((9, 2, 16, 64), F32)}, "values is float32, expected float16"),
        ({"keys": host((9, 2, 16, 64), np.int8)}, "keys is int8"),
        ({name: host((9, 2, 16, 64), np.uint8) for name in ("keys", "values")}, "key_scales belong to"),
        ({"key_scales": host((9, 2, 16), F32)}, "key_scales belong to keys and values of uint8, which are float16"),
        ({"rows": host((3,), np.int32)}, r"rows is \[3\], expected \[2\]"),
        ({"partials": host((1, 8, 3, 68), F32)}, "too small for 2 lanes"),
        ({"q_norm": host((32,), F32)}, r"q_norm is \[32\], expected \[64\]"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Recorder(), **changes)
