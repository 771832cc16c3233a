"""Shapes of models, and the random weights that are written for them."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from row_steps import logits_of
from tiny_models import CONFIG

from llmcli.checkpoint.model import num_parameters, open_model
from llmcli.checkpoint.random_weights import RandomReader, write_shape
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.checkpoint.shapes import FORMATS, shape_model, shape_names
from llmcli.errors import CheckpointError, OutputError, UsageError
from llmcli.runners.torch.load import load

# By their authors' count, a tied head once.
PUBLISHED = {
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-13B": 13_015_864_320,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "TinyLlama-1.1B": 1_100_048_384,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen3-4B": 4_022_468_096,
}


def ignore(done: int, total: int) -> None: ...


def test_parameters_are_the_published_ones() -> None:
    assert {name: num_parameters(shape_model(name, "bf16")) for name in shape_names()} == PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_quantizing_leaves_the_parameters(name: str) -> None:
    model = shape_model(name, "int4")
    assert num_parameters(model) == PUBLISHED[name]
    assert model.tensors.unused == ()


def test_an_unknown_name_lists_the_shapes() -> None:
    with pytest.raises(
        UsageError, match="'Llama-9' is not a known shape; expected one of Llama-2-13B, .*, TinyLlama-1.1B"
    ):
        shape_model("Llama-9", "bf16")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A shape small enough to be written in a test, with biases."""
    folder = tmp_path / "configs" / "models"
    folder.mkdir(parents=True)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 320}
    config = {**CONFIG, **sizes, "dtype": "float16", "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (folder / "Tiny.json").write_text(json.dumps(config))
    monkeypatch.setattr("llmcli.checkpoint.shapes.resource_folder", lambda name: tmp_path / name)
    return "Tiny"


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_written_is_what_was_planned(tiny: str, form: str, tmp_path: Path) -> None:
    folder = tmp_path / "scratch" / "model"
    done = []
    write_shape(tiny, form, folder, lambda read, total: done.append((read, total)))
    written, planned = open_model(folder), shape_model(tiny, form)

    def facts(tensors: dict[str, TensorInfo]) -> dict[str, tuple[str, tuple[int, ...], int]]:
        return {name: (info.dtype, info.shape, info.num_bytes) for name, info in tensors.items()}

    assert facts(written.checkpoint.tensors) == facts(planned.checkpoint.tensors)
    assert written.tensors.quantized == planned.tensors.quantized
    assert (form == "fp8") == bool(written.tensors.scaled)
    assert written.config == planned.config
    assert {"int8": 8, "int4": 4, "awq": 4, "fp8": None, "bf16": None}[form] == next(
        (layer.scheme.num_bits for layer in written.tensors.packed.values()), None
    )
    with (folder / "model.safetensors").open("rb") as file:
        header_bytes = struct.unpack("<Q", file.read(8))[0]
    data_bytes = sum(info.num_bytes for info in planned.checkpoint.tensors.values())
    assert (folder / "model.safetensors").stat().st_size == 8 + header_bytes + data_bytes
    assert done[-1][0] == done[-1][1] > 0
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("form", FORMATS)
def test_random_models_neither_repeat_themselves_nor_blow_up(tiny: str, form: str, tmp_path: Path) -> None:
    write_shape(tiny, form, tmp_path / "model", ignore)
    runner = load(open_model(tmp_path / "model"), max_seq_len=64)
    choices = set()
    for first in range(20):
        logits = logits_of(runner, [first, 7, 9])
        assert 1 < logits.std() < 4
        choices.add(int(logits.argmax()))
    assert len(choices) > 10


def test_an_interrupted_run_leaves_nothing(tiny: str, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for form in FORMATS:
        with pytest.raises(KeyboardInterrupt):
            write_shape(tiny, form, tmp_path / "scratch" / "model", interrupt)
        assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("form", ["int8", "bf16"])
def test_a_full_disk_is_found_before_it_is_full(
    tiny: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 70 * 2**20})())
    write_shape(tiny, form, tmp_path / "model", ignore)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 64 * 2**20})())
    with pytest.raises((CheckpointError, OutputError), match="0.07 GB free"):
        write_shape(tiny, form, tmp_path / "other", ignore)
    assert not (tmp_path / "other").exists()


def info(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> TensorInfo:
    itemsize = {"BF16": 2, "F16": 2, "F32": 4}[dtype]
    return TensorInfo(name, dtype, shape, Path("nowhere"), 0, int(np.prod(shape)) * itemsize)


def read(reader: RandomReader, tensor: TensorInfo, begin: int = 0, count: int | None = None) -> torch.Tensor:
    buffer = bytearray(tensor.num_bytes - begin if count is None else count)
    reader.read_range_into(tensor, begin, buffer)
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[tensor.dtype]
    return torch.frombuffer(buffer, dtype=dtype).float()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_random_numbers_have_the_size_of_their_layer(dtype: str) -> None:
    reader = RandomReader()
    weight = read(reader, info("model.layers.0.mlp.up_proj.weight", (500, 400), dtype))
    assert weight.std().item() == pytest.approx(400**-0.5, rel=0.02)
    assert abs(weight.mean().item()) < 1e-3
    head = read(reader, info("lm_head.weight", (500, 400), dtype))
    assert head.std().item() == pytest.approx(2 * 400**-0.5, rel=0.02)
    assert read(reader, info("model.norm.weight", (400,), dtype)).unique().tolist() == [1.0]
    rows = weight.reshape(500, 400)
    assert len({tuple(row.tolist()) for row in rows}) == 500


def test_pieces_are_those_of_the_whole_beyond_the_end_of_the_pool() -> None:
    tensor = info("model.layers.3.mlp.up_proj.weight", (4500, 2000))  # more numbers than the pool has
    whole = read(RandomReader(), tensor)
    begin = 2 * 8_388_000
    assert torch.equal(read(RandomReader(), tensor, begin, 20_000), whole[begin // 2 :][:10_000])
    other = read(RandomReader(), info("model.layers.4.mlp.up_proj.weight", (4500, 2000)))
    assert not torch.equal(other, whole)
