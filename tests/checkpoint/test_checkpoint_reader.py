"""Reading: the bytes equal those of the official library, and every fault is named."""

import errno
import io
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from llmcli.checkpoint import reader as reader_module
from llmcli.checkpoint.reader import TensorReader
from llmcli.checkpoint.safetensors_file import ITEMSIZE_BYTES, read_header
from llmcli.errors import CheckpointError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits of the dtype, NaN included; a bool may only hold 0 and 1."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), generator=generator)
    return numbers.to(torch.uint8).view(dtype).reshape(shape)


def save(path: Path, **tensors: torch.Tensor) -> Path:
    safetensors.torch.save_file(tensors, path)
    return path


@pytest.fixture
def small_chunks(monkeypatch):
    """Tensors of a few hundred bytes then take many reads, with a ragged last one."""
    monkeypatch.setattr(reader_module, "CHUNK_BYTES", 100)


def test_every_known_dtype_is_tested():
    assert DTYPES.keys() == ITEMSIZE_BYTES.keys()


@pytest.mark.usefixtures("small_chunks")
def test_bytes_equal_the_official_library_for_all_dtypes_and_shapes(tmp_path):
    tensors = {}
    for word, dtype in DTYPES.items():
        tensors[f"{word}.scalar"] = random_tensor(dtype)
        tensors[f"{word}.matrix"] = random_tensor(dtype, 7, 31)
        tensors[f"{word}.empty"] = random_tensor(dtype, 3, 0)
    path = save(tmp_path / "model.safetensors", **tensors)
    expected = dict(safetensors.deserialize(path.read_bytes()))

    with TensorReader() as reader:
        for name, info in read_header(path).items():
            buffer = bytearray(b"\xaa" * info.num_bytes)
            reader.read_tensor_into(info, buffer)
            assert buffer == bytes(expected[name]["data"]), name


