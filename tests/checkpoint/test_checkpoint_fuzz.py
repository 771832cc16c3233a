"""Fuzzing the header reader against the official library: it accepts what we accept, and reads the same."""

import json
import resource
import struct
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.checkpoint.safetensors_file import ITEMSIZE_BYTES, read_header
from llmcli.errors import CheckpointError, LLMCliError

Summary = dict[str, tuple[str, list[int]]]

VALID_HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "b.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "empty": {"dtype": "F16", "shape": [0, 7], "data_offsets": [12, 12]},
        "a": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
    }
).encode()
DATA = bytes(range(16))


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


def ours(path: Path) -> Summary | None:
    """What our reader returns, or None if it refuses; anything but a CheckpointError fails the test."""
    try:
        header = read_header(path)
    except CheckpointError as refusal:
        message = str(refusal)
    else:
        return {name: (info.dtype, list(info.shape)) for name, info in header.items()}
    assert message.isprintable()
    assert len(message) < 2000
    return None


def theirs(path: Path) -> Summary | None:
    try:
        with safetensors.safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except Exception:
        return None


def assert_ours_implies_theirs(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    summary = ours(path)
    if summary is not None:
        assert summary == theirs(path)


def with_length(header: bytes, data: bytes = DATA) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def test_the_uncorrupted_file_is_accepted(path):
    path.write_bytes(with_length(VALID_HEADER))
    assert ours(path) == theirs(path)
    assert ours(path).keys() == {"a", "b.weight", "empty"}


JSON_BYTES = st.sampled_from(b'0123456789-+.eE"\\{}[]:, \x00\xff\xed\nFBUIx')
POSITIONS = st.integers(0, len(VALID_HEADER) - 1)


@settings(max_examples=600, deadline=None)
@given(st.lists(st.tuples(POSITIONS, JSON_BYTES | st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_header_bytes(path, changes):
    header = bytearray(VALID_HEADER)
    for position, byte in changes:
        header[position] = byte
    assert_ours_implies_theirs(path, with_length(bytes(header)))


@settings(max_examples=300, deadline=None)
@given(POSITIONS, st.integers(0, 20), st.binary(max_size=6) | st.text('0123456789-,[]{}" ', max_size=6).map(str.encode))
def test_replaced_header_parts(path, start, length, replacement):
    header = VALID_HEADER[:start] + replacement + VALID_HEADER[start + length :]
    assert_ours_implies_theirs(path, with_length(header))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(VALID_HEADER) + 8 + len(DATA) - 1), st.binary(max_size=3))
def test_truncated_or_extended_files(path, num_bytes, tail):
    content = with_length(VALID_HEADER)
    path.write_bytes(content[:num_bytes])
    assert ours(path) is None
    assert theirs(path) is None
    assert_ours_implies_theirs(path, content + tail)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**64 - 1) | st.integers(0, 400))
def test_random_header_lengths(path, header_bytes):
    assert_ours_implies_theirs(path, struct.pack("<Q", header_bytes) + VALID_HEADER + DATA)


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=6,
)
SIZES = st.integers(-1, 17) | st.integers(2**31, 2**65)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*ITEMSIZE_BYTES, "F4", "F6_E2M3", "I4"]) | NESTED,
        "shape": st.lists(SIZES, max_size=3) | NESTED,
        "data_offsets": st.lists(SIZES, min_size=2, max_size=2) | NESTED,
    }
)
NAMES = st.text(max_size=3) | st.sampled_from(["\ud800", "__metadata__", "a\nb"])


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(NAMES, ENTRIES | NESTED, max_size=3), st.integers(0, 17))
@example({"a": {"dtype": "U8", "shape": [2**32, 2**32, 0], "data_offsets": [0, 0]}}, 0)
@example({"__metadata__": {"a": "\udc00"}}, 0)
@example({"__metadata__": []}, 0)
def test_headers_of_any_json(path, header, data_bytes):
    assert_ours_implies_theirs(path, with_length(json.dumps(header).encode(), bytes(data_bytes)))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
            st.sampled_from(sorted(ITEMSIZE_BYTES)),
            st.lists(st.integers(0, 4), max_size=4),
        ),
        max_size=6,
        unique_by=lambda tensor: tensor[0],
    ),
    st.randoms(use_true_random=False),
    st.none() | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.text("pt"), max_size=2),
    st.booleans(),
)
def test_every_valid_file_is_accepted(path, tensors, random, metadata, ensure_ascii):
    entries, end = [("__metadata__", metadata)], 0
    for name, dtype, shape in tensors:
        begin = end
        num_elements = 1
        for dimension in shape:
            num_elements *= dimension
        end += num_elements * ITEMSIZE_BYTES[dtype]
        entries.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}))
    random.shuffle(entries)  # the order in the JSON need not be that of the data
    header = json.dumps(dict(entries), ensure_ascii=ensure_ascii).encode()
    path.write_bytes(with_length(header, bytes(end)))
    assert ours(path) == theirs(path) == {name: (dtype, shape) for name, dtype, shape in tensors}


# Model folders with mutated headers, indexes and configs: only our errors, soon and in little memory.


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
