"""The sampler on the card: microseconds a token for some chains, vocabularies and batch sizes, in a CUDA graph."""

import argparse
import json
import statistics
from typing import Any

import cupy
import numpy as np

from llmcli.kernels.device import Device
from llmcli.runners.cuda.step.arena import Mailbox
from llmcli.runners.cuda.step.sampling import DeviceSampler
from llmcli.sampling.params import Sampler, SamplingParams

LAUNCHES_PER_GRAPH = 16
NUM_HISTORY_TOKENS = 1000
CHAINS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(top_p=1),
    "default": SamplingParams(),
    "top_k 50": SamplingParams(top_k=50, top_p=1),
    "top_k 40, top_p, min_p": SamplingParams(top_k=40, min_p=0.05),
    "hot top_p": SamplingParams(temperature=1.5, top_p=0.99),
    "typical_p": SamplingParams(top_p=1, typical_p=0.9),
    "xtc": SamplingParams(xtc_probability=1, xtc_threshold=0.1),
    "top_n_sigma": SamplingParams(top_p=1, top_n_sigma=1.5),
    "dynamic temperature": SamplingParams(dynatemp_range=0.5),
    "mirostat": SamplingParams(top_p=1, mirostat_tau=5.0),
    "penalties and dry": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.1, dry_multiplier=0.8),
}


def make_logits(num_rows: int, vocab_size: int) -> np.ndarray:
    """A tail around -10 and a few likely tokens, as models have it; [num_rows, vocab_size] float32."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((num_rows, vocab_size)) * 2.2 - 10
    for values in logits:
        values[rng.integers(0, vocab_size, 200)] += rng.exponential(4, 200) + 3
    return logits.astype(np.float32)


def measure(device: Device, params: SamplingParams, num_rows: int, vocab_size: int, num_rounds: int) -> dict[str, Any]:
    """Time `num_rounds` launches of one graph of LAUNCHES_PER_GRAPH steps. Units: us a step"""
    max_seq_len = NUM_HISTORY_TOKENS + LAUNCHES_PER_GRAPH * (num_rounds + 3)
    history = np.random.default_rng(1).integers(0, vocab_size, (num_rows, max_seq_len)).astype(np.int32)
    token_ids = cupy.zeros(num_rows, cupy.int32)
    sampler = DeviceSampler(device, vocab_size, Mailbox(device, 2**20), token_ids, cupy.asarray(history))
    arrays = {
        "logits": cupy.asarray(make_logits(num_rows, vocab_size)),
        "rows": cupy.arange(num_rows, dtype=cupy.int32),
        "positions": cupy.full(num_rows, NUM_HISTORY_TOKENS - 1, cupy.int32),
    }
    for row in range(num_rows):
        sampler.set_sampler(row, Sampler(params, 1, row))
    device.synchronize()
    device.stream.begin_capture()
    for _ in range(LAUNCHES_PER_GRAPH):
        sampler.enqueue(**arrays)
    graph = device.stream.end_capture()
    times = []
    for index in range(num_rounds + 2):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(device.stream)
        graph.launch(device.stream)
        stop.record(device.stream)
        stop.synchronize()
        if index >= 2:  # the first ones load the code
            times.append(cupy.cuda.get_elapsed_time(start, stop) * 1000 / LAUNCHES_PER_GRAPH)
    return {"median_us": round(statistics.median(times), 2), "least_us": round(min(times), 2)}


def main() -> None:
    """Print one JSON line for each chain, vocabulary and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, nargs="+", default=[32_000, 128_256])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    device = Device.open(0)
    with device.stream:
        for vocab_size in options.vocab_size:
            for num_rows in options.rows:
                for name, params in CHAINS.items():
                    figures = measure(device, params, num_rows, vocab_size, options.rounds)
                    line = {"chain": name, "vocab_size": vocab_size, "rows": num_rows} | figures
                    print(json.dumps(line | {"device": device.name}), flush=True)


if __name__ == "__main__":
    main()
