"""The content of an export: the plan, its sizes, its files."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from exports import contents, dequantized, export, read_tensors, write_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.export_plan import plan_export
from llmcli.checkpoint.export_workspace import read_card
from llmcli.checkpoint.model import open_model
from llmcli.checkpoint.safetensors_file import ITEMSIZE_BYTES, OutputTensor, SafetensorsWriter, read_header
from llmcli.errors import CheckpointError
from llmcli.quantization.schemes import ExportOptions, WeightScheme

INT8 = WeightScheme(8, 64)
ASYMMETRIC = WeightScheme(4, 64, is_symmetric=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source")


def test_weights_are_close_and_their_quality_is_what_is_reported(source: Path, tmp_path: Path) -> None:
    qualities = export(source, tmp_path / "export", INT8)
    before, after = read_tensors(source), read_tensors(tmp_path / "export")
    assert list(qualities) == [name.removesuffix(".weight") for name in before_order(source) if "_proj" in name]
    for module, quality in qualities.items():
        weight = before[f"{module}.weight"].double()
        error = dequantized(after, module, INT8).double() - weight
        row_errors = error.norm(dim=1) / weight.norm(dim=1)
        assert quality.relative_rms_error == pytest.approx(float(error.norm() / weight.norm()), rel=1e-4)
        assert quality.worst_row == int(row_errors.argmax())
        assert quality.worst_row_error == pytest.approx(float(row_errors.max()), rel=1e-4)
        assert 0.001 < quality.relative_rms_error < 0.01
        assert 0 < quality.saturation < 0.05
        assert after[f"{module}.weight_scale"].dtype == torch.bfloat16


def before_order(source: Path) -> list[str]:
    return list(open_model(source).tensors.tensors)


def test_tensors_larger_than_a_task_are_put_together_in_order(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for scheme in (INT8, ASYMMETRIC):
        export(source, tmp_path / "whole" / str(scheme.num_bits) / "export", scheme)
    monkeypatch.setattr("llmcli.checkpoint.export.WEIGHTS_PER_TASK", 128 * 7)
    for scheme in (INT8, ASYMMETRIC):
        export(source, tmp_path / "pieces" / str(scheme.num_bits) / "export", scheme)
    assert contents(tmp_path / "whole") == contents(tmp_path / "pieces")


def test_a_shard_is_laid_out_for_reading_in_place(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "export", ASYMMETRIC)
    infos = read_header(tmp_path / "export" / "model.safetensors")
    itemsizes = {"I64": 8, "I32": 4, "BF16": 2}
    assert {info.dtype for info in infos.values()} == set(itemsizes)
    assert all(info.offset % itemsizes[info.dtype] == 0 for info in infos.values())
    assert min(info.offset for info in infos.values()) % 8 == 0


def test_shards_and_index(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "one" / "export", INT8)
    export(source, tmp_path / "many" / "export", INT8, shard_bytes=60_000)
    folder = tmp_path / "many" / "export"
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    together = read_tensors(tmp_path / "one" / "export")
    assert index["weight_map"].keys() == together.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in together.values())
    for name, tensor in read_tensors(folder).items():
        assert torch.equal(tensor, together[name])
        assert name in read_header(folder / index["weight_map"][name])
    for shard in shards:
        data_bytes = sum(info.num_bytes for info in read_header(folder / shard).values())
        assert data_bytes <= 60_000 or len(read_header(folder / shard)) == 1


def test_scales_have_the_dtype_that_config_json_names(tmp_path: Path) -> None:
    cases = [("torch_dtype", "float16", torch.float32), ("dtype", "bfloat16", torch.float16)]
    for key, name, stored in cases:
        source = write_model(tmp_path / key, stored)
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, key: name}))
        export(source, tmp_path / f"{key}-export", INT8)
        scale = read_tensors(tmp_path / f"{key}-export")["model.layers.0.mlp.up_proj.weight_scale"]
        assert scale.dtype == getattr(torch, name)


def test_small_files_come_along(source: Path, tmp_path: Path) -> None:
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("tool")
    (source / "LICENSE").write_text("do what you want")
    (source / "README.md").write_text("# the original")
    (source / "model.safetensors.index.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("weights")
    (source / ".hidden.json").write_text("{}")
    (source / "notes").mkdir()
    export(source, tmp_path / "export", INT8)
    after = contents(tmp_path / "export")
    assert after.keys() == {
        "model.safetensors",
        "config.json",
        "quantization.json",
        "README.md",
        "README.source.md",
        "LICENSE",
        "generation_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE", "chat_template.jinja"):
        assert after[name] == (source / name).read_bytes()
    assert after["README.source.md"] == b"# the original"
    assert list(tmp_path.glob(".*")) == []


def test_config_json(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "export", WeightScheme(4, 64), skip=("0.mlp.up",), head_bits=8)
    before = json.loads((source / "config.json").read_text())
    after = json.loads((tmp_path / "export" / "config.json").read_text())
    quantization = after.pop("quantization_config")
    assert after == before
    assert quantization["ignore"] == ["model.layers.0.mlp.up_proj"]
    targets = {group["targets"][0]: group["weights"]["num_bits"] for group in quantization["config_groups"].values()}
    assert targets == {"Linear": 4, "lm_head": 8}


def test_a_tied_model_is_only_untied_for_a_quantized_head(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", tie_word_embeddings=True)
    export(source, tmp_path / "kept", INT8)
    export(source, tmp_path / "int8", INT8, head_bits=8)
    for name, is_tied in (("kept", True), ("int8", False)):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["tie_word_embeddings"] is is_tied
        assert any("lm_head" in tensor for tensor in read_tensors(tmp_path / name)) is not is_tied
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]


def test_quality_card(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", intermediate_size=250)
    qualities = export(source, tmp_path / "export", WeightScheme(4, 64), skip=("layers.0.self_attn.o_proj",))
    card = json.loads((tmp_path / "export" / "quantization.json").read_text())
    assert card["format_version"] == 1
    assert (card["num_bits"], card["group_size"], card["symmetric"], card["head_bits"]) == (4, 64, True, None)
    assert card["source"] == "source"
    assert card["kept_layers"] == ["model.layers.0.self_attn.o_proj"]
    assert card["channel_layers"] == [f"model.layers.{index}.mlp.down_proj" for index in (0, 1)]
    assert card["bytes_after"] == sum(tensor.nbytes for tensor in read_tensors(tmp_path / "export").values())
    assert card["bytes_before"] == sum(tensor.nbytes for tensor in read_tensors(source).values())
    assert card["tensors"].keys() == qualities.keys()
    down = card["tensors"]["model.layers.0.mlp.down_proj"]
    assert down["scheme"] == "int4, one scale a row"
    assert down["relative_rms_error"] == qualities["model.layers.0.mlp.down_proj"].relative_rms_error
    readme = (tmp_path / "export" / "README.md").read_text()
    for text in ("# export", "int4, groups of 64", "model.layers.1.mlp.down_proj", "| q_proj |", "vLLM"):
        assert text in readme
    assert "dequantize=True" not in readme


def test_the_card_of_an_asymmetric_export_says_how_to_load_it(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "export", ASYMMETRIC)
    assert "CompressedTensorsConfig(dequantize=True)" in (tmp_path / "export" / "README.md").read_text()


def test_sizes_of_a_plan(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", tie_word_embeddings=True)
    plan = plan_export(open_model(source), ExportOptions(WeightScheme(8, 128), head_bits=8))
    head, mlp, embedding = (plan.sizes[kind] for kind in ("output head", "MLP", "embedding"))
    assert (head.bytes_before, head.bytes_after) == (0, 288 * 128 + 288 * 2 + 16)
    assert (embedding.bytes_before, embedding.bytes_after) == (288 * 128 * 2,) * 2
    assert (mlp.num_tensors, mlp.bytes_before) == (6, 6 * 256 * 128 * 2)
    assert mlp.bytes_after == 6 * (256 * 128 + 16) + 2 * (2 * 256 * 2 + 2 * 128 * 2)
    assert plan.total.bytes_before == sum(tensor.nbytes for tensor in read_tensors(source).values())


def test_progress_counts_the_bytes_of_the_source(source: Path, tmp_path: Path) -> None:
    plan = plan_export(open_model(source), ExportOptions(INT8, shard_bytes=60_000))
    exporter = Exporter(plan, tmp_path / "export", "source")
    seen: list[tuple[int, int]] = []
    names: list[str] = []
    exporter.run(exporter.prepare(), lambda *step: seen.append(step), lambda name, quality: names.append(name))
    total = sum(tensor.nbytes for tensor in read_tensors(source).values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)
    assert len(names) == 14


def test_a_tensor_of_zeros(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].zero_()
    save_file(tensors, source / "model.safetensors")
    qualities = export(source, tmp_path / "export", INT8)
    assert qualities["model.layers.0.mlp.up_proj"].relative_rms_error == 0
    after = read_tensors(tmp_path / "export")
    assert (after["model.layers.0.mlp.up_proj.weight_scale"] == 1).all()
    assert np.all(dequantized(after, "model.layers.0.mlp.up_proj", INT8).numpy() == 0)


def test_a_card_that_is_not_one_is_not_read(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    export(source, folder, INT8)
    card = json.loads((folder / "quantization.json").read_text())
    assert read_card(folder) == card
    strange = (None, "x", 1, [], {}, [1], {"a": 1}, {"a": {"relative_rms_error": "x"}})
    damaged = [json.dumps({**card, key: value}) for key in ("tensors", "source", "format_version") for value in strange]
    damaged += [json.dumps({**card, "evaluation": {"text": "t", "mean_kl": 1}}), "[" * 10**5, "[]", "9" * 5000, ""]
    for text in damaged:
        (folder / "quantization.json").write_text(text)
        found = read_card(folder)
        assert found is None or (found["source"] == "x" and found["tensors"] == card["tensors"]) or found == card
    (folder / "quantization.json").unlink()
    os.mkfifo(folder / "quantization.json")
    assert read_card(folder) is None


# The safetensors writer, read by the safetensors library and by our own reader.


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
