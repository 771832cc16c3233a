"""Speed and peak memory of loading, on a synthetic model written to a scratch folder.

Prints for each precision: seconds, GB/s of file read, bytes held, peak resident memory, and the bound
1.1 * held + largest tensor + 400 MB. `held` are the weights in their precision and the KV cache.
"""

import argparse
import json
import resource
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from llmcli.checkpoint.layout import expected_tensors
from llmcli.checkpoint.model import open_model
from llmcli.config.llama import LlamaConfig
from llmcli.runners.base import Span
from llmcli.runners.torch.load import load

CONTEXT = 1024
CONFIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "tie_word_embeddings": True,
}


def write_model(folder: Path, num_gigabytes: float) -> None:
    """A bf16 model of about the given size; one block of random weights is repeated, since only bytes matter here."""
    config = {**CONFIG, "num_hidden_layers": 1}
    first = sum(_elements(config).values())
    layer = sum(_elements({**config, "num_hidden_layers": 2}).values()) - first
    config["num_hidden_layers"] = max(1, round((num_gigabytes * 1e9 / 2 - first) / layer) + 1)
    (folder / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for tensor in expected_tensors(LlamaConfig.from_dict(config, "config")):
        num_bytes = 2 * torch.Size(tensor.shape).numel()
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    encoded = json.dumps(header).encode()
    block = torch.randn(2**25).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        while offset > 0:
            offset -= file.write(block[: min(len(block), offset)])


def _elements(config: dict[str, object]) -> dict[str, int]:
    return {
        tensor.name: torch.Size(tensor.shape).numel()
        for tensor in expected_tensors(LlamaConfig.from_dict(config, "config"))
    }


def measure(folder: Path, dtype: str) -> None:
    """Load once and print one row; run in a process of its own, since peak memory never falls."""
    model = open_model(folder)
    infos = model.tensors.tensors.values()
    file_bytes = sum(info.num_bytes for info in infos)
    largest = max(info.num_bytes for info in infos)
    start = time.perf_counter()
    runner = load(model, max_seq_len=CONTEXT, dtype=dtype)
    seconds = time.perf_counter() - start
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    held = file_bytes // 2 * itemsize + model.config.kv_cache_bytes(CONTEXT, itemsize)
    runner.queue([Span(runner.open([1]), (1,), "none")])  # the weights are really there
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    bound = 1.1 * held + largest + 400e6
    verdict = "within" if peak <= bound else "OVER"
    print(
        f"{dtype:<9} {seconds:>7.2f} s {file_bytes / seconds / 1e9:>6.2f} GB/s   held {held / 1e9:>6.2f} GB   "
        f"peak {peak / 1e9:>6.2f} GB   {verdict} the bound of {bound / 1e9:.2f} GB",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--measure", nargs=2, metavar=("DIR", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(Path(arguments.measure[0]), arguments.measure[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            write_model(Path(scratch), arguments.gigabytes)
            for dtype in ("float32", "bfloat16"):
                subprocess.run([sys.executable, __file__, "--measure", scratch, dtype], check=True)
