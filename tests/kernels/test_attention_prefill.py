"""attention_prefill against float64: chunks, windows, groups, sizes, and what it must not read."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fenced import assert_same_bits
from kv_codes import prompt_inputs
from prefill_problem import Problem

from llmcli.kernels.attention_prefill import attention_prefill, attention_prefill_cost
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.attention import CODES, page_table
from llmcli.lab.cases.attention_prefill import NUM_ROWS, ROW

F32, F16, BF16 = (np.dtype(kind) for kind in (np.float32, np.float16, np.uint16))
KINDS = pytest.mark.parametrize("dtype", [F32, F16, BF16, CODES], ids=["fp32", "fp16", "bf16", "codes"])
LLAMA = QkvLayout(4, 2, 64)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 48, 64, 80, 96, 112, 128, 136, 160, 192, 256])
def test_head_dims(device: Device, dtype: np.dtype, head_dim: int) -> None:
    Problem(QkvLayout(2, 1, head_dim), dtype, 30, 150).verify(device)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200])
@pytest.mark.parametrize("start", [0, 1, 62, 64, 100])
def test_chunks(device: Device, dtype: np.dtype, start: int, num_tokens: int) -> None:
    Problem(QkvLayout(2, 2, 64), dtype, start, num_tokens).verify(device)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("window", [1, 2, 5, 16, 63, 64, 65, 95, 127, 128, 1000])
@pytest.mark.parametrize("start", [0, 50])
def test_windows(device: Device, dtype: np.dtype, start: int, window: int) -> None:
    Problem(QkvLayout(2, 2, 64), dtype, start, 260, window=window).verify(device)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize(("num_heads", "num_key_value_heads"), [(1, 1), (3, 3), (7, 1), (8, 2), (16, 1)])
def test_groups(device: Device, dtype: np.dtype, num_heads: int, num_key_value_heads: int) -> None:
    Problem(QkvLayout(num_heads, num_key_value_heads, 32), dtype, 3, 70).verify(device)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("magnitude", [0.0, 0.01, 10.0])
def test_flat_and_steep_weights(device: Device, dtype: np.dtype, magnitude: float) -> None:
    Problem(LLAMA, dtype, 10, 150, magnitude=magnitude).verify(device)


@pytest.mark.cuda
def test_fp16_queries_beyond_its_range_saturate(device: Device) -> None:
    problem = Problem(LLAMA, F16, 0, 40)
    problem.qkv[:, : LLAMA.q_size] *= 1e7
    problem.keys.elements[ROW, :, :, 0] = 0.0  # where infinity would become NaN
    assert np.isfinite(problem.run(device)).all()


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [24, 64, 128, 256])
@pytest.mark.parametrize("magnitude", [1e-9, 1e-3, 1e4])
def test_value_scales_of_any_size(device: Device, head_dim: int, magnitude: float) -> None:
    problem = Problem(QkvLayout(2, 1, head_dim), CODES, 20, 100)
    assert problem.values.scales is not None
    problem.values.scales[ROW] *= np.float32(magnitude)
    problem.verify(device)


@pytest.mark.cuda
@KINDS
def test_long(device: Device, dtype: np.dtype) -> None:
    tokens = [0, 1, 127, 128, 700, 1023]
    Problem(QkvLayout(4, 1, 128), dtype, 1500, 1024).verify(device, tokens)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_a_tokens_bits_do_not_depend_on_its_chunk(
    device: Device, dtype: np.dtype, head_dim: int, window: int | None
) -> None:
    problem = Problem(QkvLayout(4, 2, head_dim), dtype, 20, 300, window=window)
    whole = problem.run(device)
    for cuts in ([0, 150, 300], [0, 1, 14, 44, 45, 173, 300], list(range(0, 301, 60))):
        parts = [problem.part(begin, end).run(device) for begin, end in zip(cuts, cuts[1:], strict=False)]
        assert np.concatenate(parts).tobytes() == whole.tobytes(), cuts
    problem.table = page_table(NUM_ROWS, problem.keys.elements.shape[2], seed=99)
    assert problem.run(device).tobytes() == whole.tobytes()


@pytest.mark.cuda
@KINDS
def test_ten_runs_are_equal(device: Device, dtype: np.dtype) -> None:
    problem = Problem(LLAMA, dtype, 20, 140)
    for _ in range(5):
        assert_same_bits(lambda: problem.run(device))


class Recorder:
    """A stand-in for a card without wgmma: records launches."""

    can_wgmma = False

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def launch(self, stem: str, name: str, **details: Any) -> None:
        self.launches.append({"stem": stem, "name": name, **details})


def host(shape: tuple[int, ...], dtype: Any) -> Any:
    array = np.zeros(shape, dtype)
    return SimpleNamespace(dtype=array.dtype, shape=shape, strides=array.strides, data=SimpleNamespace(ptr=4096))


def call(device: Any, layout: QkvLayout = LLAMA, dtype: np.dtype = F16, **changes: Any) -> None:
    cache = host((9, layout.num_key_value_heads, 16, layout.head_dim), dtype)
    scales = host(cache.shape[:3], F32) if dtype == CODES else None
    arguments: dict[str, Any] = {
        "qkv": host((40, layout.width), F32),
        "keys": cache,
        "values": cache,
        "key_scales": scales,
        "value_scales": scales,
        "pages": host((7,), np.int32),
        "start": 72,
        "window": None,
        "out": host((40, layout.q_size), F32),
    } | changes
    out = arguments.pop("out")
    attention_prefill(device, prompt_inputs(layout=layout, **arguments), out)


@pytest.mark.parametrize("dtype", [F32, F16, CODES])
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_shared_memory_fits_every_card(head_dim: int, dtype: np.dtype) -> None:
    recorder = Recorder()
    call(recorder, QkvLayout(4, 2, head_dim), dtype)
    assert recorder.launches[0]["shared_bytes"] <= 99 * 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": 73}, "tokens 73 to 112 do not fit pages for 112"),
        ({"start": -1}, "tokens -1 to 38"),
        ({"pages": host((7,), np.int64)}, "pages is int64, expected int32"),
        ({"window": 0}, "a window of 0 tokens"),
        ({"out": host((40, 128), F32)}, r"out is \[40, 128\], expected \[40, 256\]"),
        ({"layout": QkvLayout(4, 2, 60)}, "head_dim is 60"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Recorder(), **changes)


def test_cost_counts_what_is_seen() -> None:
    layout = QkvLayout(4, 2, 64)
    assert attention_prefill_cost(3, 2, layout, 2, None).flops == 4 * (3 + 4 + 5) * 256
    assert attention_prefill_cost(3, 2, layout, 2, 2).flops == 4 * (2 + 2 + 2) * 256
    assert attention_prefill_cost(3, 2, layout, 2, 2).read_bytes == 4 * 3 * 256 + 2 * 4 * 128 * 2
