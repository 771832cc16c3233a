"""Model folders with mutated headers, indexes and configs: only our errors, soon and in little memory.

    PYTHONPATH=.:tests python tests/checkpoint/test_checkpoint_fuzz_models.py 20000

runs 20,000 cases.
"""

import json
import resource
import struct
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.errors import LLMCliError

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
MAX_SECONDS = 5
MAX_MESSAGE = 20_000
MAX_BYTES = 300 * 2**20

ODD_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1.5,
        1e-320,
        1e30,
        float("nan"),
        float("inf"),
        2**31,
        2**63,
        2**64,
        10**400,
        -(10**400),
    ),
    *("", "a", "\ud800", "\x00", "\x1b[2J", "..", "../x.safetensors", "x" * 5000, *SHARDS, "lm_head.weight"),
    *([], {}, [[]], [0], [0, 0], [1, 2, 3], [2**64, 2**64], {"a": 1}, "BF16", "F4", "I64"),
)
ODD_BYTES = b'0123456789-+.eE"\\{}[]:, \x00\xff\xed\n'


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def mutated_value(value: Any, random: Random) -> Any:
    """A JSON value of which one part was replaced, removed, renamed or doubled."""
    if isinstance(value, (dict, list)) and value and random.random() < 0.9:
        copy = value.copy()
        key = random.choice(list(copy)) if isinstance(copy, dict) else random.randrange(len(copy))
        action = random.randrange(8)
        if action == 0:
            del copy[key]
        elif action == 1 and isinstance(copy, dict):
            copy[
                random.choice(("model.norm.weight", "lm_head.weight", "norm.weight", "__metadata__", "\ud800", ""))
            ] = copy[key]
        elif action == 1:
            copy.append(copy[key])
        else:
            copy[key] = mutated_value(copy[key], random)
        return copy
    if random.random() < 0.02:
        return nested(random.choice((60, 70, 500, 20_000)))
    return random.choice(ODD_VALUES)


def as_json(value: Any) -> bytes:
    """JSON of a value however deep; Python's own encoder gives up where it does."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 20_000 + b"]" * 20_000


def mutated_bytes(content: bytes, random: Random) -> bytes:
    copy = bytearray(content)
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(copy) + 1)
        part = bytes(random.choice(ODD_BYTES) for _ in range(random.randint(0, 3)))
        copy[place : place + random.randint(0, 3)] = random.choice((part, b"9" * 5000)) if place % 50 == 0 else part
    return bytes(copy)


def mutated_json(content: bytes, random: Random) -> bytes:
    if random.random() < 0.3:
        return mutated_bytes(content, random)
    value = json.loads(content)
    for _ in range(random.randint(1, 3)):
        value = mutated_value(value, random)
    return as_json(value)


def mutated_file(content: bytes, random: Random) -> bytes:
    """A safetensors file with another header, or another length, or cut off."""
    length = int.from_bytes(content[:8], "little")
    action = random.randrange(10)
    if action == 0:
        return content[: random.randrange(len(content))]
    if action == 1:
        return struct.pack("<Q", random.choice((0, 1, length - 1, length + 1, 10**8, 2**63, 2**64 - 1))) + content[8:]
    header = mutated_json(content[8 : 8 + length], random)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def write_original(folder: Path) -> None:
    write_tiny_llama(folder, with_tokenizer=False, num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for shard, part in zip(SHARDS, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name] for name in part}, folder / shard)
    weight_map = {name: SHARDS[index % 2] for index, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def run_cases(folder: Path, seeds: range) -> int:
    """How many mutated folders are refused; the rest are opened."""
    write_original(folder)
    originals = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    open_model(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for seed in seeds:
        random = Random(seed)
        path = random.choice(list(originals))
        mutate = mutated_file if path.suffix == ".safetensors" else mutated_json
        path.write_bytes(mutate(originals[path], random))
        message = ""
        start = time.monotonic()
        try:
            open_model(folder)
        except LLMCliError as error:
            refused += 1
            message = str(error)
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {path.name}: {type(error).__name__}: {error}") from error
        assert time.monotonic() - start < MAX_SECONDS, seed
        assert len(message) < MAX_MESSAGE, (seed, message[:500])
        path.write_bytes(originals[path])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    assert grown < MAX_BYTES, grown
    return refused


def test_mutated_folders_end_in_an_error_of_ours(tmp_path: Path) -> None:
    refused = run_cases(tmp_path / "model", range(3000))
    assert 1500 < refused < 3000  # they reach the checks, and some of them do no harm


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        count = int(sys.argv[1])
        print(f"{run_cases(Path(name) / 'model', range(count))} of {count} refused")