def test_fills_torch_and_numpy_memory_of_any_item_type(tmp_path):
    tensors = {
        "bfloat16": random_tensor(torch.bfloat16, 5, 3),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    header = read_header(save(tmp_path / "model.safetensors", **tensors))
    with TensorReader() as reader:
        bfloat16 = torch.zeros(5, 3, dtype=torch.bfloat16)
        reader.read_tensor_into(header["bfloat16"], bfloat16.view(torch.int16).numpy())
        assert torch.equal(bfloat16.view(torch.int16), tensors["bfloat16"].view(torch.int16))
        scalar = np.zeros((), dtype=np.float32)
        reader.read_tensor_into(header["scalar"], scalar)
        assert scalar == 2.5
        reader.read_tensor_into(header["empty"], np.zeros((0, 4), dtype=np.float32))


def test_writes_nothing_outside_the_buffer(tmp_path):
    header = read_header(save(tmp_path / "model.safetensors", a=random_tensor(torch.uint8, 33)))
    fenced = bytearray(b"\xaa" * 53)
    with TensorReader() as reader:
        reader.read_tensor_into(header["a"], memoryview(fenced)[10:43])
    assert fenced[:10] == fenced[43:] == b"\xaa" * 10


@pytest.mark.parametrize(
    "buffer",
    [bytearray(31), bytearray(33), bytes(32), np.zeros((2, 32), np.uint8)[:, ::2], np.zeros((4, 8), np.uint8).T],
)
def test_buffer_that_does_not_fit_is_the_callers_mistake(tmp_path, buffer):
    header = read_header(save(tmp_path / "model.safetensors", a=random_tensor(torch.uint8, 32)))
    with (
        TensorReader() as reader,
        pytest.raises(ValueError, match="a needs a writable C-contiguous buffer of 32 bytes"),
    ):
        reader.read_tensor_into(header["a"], buffer)


def test_one_descriptor_per_shard_closed_at_the_end(tmp_path, monkeypatch):
    opened = []

    class CountedFile(io.FileIO):
        def __init__(self, path):
            super().__init__(path)
            opened.append(self)

    monkeypatch.setattr(reader_module, "FileIO", CountedFile)
    first = read_header(save(tmp_path / "1.safetensors", a=torch.zeros(2), b=torch.ones(2)))
    second = read_header(save(tmp_path / "2.safetensors", c=torch.ones(3)))
    with TensorReader() as reader:
        for info in [first["b"], second["c"], first["a"], first["b"]]:
            reader.read_tensor_into(info, bytearray(info.num_bytes))
        assert [file.name.name for file in opened] == ["1.safetensors", "2.safetensors"]
        assert not any(file.closed for file in opened)
    assert all(file.closed for file in opened)


def test_short_reads_are_continued(tmp_path, monkeypatch):
    class SlowFile(io.FileIO):
        def readinto(self, view):
            return super().readinto(view[:7])

    tensor = random_tensor(torch.float32, 50)
    header = read_header(save(tmp_path / "model.safetensors", a=tensor))
    monkeypatch.setattr(reader_module, "FileIO", SlowFile)
    values = np.zeros(50, np.float32)
    with TensorReader() as reader:
        reader.read_tensor_into(header["a"], values)
    assert values.tobytes() == tensor.numpy().tobytes()


@pytest.mark.usefixtures("small_chunks")
def test_file_that_ends_midway_is_named(tmp_path):
    path = save(tmp_path / "model.safetensors", a=torch.zeros(10), b=torch.zeros(100))
    header = read_header(path)
    os.truncate(path, header["b"].offset + 250)
    with TensorReader() as reader:
        reader.read_tensor_into(header["a"], bytearray(40))
        with pytest.raises(CheckpointError, match=f"b in {path} ends after 250 bytes of 400: the file has shrunk"):
            reader.read_tensor_into(header["b"], bytearray(400))
        with pytest.raises(CheckpointError, match="b in .* ends after 250 bytes of 400"):
            reader.is_equal(header["b"], header["b"])


def test_file_that_is_gone_or_unreadable_is_named(tmp_path, monkeypatch):
    path = save(tmp_path / "model.safetensors", a=torch.zeros(10))
    header = read_header(path)

    class FailingFile(io.FileIO):
        def readinto(self, view):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, TensorReader() as reader:
        patch.setattr(reader_module, "FileIO", FailingFile)
        with pytest.raises(CheckpointError, match=f"a cannot be read from {path}: Input/output error; check the disk"):
            reader.read_tensor_into(header["a"], bytearray(40))
    path.unlink()
    with TensorReader() as reader, pytest.raises(CheckpointError, match=f"a cannot be read from {path}: No such file"):
        reader.read_tensor_into(header["a"], bytearray(40))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("changed_byte", [None, 0, 99, 100, 249])
def test_is_equal_sees_every_byte(tmp_path, changed_byte):
    first = random_tensor(torch.uint8, 250)
    second = first.clone()
    if changed_byte is not None:
        second[changed_byte] += 1
    header = read_header(save(tmp_path / "model.safetensors", first=first, second=second))
    with TensorReader() as reader:
        assert reader.is_equal(header["first"], header["second"]) == (changed_byte is None)


def test_is_equal_compares_dtype_and_shape(tmp_path):
    tensors = {"a": torch.zeros(2, 3), "shape": torch.zeros(3, 2), "dtype": torch.zeros(2, 3, dtype=torch.int32)}
    header = read_header(save(tmp_path / "model.safetensors", **tensors))
    with TensorReader() as reader:
        assert reader.is_equal(header["a"], header["a"])
        assert not reader.is_equal(header["a"], header["shape"])
        assert not reader.is_equal(header["a"], header["dtype"])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("begin", "length"), [(0, 250), (0, 1), (249, 1), (90, 120), (100, 100), (250, 0)])
def test_a_range_is_a_part_of_the_whole(tmp_path, begin, length):
    first, second = random_tensor(torch.uint8, 250), random_tensor(torch.uint8, 250)
    header = read_header(save(tmp_path / "model.safetensors", first=first, second=second))
    buffer = bytearray(length)
    with TensorReader() as reader:
        reader.read_range_into(header["second"], begin, buffer)
    assert bytes(buffer) == second.numpy().tobytes()[begin : begin + length]


@pytest.mark.parametrize(("begin", "length"), [(-1, 2), (0, 251), (250, 1), (200, 51)])
def test_a_range_outside_the_tensor_is_the_callers_mistake(tmp_path, begin, length):
    header = read_header(save(tmp_path / "model.safetensors", a=random_tensor(torch.uint8, 250)))
    with TensorReader() as reader, pytest.raises(ValueError, match="a of 250 bytes has no"):
        reader.read_range_into(header["a"], begin, bytearray(length))
