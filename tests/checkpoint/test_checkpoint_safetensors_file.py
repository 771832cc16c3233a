"""Headers: what the official library writes is read alike, and every kind of damage is named."""

import json
import os
import struct
from functools import partial
from pathlib import Path

import plain_checkpoints
import pytest
import safetensors
import safetensors.torch
import torch

from llmcli.checkpoint import safetensors_file
from llmcli.checkpoint.safetensors_file import MAX_HEADER_BYTES, printable, read_header
from llmcli.errors import UnsupportedModelError

F32_ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
EMPTY_F32_ENTRY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def write_raw(folder: Path, header: object, data: bytes = b"12345678") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


refusal = partial(plain_checkpoints.refusal, read=read_header)


def test_header_agrees_with_the_official_library(tmp_path):
    tensors = {
        "z.last": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 7, dtype=torch.float16),
        "odd": torch.arange(5, dtype=torch.uint8),
        "größe.😀": torch.ones(1, 1, 1, dtype=torch.int32),
    }
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    content = path.read_bytes()
    expected = dict(safetensors.deserialize(content))

    header = read_header(path)

    assert header.keys() == tensors.keys()
    for name, info in header.items():
        assert (info.name, info.path) == (name, path)
        assert info.dtype == expected[name]["dtype"]
        assert list(info.shape) == expected[name]["shape"] == list(tensors[name].shape)
        assert content[info.offset : info.offset + info.num_bytes] == bytes(expected[name]["data"])
    offsets = [info.offset for info in header.values()]
    assert offsets == sorted(offsets)


def test_header_without_tensors(tmp_path):
    assert read_header(write_raw(tmp_path, {}, b"")) == {}
    assert read_header(write_raw(tmp_path, {"__metadata__": None}, b"")) == {}


def test_empty_tensor_shares_its_offset_with_its_neighbour(tmp_path):
    header = read_header(write_raw(tmp_path, {"a": F32_ENTRY, "b": EMPTY_F32_ENTRY}))
    assert list(header) == ["b", "a"]
    assert header["a"].offset == header["b"].offset


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated: 0 bytes of 8; incomplete download?"),
        (b"1234567", "truncated: 7 bytes of 8; incomplete download?"),
        (struct.pack("<Q", 20) + b"{}", "truncated: 10 bytes of 28; incomplete download?"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1), f"a header of {MAX_HEADER_BYTES + 1} bytes, at most"),
        (struct.pack("<Q", MAX_HEADER_BYTES), f"truncated: 8 bytes of {MAX_HEADER_BYTES + 8}"),
        (b"<!DOCTYPE html><html>Sign in</html>", "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git-lfs pointer"),
    ],
)
def test_file_that_has_no_whole_header_is_refused(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert message in refusal(path)


def test_file_of_another_length_than_its_header_says_is_refused(tmp_path):
    path = write_raw(tmp_path, {"a": F32_ENTRY})
    file_bytes = path.stat().st_size
    assert read_header(path)
    path.write_bytes(path.read_bytes()[:-1])
    assert f"truncated: {file_bytes - 1} bytes of {file_bytes}; incomplete download?" in refusal(path)
    path.write_bytes(path.read_bytes() + b"..")
    assert f"is {file_bytes + 1} bytes long, its header describes {file_bytes}" in refusal(path)


def test_what_is_no_file_is_refused(tmp_path):
    assert "is missing" in refusal(tmp_path / "absent.safetensors")
    (tmp_path / "broken.safetensors").symlink_to(tmp_path / "absent.safetensors")
    assert "broken link" in refusal(tmp_path / "broken.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    assert "not a file" in refusal(tmp_path / "folder.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "not a file" in refusal(tmp_path / "pipe.safetensors")
    assert "cannot be read: File name too long" in refusal(tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\xff\xfe{}", "is not valid JSON: 'utf-8' codec"),
        (b"\xef\xbb\xbf{}", "is not valid JSON"),
        (b'{"a": ', "is not valid JSON: Expecting value"),
        (b"{}\x00", "is not valid JSON: Extra data"),
        (b"[" * 100_000, "is not valid JSON: maximum recursion depth exceeded"),
        (b"[]", "is a JSON list, expected an object"),
        (b'{"a": {}, "a": {}}', "a is described 2 times"),
        (
            b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [2], "data_offsets": [0, 8]}}',
            "dtype is described 2 times",
        ),
        ({"__metadata__": {"format": 1}}, "__metadata__"),
        ({"__metadata__": ["pt"]}, "__metadata__"),
        ({"__metadata__": []}, "__metadata__"),
        (b'{"__metadata__": {"format": "\\ud800"}}', "__metadata__"),
        ({"a": [1]}, "describes tensor a by [1], expected an object of ['data_offsets', 'dtype', 'shape']"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "describes tensor a by"),
        ({"a": F32_ENTRY | {"stride": [1]}}, "describes tensor a by"),
        (b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', r"describes tensor '\ud800' by"),
    ],
)
def test_header_that_is_not_as_specified_is_refused(tmp_path, header, message):
    assert message in refusal(write_raw(tmp_path, header))


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2", "I4", "bf16", "F33", None, {"F32": None}, ["F32"]])
def test_unknown_dtype_is_refused_by_name(tmp_path, dtype):
    path = write_raw(tmp_path, {"a.weight": F32_ENTRY | {"dtype": dtype}})
    assert f"a.weight in {path} has dtype {printable(dtype)}, expected one of BOOL, " in refusal(path)
    with pytest.raises(UnsupportedModelError):
        read_header(path)


