"""Where an export goes, and what is refused before any work."""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exports import contents, export, write_model
from safetensors.torch import load_file, save_file

from llmcli.checkpoint import safetensors_file
from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.export_plan import ExportOptions, plan_export
from llmcli.checkpoint.export_workspace import refuse_existing, resolve_destination
from llmcli.checkpoint.model import open_model
from llmcli.errors import CheckpointError, InsufficientMemoryError, LLMCliError, OutputError, UsageError
from llmcli.quantization.schemes import WeightScheme

INT8 = WeightScheme(8, 64)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source")


def make(kind: str, path: Path) -> None:
    if kind == "file":
        path.write_text("")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    elif kind == "link to a model":
        path.symlink_to(write_model(path.with_name("other")))
    else:
        path.symlink_to({"link to nothing": "nowhere", "link to a device": "/dev/null", "ring of links": path}[kind])


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    "kind",
    ["file", "folder", "pipe", "socket", "link to a model", "link to nothing", "link to a device", "ring of links"],
)
def test_what_is_not_a_model_folder_is_never_replaced(source: Path, tmp_path: Path, kind: str, replace: bool) -> None:
    target = tmp_path / "there"
    make(kind, target)
    info = target.lstat()
    message = (
        "is not a model folder, and --force replaces only model folders" if replace else "exists; give another folder"
    )
    for attempt in (
        lambda: refuse_existing(target, replace=replace),
        lambda: export(source, target, INT8, replace=replace),
    ):
        with pytest.raises(UsageError, match=message):
            attempt()
    assert (target.lstat().st_ino, target.lstat().st_mode) == (info.st_ino, info.st_mode)
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize(
    ("code", "remedy", "moment"),
    [
        (errno.EACCES, "choose a folder that you can write to", 1),
        (errno.EROFS, "choose a folder that you can write to", 30),
        (errno.ENOSPC, "free some space, then run the same command again to resume", 1),
        (errno.EDQUOT, "free some space, then run the same command again to resume", 30),
        (errno.EFBIG, "give a smaller --shard-size", 1),
        (errno.ENAMETOOLONG, "give a shorter name", 30),
        (errno.ENOTDIR, "give another folder", 1),
        (errno.EIO, "check the disk, then run the same command again to resume", 30),
    ],
)
def test_a_disk_that_refuses(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str, moment: int
) -> None:
    """At the first or the 30th write; finished shards are kept."""
    count = 0
    write_all = safetensors_file.SafetensorsWriter._write_all

    def refuse(*arguments: object) -> None:
        nonlocal count
        count += 1
        if count >= moment:
            raise OSError(code, os.strerror(code))
        write_all(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_file.SafetensorsWriter, "_write_all", refuse)
        with pytest.raises(OutputError) as caught:
            export(source, tmp_path / "export", INT8, shard_bytes=60_000)
    assert str(caught.value).startswith(f"the export to {tmp_path / 'export'} stopped: {os.strerror(code)} (")
    assert str(caught.value).endswith(remedy)
    assert not (tmp_path / "export").exists()
    export(source, tmp_path / "export", INT8, shard_bytes=60_000)
    export(source, tmp_path / "undisturbed" / "export", INT8, shard_bytes=60_000)
    assert contents(tmp_path / "export") == contents(tmp_path / "undisturbed" / "export")
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't start new thread"), OSError(errno.ENOMEM, "Cannot allocate memory")]
)
def test_too_little_memory(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("llmcli.quantization.rounding.quantize_rows", refuse)
    with pytest.raises(InsufficientMemoryError, match="out of memory"):
        export(source, tmp_path / "export", INT8)
    monkeypatch.undo()
    export(source, tmp_path / "export", INT8)
    assert list(tmp_path.glob(".*")) == []


def test_paths_that_cannot_be_a_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"the name of the destination, b'a\\xff', is not UTF-8 text"):
        resolve_destination(Path(os.fsdecode(b"/a\xff")))
    assert resolve_destination(tmp_path / os.fsdecode(b"a\xff") / "b").name == "b"
    with pytest.raises(UsageError, match="cannot be written: embedded null byte"):
        resolve_destination(Path("a\0b/c"))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="'export' cannot be written: No such file or directory; give another folder"):
        resolve_destination(Path("export"))
    assert resolve_destination(tmp_path / "export") == tmp_path / "export"


def test_names_that_are_not_utf8_are_refused_before_any_work(source: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"src\xff")
    source.rename(odd)
    command = [sys.executable, "-m", "llmcli", "quantize", str(odd), str(tmp_path / "export")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert r"error: the name of the source, b'src\xff', is not UTF-8 text; give another" in result.stderr
    assert list(tmp_path.iterdir()) == [odd]


# What an export refuses, once each with its message, and that it leaves nothing.


ASYMMETRIC = WeightScheme(4, 64, is_symmetric=False)


def refusal(source: Path, destination: Path, scheme: WeightScheme = INT8, **options: object) -> str:
    """The message of a refused export, which leaves nothing."""
    before = set(destination.parent.iterdir()) if destination.parent.exists() else set()
    with pytest.raises(LLMCliError) as caught:
        export(source, destination, scheme, **options)  # type: ignore[arg-type]
    assert (set(destination.parent.iterdir()) if destination.parent.exists() else set()) == before
    message = str(caught.value)
    assert "\n" not in message
    return message


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
    assert "exists; give another folder, or --force" in refusal(source, target)
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
    (source / "LICENSE").write_text("x" * 5_000_000)  # which is copied
    export(source, tmp_path / "whole", INT8)
    taken = sum(path.stat().st_blocks * 512 for path in (tmp_path / "whole").iterdir())
    assert taken > 5_000_000
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, taken - 1))
    message = refusal(source, tmp_path / "export")
    assert re.search(r"has 5\.\d MB free; the export needs 6\.\d MB; ", message)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, taken + 1_200_000))
    export(source, tmp_path / "export", INT8)


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
