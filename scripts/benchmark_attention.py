"""Time of the attention kernels on this card: decode against the bandwidth of a copy, prefill in TFLOP/s.

Every shape runs as a CUDA graph of many launches over the caches of several layers, more than the L2 cache holds.
The copy is measured in the same process; figures are medians of some rounds, the fastest in brackets.
"""

import argparse
import statistics
from collections.abc import Callable

import cupy
import numpy as np

from llmcli.kernels import attention_decode as decode
from llmcli.kernels import attention_prefill as prefill
from llmcli.kernels.attention_decode import LaneInputs
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import PAGE_TOKENS, LayerCache, QkvLayout

LAYOUTS = {
    "Llama-3.2-1B": QkvLayout(32, 8, 64),
    "Llama-3.1-8B": QkvLayout(32, 8, 128),
    "Llama-2-7B": QkvLayout(32, 32, 128),
    "Llama-3.1-70B": QkvLayout(64, 8, 128),
}
DTYPES = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32, "int8": np.uint8}
DECODE_TOKENS = (16, 128, 512, 1024, 4096, 32768)
PREFILL = ((128, 0), (512, 0), (2048, 0), (8192, 0), (512, 30000))
ROTATED_BYTES = 1 << 28  # caches of one graph, several times the L2 cache


def microseconds(device: Device, launch: Callable[[int], None], num_launches: int, rounds: int) -> list[float]:
    """Time of one launch in each round; `launch` gets the number of the launch."""
    stream = device.stream
    launch(0)
    device.synchronize()
    stream.begin_capture()
    for number in range(num_launches):
        launch(number)
    graph = stream.end_capture()
    graph.launch(stream)
    times = []
    for _ in range(rounds):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        graph.launch(stream)
        stop.record(stream)
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3 / num_launches)
    return times


def copy_gbps(device: Device, rounds: int) -> float:
    """Bytes read and written by a device-to-device copy."""
    source, target = cupy.zeros((2, 1 << 30), dtype=cupy.uint8)
    times = []
    for _ in range(rounds):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(device.stream)
        target.data.copy_from_device_async(source.data, source.nbytes, device.stream)
        stop.record(device.stream)
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e-3)
    return 2 * source.nbytes / statistics.median(times) / 1e9


