"""Destinations of another kind, and failing disks: one line that names the remedy."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from exports import contents, export, write_model

from llmcli.checkpoint import safetensors_file
from llmcli.checkpoint.export_workspace import refuse_existing, resolve_destination
from llmcli.errors import InsufficientMemoryError, OutputError, UsageError
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
    ("code", "remedy"),
    [
        (errno.EACCES, "choose a folder that you can write to"),
        (errno.EROFS, "choose a folder that you can write to"),
        (errno.ENOSPC, "free some space, then run the same command again to resume"),
        (errno.EDQUOT, "free some space, then run the same command again to resume"),
        (errno.EFBIG, "give a smaller --shard-size"),
        (errno.ENAMETOOLONG, "give a shorter name"),
        (errno.ENOTDIR, "give another folder"),
        (errno.EIO, "check the disk, then run the same command again to resume"),
    ],
)
@pytest.mark.parametrize("moment", [1, 30])
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

    monkeypatch.setattr("llmcli.checkpoint.export.quantize_rows", refuse)
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