@pytest.mark.parametrize("shape", ["2", 2, None, [-2], [2.0], [True, 2], ["2"], [[2]], {"0": 2}])
def test_shape_that_is_no_list_of_sizes_is_refused(tmp_path, shape):
    path = write_raw(tmp_path, {"a": F32_ENTRY | {"shape": shape}})
    assert f"gives tensor a the shape {printable(shape)}, expected a list of integers" in refusal(path)


@pytest.mark.parametrize("offsets", ["08", 8, None, [], [8], [0, 4, 8], [-8, 0], [8, 0], [0, 8.0], [False, 8]])
def test_offsets_that_are_no_range_are_refused(tmp_path, offsets):
    path = write_raw(tmp_path, {"a": F32_ENTRY | {"data_offsets": offsets}})
    assert f"gives tensor a data_offsets {printable(offsets)}, expected [begin, end]" in refusal(path)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("F32", [3]),
        ("F32", []),
        ("F32", [2, 0]),
        ("BF16", [2]),
        ("F64", [2]),
        ("U8", [2**63]),
        ("U8", [2**32, 2**32, 8]),
        ("U8", [2**63, 4, 0]),
    ],
)
def test_shape_of_another_size_than_the_data_is_refused(tmp_path, dtype, shape):
    path = write_raw(tmp_path, {"a": F32_ENTRY | {"dtype": dtype, "shape": shape}})
    assert f"gives tensor a 8 bytes of data, which is not {dtype} of shape {printable(shape)}" in refusal(path)


def test_shape_that_overflows_is_refused_even_when_a_zero_makes_it_empty(tmp_path):
    path = write_raw(tmp_path, {"a": EMPTY_F32_ENTRY | {"shape": [2**62, 2**62, 0]}}, b"")
    assert "gives tensor a 0 bytes of data" in refusal(path)


@pytest.mark.parametrize("digits", ["-0", "9" * 21, "9" * 5000])
def test_number_that_cannot_be_a_size_is_refused(tmp_path, digits):
    header = f'{{"a": {{"dtype": "F32", "shape": [{digits}], "data_offsets": [0, 0]}}}}'.encode()
    message = refusal(write_raw(tmp_path, header))
    assert "is not a size" in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("first", "second", "begin", "expected"),
    [
        ([0, 8], [0, 8], 0, 8),  # the same bytes
        ([0, 8], [4, 12], 4, 8),  # an overlap
        ([0, 8], [12, 20], 12, 8),  # a hole
        ([4, 12], [12, 20], 4, 0),  # a hole at the start
        ([0, 8], [2**62, 2**62 + 8], 2**62, 8),  # far outside the file
    ],
)
def test_tensors_that_overlap_or_leave_a_hole_are_refused(tmp_path, first, second, begin, expected):
    header = {"a": F32_ENTRY | {"data_offsets": first}, "b": F32_ENTRY | {"data_offsets": second}}
    message = refusal(write_raw(tmp_path, header, bytes(20)))
    assert f"begins at byte {begin} of the data, expected {expected}: tensors overlap or leave a hole" in message


