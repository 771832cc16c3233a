"""What an export refuses, once each with its message, and that it leaves nothing."""

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exports import contents, export, write_model
from safetensors.torch import load_file, save_file

from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.export_plan import ExportOptions, plan_export
from llmcli.checkpoint.model import open_model
from llmcli.errors import CheckpointError, LLMCliError
from llmcli.quantization.schemes import WeightScheme

INT8 = WeightScheme(8, 64)
ASYMMETRIC = WeightScheme(4, 64, is_symmetric=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source")


def refusal(source: Path, destination: Path, scheme: WeightScheme = INT8, **options: object) -> str:
    """The message of a refused export, which leaves nothing."""
    before = set(destination.parent.iterdir()) if destination.parent.exists() else set()
    with pytest.raises(LLMCliError) as caught:
        export(source, destination, scheme, **options)  # type: ignore[arg-type]
    assert (set(destination.parent.iterdir()) if destination.parent.exists() else set()) == before
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_destination_that_exists_is_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.mkdir()
    assert refusal(source, target).endswith("exists; give another folder")
    assert "is not a model folder" in refusal(source, target, replace=True)
    (tmp_path / "file").write_text("")
    assert "is not a model folder" in refusal(source, tmp_path / "file", replace=True)
    link = tmp_path / "link"
    link.symlink_to(write_model(tmp_path / "other"))
    assert "exists; give another folder, or --force" in refusal(source, tmp_path / "other")
    assert "is not a model folder" in refusal(source, link, replace=True)


def test_force_takes_weights_beside_a_config(source: Path, tmp_path: Path) -> None:
    """Other programs have a config.json too."""
    for name in ("config.json", "model.safetensors"):
        target = tmp_path / name.split(".")[0]
        target.mkdir()
        shutil.copy(source / name, target / name)
        before = contents(target)
        assert refusal(source, target).endswith("exists; give another folder")
        assert "is not a model folder, and --force replaces only model folders" in refusal(source, target, replace=True)
        assert contents(target) == before


def test_force_replaces_a_model_folder(source: Path, tmp_path: Path) -> None:
    target = write_model(tmp_path / "old")
    (target / "leftover.txt").write_text("")
    export(source, target, INT8, replace=True)
    assert not (target / "leftover.txt").exists()
    assert (target / "quantization.json").exists()
    assert list(tmp_path.glob(".*")) == []


def test_a_destination_that_overlaps_the_source_is_refused(source: Path, tmp_path: Path) -> None:
    assert "is the source itself" in refusal(source, source, replace=True)
    assert "is inside the source" in refusal(source, source / "export")
    shutil.copy(source / "config.json", tmp_path / "config.json")
    assert "holds the source" in refusal(source, tmp_path, replace=True)
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in source.iterdir():
        (linked / path.name).symlink_to(path)
    assert "holds the source" in refusal(linked, source, replace=True)


def test_a_quantized_source_is_refused(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "once", INT8)
    assert "quantized" in refusal(tmp_path / "once", tmp_path / "twice")
    model = open_model(source)
    config_json = json.loads((tmp_path / "once" / "config.json").read_text())
    quantized = replace(model, checkpoint=replace(model.checkpoint, config_json=config_json))
    with pytest.raises(CheckpointError, match="is quantized already; quantize the original model"):
        plan_export(quantized, ExportOptions(INT8))


def test_a_disk_that_is_too_small_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 10**6))
    message = refusal(source, tmp_path / "export")
    assert "has 0.00 GB free; the export needs 0.07 GB" in message


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named(source: Path, tmp_path: Path, bad: float) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][3, 5] = bad
    save_file(tensors, source / "model.safetensors")
    message = refusal(source, tmp_path / "export")
    assert "model.layers.1.self_attn.v_proj.weight in" in message
    assert "NaN, infinity" in message


def test_a_source_that_shrinks_meanwhile(source: Path, tmp_path: Path) -> None:
    plan = plan_export(open_model(source), ExportOptions(INT8))
    exporter = Exporter(plan, tmp_path / "export", "source")
    workspace = exporter.prepare()
    with (source / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(CheckpointError, match="has shrunk"):
        exporter.run(workspace, lambda done, total: None, lambda name, quality: None)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_choices_that_do_not_go_together(source: Path, tmp_path: Path) -> None:
    message = refusal(source, tmp_path / "export", ASYMMETRIC, head_bits=8)
    assert "--asymmetric and --head int8 cannot be combined" in message
    assert "transformers loads asymmetric weights only if" in message
    odd = write_model(tmp_path / "odd", intermediate_size=250)
    message = refusal(odd, tmp_path / "export", ASYMMETRIC)
    assert "does not divide the 250 inputs of model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj" in message
    export(odd, tmp_path / "skipped", ASYMMETRIC, skip=("down_proj",))


def test_skip_patterns_that_cannot_be(source: Path, tmp_path: Path) -> None:
    assert "--skip '(' is not a regular expression" in refusal(source, tmp_path / "export", skip=("(",))
    message = refusal(source, tmp_path / "export", skip=("lm_head",))
    assert "matches no linear layer; their names look like model.layers.0.self_attn.q_proj" in message
    assert "nothing to quantize" in refusal(source, tmp_path / "export", skip=("",))
