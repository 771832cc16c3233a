"""The safetensors writer, read by the safetensors library and by our own reader."""

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from llmcli.checkpoint.safetensors_file import ITEMSIZE_BYTES, OutputTensor, SafetensorsWriter, read_header
from llmcli.errors import CheckpointError


@pytest.mark.parametrize("name_length", range(1, 9))
def test_every_tensor_can_be_viewed_in_place(tmp_path: Path, name_length: int) -> None:
    path = tmp_path / "model.safetensors"
    names = [letter * name_length for letter in "abcd"]
    arrays = {
        names[0]: np.arange(3, dtype=np.float16),
        names[1]: np.arange(5, dtype=np.int32),
        names[2]: np.arange(2, dtype=np.int64),
        names[3]: np.arange(6, dtype=np.float16).reshape(2, 3),
    }
    dtypes = dict(zip(names, ("F16", "I32", "I64", "F16"), strict=True))
    tensors = [OutputTensor(name, dtypes[name], array.shape) for name, array in arrays.items()]
    with SafetensorsWriter(path, tensors) as writer:
        for name, array in reversed(arrays.items()):  # in any order
            writer.write(name, array[1:].data, array[:1].nbytes)
            writer.write(name, array[:1].data)
        writer.finish()
        assert path.stat().st_size == writer.num_bytes
    infos = read_header(path)
    for name, info in infos.items():
        assert info.offset % ITEMSIZE_BYTES[info.dtype] == 0
        assert info.num_bytes == arrays[name].nbytes
    assert min(info.offset for info in infos.values()) % 8 == 0
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
        for name, array in arrays.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)


def test_a_disk_that_takes_only_a_part_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    with SafetensorsWriter(path, [OutputTensor("a", "I32", (100,))]) as writer:
        whole = writer._file.write

        class Reluctant:
            def __getattr__(self, name: str) -> object:
                return getattr(file, name)

            def write(self, view: memoryview) -> int:
                return whole(view[:7])

        file = writer._file
        monkeypatch.setattr(writer, "_file", Reluctant())
        writer.write("a", np.arange(100, dtype=np.int32).data)
        monkeypatch.undo()
    with safe_open(path, "np") as file_:
        np.testing.assert_array_equal(file_.get_tensor("a"), np.arange(100))


@pytest.mark.parametrize("damage", ["cut", "another name", "another header"])
def test_what_the_library_does_not_read_as_written_is_not_finished(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model.safetensors"
    with SafetensorsWriter(path, [OutputTensor("a", "I32", (100,))]) as writer:
        writer.write("a", np.arange(100, dtype=np.int32).data)
        content = path.read_bytes()
        if damage == "cut":
            path.write_bytes(content[:-1])
        elif damage == "another name":
            path.write_bytes(content.replace(b'"a"', b'"b"'))
        else:
            path.write_bytes(content.replace(b"I32", b"I33"))
        messages = {"cut": "is truncated", "another name": "does not hold the tensors", "another header": "dtype I33"}
        with pytest.raises(CheckpointError, match=messages[damage]):
            writer.finish()