def test_names_from_the_file_cannot_break_the_line_or_the_terminal(tmp_path):
    hostile = "a\n\x1b[2Jerror: all is well" + "x" * 10_000
    message = refusal(write_raw(tmp_path, {hostile: F32_ENTRY | {"shape": [3]}}))
    assert r"'a\n\x1b[2J" in message
    assert len(message) < 700


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"a": %s, "a": %s}', "a is described 2 times"),
        (b'{"a": ["F32", [2], [0, 8]]}', "describes tensor a by ['F32', [2], [0, 8]], expected an object"),
        (
            b'{"a": {"dtype": {"F32": null}, "shape": [2], "data_offsets": [0, 8]}}',
            "a in {path} has dtype {'F32': None}",
        ),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "x": {"y": [1]}}}', "describes tensor a by"),
        (b'{"shape": ["F32", [2], [0, 8]]}', "describes tensor shape by"),
        (b'{"a": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}}', "a in {path} has dtype F4, expected one of"),
    ],
    ids=["twice", "list", "dtype", "key", "name", "half bytes"],
)
def test_what_the_library_lets_through_is_refused(tmp_path, header, message):
    path = write_raw(tmp_path, header.replace(b"%s", json.dumps(F32_ENTRY).encode()))
    with safetensors.safe_open(path, framework="numpy") as file:
        assert len(file.keys()) == 1
    assert message.replace("{path}", str(path)) in refusal(path)


def test_tensors_named_as_the_keys_of_an_entry_are_read(tmp_path):
    metadata = {"dtype": "a", "shape": "b", "data_offsets": "c"}
    names = {"dtype": F32_ENTRY, "shape": EMPTY_F32_ENTRY, "data_offsets": EMPTY_F32_ENTRY, "__metadata__": metadata}
    assert read_header(write_raw(tmp_path, names)).keys() == {"dtype", "shape", "data_offsets"}


def test_tensors_are_in_the_order_of_their_bytes_and_empty_ones_in_that_of_their_names(tmp_path):
    empty = {name: EMPTY_F32_ENTRY for name in "hdbgacfe"}  # the library's order of these varies
    header = {"z": F32_ENTRY | {"data_offsets": [8, 16]}, "a0": F32_ENTRY} | empty
    assert list(read_header(write_raw(tmp_path, header, bytes(16)))) == [*"abcdefgh", "a0", "z"]


@pytest.mark.parametrize("change", ["longer", "another", "rewritten"])
def test_file_that_changes_while_its_header_is_read_is_refused(tmp_path, monkeypatch, change):
    path = write_raw(tmp_path, {"a": F32_ENTRY})
    (tmp_path / "other").mkdir()
    other = write_raw(tmp_path / "other", {"bb": F32_ENTRY})

    def open_later(*arguments, **keywords):
        if change == "longer":
            with path.open("ab") as file:
                file.write(b"..")
        elif change == "another":
            other.replace(path)
        else:
            path.write_bytes(path.read_bytes())
            os.utime(path, ns=(1, 1))
        return safetensors.safe_open(*arguments, **keywords)

    monkeypatch.setattr(safetensors_file, "safe_open", open_later)
    message = refusal(path)
    assert "changed while it was read; wait until it is written" in message or change == "longer"


def test_nothing_stays_open_or_mapped(tmp_path):
    path = write_raw(tmp_path, {"a": F32_ENTRY})
    (tmp_path / "other").mkdir()
    damaged = write_raw(tmp_path / "other", {"a": F32_ENTRY}, b"1")
    assert read_header(path)
    refusal(damaged)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()  # other tests may map files of theirs
    assert str(tmp_path) not in str([os.readlink(one.path) for one in os.scandir("/proc/self/fd") if one.is_symlink()])


def test_file_that_cannot_be_mapped_is_refused_in_words(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("No such device (os error 19)")  # as the library raises it: text alone

    path = write_raw(tmp_path, {"a": F32_ENTRY})
    monkeypatch.setattr(safetensors_file, "safe_open", fail)
    assert refusal(path) == f"the safetensors library cannot read {path}: No such device (os error 19)"


def test_refusal_without_a_fault_of_ours_is_the_librarys_own(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise safetensors.SafetensorError("odd\n\x1b" + "x" * 10_000)

    path = write_raw(tmp_path, {"a": F32_ENTRY})
    monkeypatch.setattr(safetensors_file, "safe_open", fail)
    message = refusal(path)
    assert message.startswith(f"the safetensors library cannot read {path}: odd\\n\\x1bxxx")
    assert len(message) < 700
