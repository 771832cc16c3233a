"""Fuzzing the header reader against the official library: it accepts what we accept, and reads the same.

Damaged folders, indexes and configs are those of tests/fuzz.
"""

import json
import struct
from pathlib import Path

import pytest
import safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmcli.checkpoint.safetensors_file import ITEMSIZE_BYTES, read_header
from llmcli.errors import CheckpointError

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


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(POSITIONS, JSON_BYTES | st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_header_bytes(path, changes):
    header = bytearray(VALID_HEADER)
    for position, byte in changes:
        header[position] = byte
    assert_ours_implies_theirs(path, with_length(bytes(header)))


@settings(max_examples=150, deadline=None)
@given(POSITIONS, st.integers(0, 20), st.binary(max_size=6) | st.text('0123456789-,[]{}" ', max_size=6).map(str.encode))
def test_replaced_header_parts(path, start, length, replacement):
    header = VALID_HEADER[:start] + replacement + VALID_HEADER[start + length :]
    assert_ours_implies_theirs(path, with_length(header))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(VALID_HEADER) + 8 + len(DATA) - 1), st.binary(max_size=3))
def test_truncated_or_extended_files(path, num_bytes, tail):
    content = with_length(VALID_HEADER)
    path.write_bytes(content[:num_bytes])
    assert ours(path) is None
    assert theirs(path) is None
    assert_ours_implies_theirs(path, content + tail)


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(NAMES, ENTRIES | NESTED, max_size=3), st.integers(0, 17))
@example({"a": {"dtype": "U8", "shape": [2**32, 2**32, 0], "data_offsets": [0, 0]}}, 0)
@example({"__metadata__": {"a": "\udc00"}}, 0)
@example({"__metadata__": []}, 0)
def test_headers_of_any_json(path, header, data_bytes):
    assert_ours_implies_theirs(path, with_length(json.dumps(header).encode(), bytes(data_bytes)))


@settings(max_examples=100, deadline=None)
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
