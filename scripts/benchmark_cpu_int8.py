"""Decode of an int8 model on the CPU beside what torch's int8 operator needs for the model's matrices and nothing else.

Llama-3.2-1B's shape, random weights, `--dtype bfloat16`. Rounds alternate in one process, so that a busy machine slows
all alike; medians are compared. The head is 16-bit, as `quantize` leaves it; what an int8 head would need is told too.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.export_options import ExportOptions
from llmcli.checkpoint.export_plan import plan_export
from llmcli.checkpoint.layout import EMBEDDING, expected_tensors
from llmcli.checkpoint.model import open_model
from llmcli.checkpoint.random_weights import RandomReader
from llmcli.checkpoint.shapes import shape_source
from llmcli.config.llama import LlamaConfig
from llmcli.quantization.schemes import WeightScheme
from llmcli.runners.base import Runner, Span
from llmcli.runners.torch.load import load
from llmcli.sampling.params import SamplingParams
from llmcli.sampling.sampler import Sampler

SCHEMES = {"channel": WeightScheme(8, None), "groups of 128": WeightScheme(8, 128)}
SAMPLERS = {"greedy": SamplingParams(temperature=0.0), "default chain": SamplingParams()}
PROMPT_TOKENS = 16


def open_runner(shape: str, scheme: WeightScheme, num_threads: int, scratch: Path) -> Runner:
    """The shape with random weights, written by the exporter."""
    model = shape_source(shape, "int8")
    source, destination = scratch / "source", scratch / f"int8-{scheme.group_size}"
    source.mkdir(exist_ok=True)
    model = replace(model, checkpoint=replace(model.checkpoint, folder=source))
    exporter = Exporter(plan_export(model, ExportOptions(scheme)), destination, shape, open_reader=RandomReader)
    exporter.run(exporter.prepare(), lambda done, total: None, lambda layer, quality: None)
    return load(open_model(destination), max_seq_len=512, dtype="bfloat16", num_threads=num_threads)


def decode(runner: Runner, params: SamplingParams, num_tokens: int) -> float:
    """Seconds a token behind a short prompt, after the first."""
    prompt = tuple(range(PROMPT_TOKENS))
    row = runner.open(prompt, Sampler(params, seed=0))
    runner.queue([Span(row, prompt[runner.num_tokens(row) :])]).choices()
    start = time.perf_counter()
    for _ in range(num_tokens):
        runner.queue([Span(row)]).choices()
    seconds = time.perf_counter() - start
    runner.close(row)
    return seconds / num_tokens


def matrix_products(config: LlamaConfig) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    """One product of a token with every matrix of the layers by the int8 operator; with the head, in int8 and bf16."""
    generator = torch.Generator().manual_seed(0)
    matrices = []
    for tensor in expected_tensors(config):
        if len(tensor.shape) == 2:
            q = torch.randint(-127, 128, tensor.shape, dtype=torch.int8, generator=generator)
            matrices.append((tensor.name, q, torch.full(tensor.shape[:1], 0.01, dtype=torch.bfloat16)))
    inputs = {q.shape[1]: torch.randn(1, q.shape[1], generator=generator).bfloat16() for _, q, _ in matrices}
    (head,) = [one for one in matrices if one[0] == EMBEDDING]
    plain_head = head[1].bfloat16()

    def multiply(wanted: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        for _, q, scales in wanted:
            torch._weight_int8pack_mm(inputs[q.shape[1]], q, scales)

    return (
        partial(multiply, [one for one in matrices if one[0] != EMBEDDING]),
        partial(multiply, [head]),
        lambda: (F.linear(inputs[plain_head.shape[1]], plain_head), None)[1],
    )


@torch.inference_mode()
def timed(work: Callable[[], None], num_tokens: int) -> float:
    """Seconds a call, after the first."""
    work()
    start = time.perf_counter()
    for _ in range(num_tokens):
        work()
    return (time.perf_counter() - start) / num_tokens


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="Llama-3.2-1B")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=4, help="a round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runners = {
            name: open_runner(arguments.shape, scheme, arguments.threads, Path(scratch))
            for name, scheme in SCHEMES.items()
        }
    layers, int8_head, plain_head = matrix_products(next(iter(runners.values())).config)
    works: dict[str, Callable[[int], float]] = {
        "operator: layers": partial(timed, layers),
        "operator: int8 head": partial(timed, int8_head),
        "linear: bf16 head": partial(timed, plain_head),
    }
    for name, runner in runners.items():
        for chain, params in SAMPLERS.items():
            works[f"llmcli: {name}, {chain}"] = partial(decode, runner, params)
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(arguments.rounds):
        for name, work in works.items():
            times[name].append(work(arguments.tokens))
    medians = {name: statistics.median(values) for name, values in times.items()}
    bound = medians["operator: layers"] + medians["linear: bf16 head"]
    smaller = medians["operator: layers"] + medians["operator: int8 head"]
    print(f"{arguments.shape} int8, {arguments.threads} threads, medians of {arguments.rounds} rounds")
    print(f"{'':<32} {'ms':>8} {'fastest':>8} {'tokens/s':>9} {'of bound':>9} {'int8 head':>9}")
    for name, median in medians.items():
        print(f"{name:<32} {median * 1e3:>8.1f} {min(times[name]) * 1e3:>8.1f}", end="")
        if name.startswith("llmcli"):
            print(f" {1 / median:>9.2f} {bound / median:>9.2f} {smaller / median:>9.2f}", end="")
        print()
    print(f"bound: the operator's layers and a bf16 head, {1 / bound:.2f} tokens/s; int8 head {1 / smaller:.2f}")