def page_table(num_rows: int, num_tokens: int) -> cupy.ndarray:
    """Pages for `num_tokens` tokens of each row, in an order that scatters them: [rows, pages_per_row]."""
    num_pages = num_rows * -(-num_tokens // PAGE_TOKENS)
    return cupy.asarray(np.random.default_rng(0).permutation(num_pages).astype(np.int32).reshape(num_rows, -1))


def caches(layout: QkvLayout, dtype: np.dtype, num_pages: int) -> cupy.ndarray:
    """Keys and values of enough layers to fill ROTATED_BYTES: [layers, 2, num_pages, heads, PAGE_TOKENS, head_dim]."""
    shape = (2, num_pages, layout.num_key_value_heads, PAGE_TOKENS, layout.head_dim)
    num_layers = max(1, min(64, ROTATED_BYTES // (int(np.prod(shape)) * dtype.itemsize)))
    block = normal((1 << 20) + 1)  # an odd size: no two heads are alike
    if dtype == np.uint8:
        block = cupy.clip(block * 40 + 128, 1, 255)
    block = (block.view(cupy.uint32) >> 16).astype(dtype) if dtype == np.uint16 else block.astype(dtype)
    size = num_layers * int(np.prod(shape))
    return cupy.tile(block, -(-size // block.size))[:size].reshape(num_layers, *shape)


def scales(keys: cupy.ndarray) -> dict[str, cupy.ndarray]:
    """The scales of a cache of codes, the same for all layers that are rotated: 3 % of the bytes stay in L2."""
    if keys.dtype != np.uint8:
        return {}
    return {name: cupy.full(keys.shape[:3], 1 / 40, cupy.float32) for name in ("key_scales", "value_scales")}


def normal(*shape: int) -> cupy.ndarray:
    """Normal float32 numbers."""
    return cupy.asarray(np.random.default_rng(0).normal(size=shape).astype(np.float32))


def decode_times(
    device: Device, layout: QkvLayout, dtype: np.dtype, num_rows: int, num_tokens: int, rounds: int
) -> list[float]:
    """One new token in each row after num_tokens - 1 others."""
    pages = page_table(num_rows, num_tokens)
    cache = caches(layout, dtype, pages.size)
    splits = decode.max_splits(device.num_multiprocessors, layout, dtype.itemsize, num_tokens)
    arrays = {
        "qkv": normal(num_rows, layout.width),
        "cos_sin": cupy.ones((num_tokens, layout.head_dim // 2, 2), cupy.float32),
        "rows": cupy.arange(num_rows, dtype=cupy.int32),
        "positions": cupy.full(num_rows, num_tokens - 1, cupy.int32),
        "page_table": pages,
        "partials": cupy.empty(
            (num_rows, layout.num_attention_heads, splits, layout.head_dim + decode.PARTIAL_EXTRA), cupy.float32
        ),
        "counters": cupy.zeros((num_rows, decode.grid_heads(layout, dtype.itemsize)), cupy.uint32),
        "out": cupy.empty((num_rows, layout.q_size), cupy.float32),
    }

    memory = {name: arrays.pop(name) for name in ("partials", "counters", "out")}
    beside = scales(cache[0, 0])

    def launch(number: int) -> None:
        keys, values = cache[number % len(cache)]
        lanes = LaneInputs(
            layout=layout,
            q_norm=None,
            k_norm=None,
            eps=1e-5,
            cache=LayerCache(keys, values, **beside),
            window=None,
            **arrays,
        )
        decode.attention_decode(device, lanes, is_cached=False, **memory)

    return microseconds(device, launch, max(len(cache), 32), rounds)


def prefill_times(
    device: Device, layout: QkvLayout, dtype: np.dtype, num_tokens: int, start: int, rounds: int
) -> list[float]:
    """A chunk of num_tokens tokens after `start` others."""
    pages = page_table(1, start + num_tokens)
    (keys, values), *_ = caches(layout, dtype, pages.size)
    qkv = normal(num_tokens, layout.width)
    out = cupy.empty((num_tokens, layout.q_size), cupy.float32)
    layer = LayerCache(keys, values, **scales(keys))

    def launch(number: int) -> None:
        inputs = prefill.PromptInputs(qkv=qkv, layout=layout, cache=layer, pages=pages[0], start=start, window=None)
        prefill.attention_prefill(device, inputs, out)

    return microseconds(device, launch, 4, rounds)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--models", nargs="*", choices=LAYOUTS, default=["Llama-3.2-1B", "Llama-3.1-8B", "Llama-2-7B"])
    arguments = parser.parse_args()
    device = Device.open(0)
    dtype = np.dtype(DTYPES[arguments.dtype])
    with device.stream:
        bandwidth = copy_gbps(device, arguments.rounds)
        print(f"{device.name}, {arguments.dtype}, a copy reads and writes {bandwidth:.0f} GB/s")
        print(f"{'decode':<16}{'rows':>5}{'tokens':>8}{'splits':>8}{'us':>9}{'fastest':>9}{'GB/s':>7}{'of copy':>9}")
        for model in arguments.models:
            layout = LAYOUTS[model]
            for num_rows in arguments.rows:
                for num_tokens in DECODE_TOKENS:
                    times = decode_times(device, layout, dtype, num_rows, num_tokens, arguments.rounds)
                    splits = decode.max_splits(device.num_multiprocessors, layout, dtype.itemsize, num_tokens)
                    cost = decode.attention_decode_cost([num_tokens] * num_rows, layout, dtype.itemsize)
                    median = statistics.median(times)
                    gbps = cost.read_bytes / median / 1e3
                    print(
                        f"{model:<16}{num_rows:>5}{num_tokens:>8}{splits:>8}{median:>9.2f}{min(times):>9.2f}{gbps:>7.0f}"
                        f"{gbps / bandwidth:>9.0%}"
                    )
        print(f"{'prefill':<16}{'tokens':>8}{'start':>8}{'us':>10}{'fastest':>10}{'TFLOP/s':>9}")
        for model in arguments.models:
            layout = LAYOUTS[model]
            for num_tokens, start in PREFILL:
                times = prefill_times(device, layout, dtype, num_tokens, start, arguments.rounds)
                cost = prefill.attention_prefill_cost(num_tokens, start, layout, dtype.itemsize, None)
                median = statistics.median(times)
                print(
                    f"{model:<16}{num_tokens:>8}{start:>8}{median:>10.1f}{min(times):>10.1f}"
                    f"{cost.flops / median / 1e6:>9.0f}"
                )


if __name__ == "__main__":
    main()
