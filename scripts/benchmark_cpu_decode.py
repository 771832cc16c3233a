"""Decode and prompts on the CPU at --dtype bfloat16: quantized models against bf16 of the same model, in one process.

The model has some layers of Llama-3.2-1B's shape and random weights, written by `quantize`'s own exporter. Rounds
alternate between the models, so that a busy machine slows all of them alike; the medians are compared. With one thread
the time of the processor counts, not that of the clock, which tells more on a busy machine.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.export_plan import plan_export
from llmcli.checkpoint.layout import expected_tensors
from llmcli.checkpoint.model import open_model
from llmcli.config.llama import LlamaConfig
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.base import Runner, Span
from llmcli.runners.torch.load import load
from llmcli.sampling.params import Sampler, SamplingParams

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
SCHEMES = {
    "int8 channel": WeightScheme(8, None),
    "int8 groups of 128": WeightScheme(8, 128),
    "int8 groups of 32": WeightScheme(8, 32),
    "int4 groups of 128": WeightScheme(4, 128),
    "int4 groups of 32": WeightScheme(4, 32),
    "int4 channel": WeightScheme(4, None),
}
TOKENS_PER_ROUND = 8
MOST_TOKENS = 2048


def write_model(folder: Path, num_layers: int) -> None:
    """A bf16 model of random weights."""
    folder.mkdir()
    config = {**CONFIG, "num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        tensor.name: torch.randn(tensor.shape, dtype=torch.bfloat16) * 0.02
        for tensor in expected_tensors(LlamaConfig.from_dict(config, "config"))
    }
    save_file(tensors, folder / "model.safetensors")


def quantize(source: Path, destination: Path, scheme: WeightScheme) -> None:
    """The model of `source` in `scheme`."""
    exporter = Exporter(plan_export(open_model(source), ExportOptions(scheme)), destination, "random")
    exporter.run(exporter.prepare(), lambda done, total: None, lambda layer, quality: None)


def open_runner(folder: Path, num_threads: int) -> Runner:
    """The model in bfloat16."""
    return load(open_model(folder), max_seq_len=MOST_TOKENS, dtype="bfloat16", num_threads=num_threads)


def clock() -> float:
    """Seconds, of processor time with one thread."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds_of_prompt(runner: Runner, num_tokens: int, generator: torch.Generator) -> float:
    """A prompt with a beginning of its own."""
    prompt = tuple(torch.randint(0, CONFIG["vocab_size"], (num_tokens,), generator=generator).tolist())
    row = runner.open(prompt, Sampler(SamplingParams(temperature=0.0), seed=0))
    start = clock()
    while (begin := runner.num_tokens(row)) < num_tokens:
        end = runner.span_end(row, num_tokens)
        runner.queue([Span(row, prompt[begin:end], "last" if end == num_tokens else "none")]).choices()
    seconds = clock() - start
    runner.close(row)
    return seconds


def seconds_per_token(runner: Runner) -> float:
    """One round of greedy decoding after a short prompt."""
    prompt = tuple(range(16))
    row = runner.open(prompt, Sampler(SamplingParams(temperature=0.0), seed=0))
    runner.queue([Span(row, prompt[runner.num_tokens(row) :])]).choices()
    start = clock()
    for _ in range(TOKENS_PER_ROUND):
        runner.queue([Span(row)]).choices()
    seconds = (clock() - start) / TOKENS_PER_ROUND
    runner.close(row)
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help=f"lengths, at most {MOST_TOKENS}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "bf16"
        write_model(source, arguments.layers)
        runners = {"bf16": open_runner(source, arguments.threads)}
        for name, scheme in SCHEMES.items():
            destination = Path(scratch) / name.replace(" ", "-")
            quantize(source, destination, scheme)
            runners[name] = open_runner(destination, arguments.threads)
        works: dict[str, Callable[[Runner], float]] = {"a token": seconds_per_token}
        for num_tokens in arguments.prompts:
            generator = torch.Generator().manual_seed(num_tokens)
            works[f"prompt of {num_tokens}"] = partial(seconds_of_prompt, num_tokens=num_tokens, generator=generator)
        print(f"{arguments.layers} layers of Llama-3.2-1B's shape, {runners['bf16'].description}")
        print(f"{'':<16} {'weights':<20} {'ms':>9} {'fastest':>9} {'of bf16':>9}")
        for title, work in works.items():
            times: dict[str, list[float]] = {name: [] for name in runners}
            for _ in range(arguments.rounds):
                for name, runner in runners.items():
                    times[name].append(work(runner))
            base = statistics.median(times["bf16"])
            for name, values in times.items():
                median = statistics.median(values)
                print(f"{title:<16} {name:<20} {median * 1e3:>9.2f} {min(values) * 1e3:>9.2f} {median / base:>9.2f}")
