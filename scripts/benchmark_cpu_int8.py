"""Decode of an int8 model on the CPU beside the time that its bytes take to be read, and beside others.

Llama-3.2-1B's shape, random weights, `--dtype bfloat16`. Rounds alternate, so that a busy machine slows all alike;
medians are compared. The head has 16 bits, as `quantize` leaves it, or 8, as that of llama.cpp's Q8_0. torch's int8
operator multiplies the model's matrices and does nothing else; `--llama-bench PROGRAM MODEL` runs llama.cpp's own
benchmark in turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.export_plan import plan_export
from llmcli.checkpoint.layout import EMBEDDING, expected_tensors
from llmcli.checkpoint.model import open_model
from llmcli.checkpoint.random_weights import RandomReader, shape_source
from llmcli.config.llama import LlamaConfig
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.base import Runner, Span
from llmcli.runners.torch.load import load
from llmcli.sampling.params import Sampler, SamplingParams

MODELS = {
    "channel": ExportOptions(WeightScheme(8, None)),
    "groups of 128": ExportOptions(WeightScheme(8, 128)),
    "all int8": ExportOptions(WeightScheme(8, 128), head_bits=8),
}
SAMPLERS = {"greedy": SamplingParams(temperature=0.0), "default chain": SamplingParams()}
PROMPT_TOKENS = 16


def open_runner(shape: str, options: ExportOptions, num_threads: int, destination: Path) -> Runner:
    """The shape with random weights, written by the exporter."""
    model = shape_source(shape, "int8")
    source = destination.with_name("source")
    source.mkdir(exist_ok=True)
    model = replace(model, checkpoint=replace(model.checkpoint, folder=source))
    exporter = Exporter(plan_export(model, options), destination, shape, open_reader=RandomReader)
    exporter.run(exporter.prepare(), lambda done, total: None, lambda layer, quality: None)
    return load(open_model(destination), max_seq_len=512, dtype="bfloat16", num_threads=num_threads)


def decode(runner: Runner, params: SamplingParams, num_tokens: int) -> float:
    """Seconds a token after a short prompt, after the first."""
    prompt = tuple(range(PROMPT_TOKENS))
    row = runner.open(prompt, Sampler(params, seed=0))
    runner.queue([Span(row, prompt[runner.num_tokens(row) :])]).choices()
    start = time.perf_counter()
    for _ in range(num_tokens):
        runner.queue([Span(row)]).choices()
    seconds = time.perf_counter() - start
    runner.close(row)
    return seconds / num_tokens


def operator_on_layers(config: LlamaConfig) -> Callable[[], None]:
    """One product of a token with every matrix of the layers by torch's int8 operator."""
    generator = torch.Generator().manual_seed(0)
    matrices = [
        torch.randint(-127, 128, tensor.shape, dtype=torch.int8, generator=generator)
        for tensor in expected_tensors(config)
        if len(tensor.shape) == 2 and tensor.name != EMBEDDING
    ]
    inputs = {q.shape[1]: torch.randn(1, q.shape[1], generator=generator).bfloat16() for q in matrices}
    scales = {len(q): torch.full((len(q),), 0.01, dtype=torch.bfloat16) for q in matrices}

    def multiply() -> None:
        for q in matrices:
            torch._weight_int8pack_mm(inputs[q.shape[1]], q, scales[len(q)])

    return multiply


def weight_bytes(folder: Path) -> int:
    """The bytes that a token reads: every tensor, but the embedding only where it is the head."""
    tensors = open_model(folder).tensors
    unread = 0 if tensors.head == EMBEDDING else tensors.tensors[EMBEDDING].num_bytes
    return sum(info.num_bytes for info in tensors.tensors.values()) - unread


@torch.inference_mode()
def timed(work: Callable[[], object], num_tokens: int) -> float:
    """Seconds a call, after the first."""
    work()
    start = time.perf_counter()
    for _ in range(num_tokens):
        work()
    return (time.perf_counter() - start) / num_tokens


def llama_bench(program: str, model: str, num_threads: int, num_tokens: int) -> float:
    """Seconds a token of llama.cpp."""
    command = [program, "-m", model, "-p", "0", "-n", str(num_tokens), "-r", "1", "-t", str(num_threads), "-o", "json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return 1 / float(json.loads(result.stdout)[0]["avg_ts"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="Llama-3.2-1B")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=8, help="a round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--llama-bench", nargs=2, metavar=("PROGRAM", "MODEL"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runners = {
            name: open_runner(arguments.shape, options, arguments.threads, Path(scratch) / name)
            for name, options in MODELS.items()
        }
        num_bytes = weight_bytes(Path(scratch) / "all int8")
    memory = torch.ones(num_bytes // 4)
    works: dict[str, Callable[[int], float]] = {
        "reading, all int8": partial(timed, memory.sum),
        "torch's operator, layers alone": partial(timed, operator_on_layers(next(iter(runners.values())).config)),
    }
    for name, runner in runners.items():
        for chain, params in SAMPLERS.items():
            works[f"llmcli: {name}, {chain}"] = partial(decode, runner, params)
    if arguments.llama_bench:
        works["llama.cpp"] = partial(llama_bench, *arguments.llama_bench, arguments.threads)
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(arguments.rounds):
        for name, work in works.items():
            times[name].append(work(arguments.tokens))
    floor = statistics.median(next(iter(times.values())))
    print(f"{arguments.shape} int8, {arguments.threads} threads, medians of {arguments.rounds} rounds")
    print(f"{num_bytes / 1e9:.2f} GB read at {num_bytes / floor / 1e9:.1f} GB/s")
    print(f"{'':<34} {'ms':>8} {'fastest':>8} {'tokens/s':>9} {'of floor':>9}")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:<34} {median * 1e3:>8.1f} {min(values) * 1e3:>8.1f} {1 / median:>9.2f} {floor / median:>9.2f}")


if __name__ == "__main__":
    # As in the command line, which imports torch later: threads that wait keep their cores for 0.1 ms.
    if "GOMP_SPINCOUNT" not in os.environ:
        raise SystemExit("set GOMP_SPINCOUNT=10000, as llmcli does on a quiet machine")
    main()
