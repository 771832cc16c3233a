"""Who may write to a destination, and the message for all others."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from exports import contents, export, write_model

from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.export_plan import plan_export
from llmcli.checkpoint.export_workspace import resolve_destination
from llmcli.checkpoint.model import open_model
from llmcli.destination_lock import DestinationLock
from llmcli.errors import OutputError, UsageError
from llmcli.quantization.schemes import ExportOptions, WeightScheme

INT8 = WeightScheme(8, 64)
HOLDER = """
import sys, time
from pathlib import Path
from llmcli.destination_lock import DestinationLock
lock = DestinationLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source")


def holder_of(destination: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(destination)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_another_process_is_named_and_nothing_is_touched(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    destination = write_model(folder / "export")
    partial = folder / ".export.partial-0123456789abcdef"
    partial.mkdir()
    (partial / "model-00001-of-00002.safetensors").write_bytes(b"of the other one")
    before = contents(folder)
    process = holder_of(destination)
    try:
        for spelling in (destination, folder / ".." / "there" / "export"):
            with pytest.raises(UsageError) as caught:
                export(source, spelling, INT8, replace=True)
            message = str(caught.value)
            assert f"{destination} is being written by process {process.pid} on " in message
            assert message.endswith(" UTC; wait until that has ended, or give another folder")
        after = contents(folder)
        assert f"process {process.pid} on" in after.pop(".export.lock").decode()
        assert after == before
    finally:
        process.kill()
        process.wait()
    export(source, destination, INT8, replace=True)
    assert [path.name for path in folder.iterdir()] == ["export"]


def test_the_end_of_a_process_frees_its_destination(tmp_path: Path) -> None:
    for end in (signal.SIGKILL, signal.SIGTERM):
        process = holder_of(tmp_path / "export")
        process.send_signal(end)
        process.wait()
        assert (tmp_path / ".export.lock").exists()
        with DestinationLock(tmp_path / "export"):
            assert f"process {os.getpid()} on" in (tmp_path / ".export.lock").read_text()
        assert list(tmp_path.iterdir()) == []


def test_an_export_holds_its_destination_from_its_first_step_to_its_last(source: Path, tmp_path: Path) -> None:
    exporter = Exporter(plan_export(open_model(source), ExportOptions(INT8)), tmp_path / "export", "source")
    other = DestinationLock(tmp_path / "export")
    is_held: list[bool] = []

    def look(*arguments: object) -> None:
        try:
            with other:
                is_held.append(False)
        except UsageError:
            is_held.append(True)

    workspace = exporter.prepare()
    look()
    publish = workspace.publish
    workspace.publish = lambda: (look(), publish(), look())  # type: ignore[method-assign, func-returns-value]
    exporter.run(workspace, look, look)
    assert len(is_held) > 20
    assert all(is_held)
    look()
    assert not is_held[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "source"]


def test_the_last_release_counts(tmp_path: Path) -> None:
    lock, other = (DestinationLock(tmp_path / "export") for _ in range(2))
    with lock:
        with lock:
            pass
        with pytest.raises(UsageError, match=f"process {os.getpid()} on"):
            other.acquire()
    with other:
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_being_taken_or_given_back_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, other = (DestinationLock(tmp_path / "export") for _ in range(2))
    lock.acquire()
    (tmp_path / ".export.lock").write_text("")  # as before its holder writes it
    monkeypatch.setattr(time, "sleep", lambda seconds: lock.release())
    other.acquire()
    other.release()
    assert list(tmp_path.iterdir()) == []


def test_links_and_dots_mean_one_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    for spelling in ("export", "./export/", "../link/export", "../real/../link/export", str(tmp_path / "link/export")):
        assert resolve_destination(Path(spelling)) == tmp_path / "real" / "export"
    assert resolve_destination(Path(".")) == tmp_path / "real"
    assert resolve_destination(Path("..")) == tmp_path
    (tmp_path / "real" / "export").symlink_to("nowhere")
    assert resolve_destination(Path("export")) == tmp_path / "real" / "export"


@pytest.mark.parametrize("kind", ["text", "link", "folder", "pipe", "socket"])
def test_what_is_not_a_lock_is_left_alone(source: Path, tmp_path: Path, kind: str) -> None:
    lock = tmp_path / ".export.lock"
    if kind == "text":
        lock.write_text("mine\n")
    elif kind == "link":
        (tmp_path / "mine").write_text("")
        lock.symlink_to("mine")
    elif kind == "folder":
        lock.mkdir()
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        socket.socket(socket.AF_UNIX).bind(str(lock))
    info = lock.lstat()
    with pytest.raises(UsageError, match=r"export\.lock (exists and )?is "):
        export(source, tmp_path / "export", INT8)
    assert (lock.lstat().st_ino, lock.lstat().st_size) == (info.st_ino, info.st_size)
    assert not (tmp_path / "export").exists()


def test_a_file_system_without_locks_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(OutputError, match="cannot lock files; write to another disk and move the export"):
        export(source, tmp_path / "export", INT8)


def test_a_destination_that_somebody_makes_meanwhile_is_left_alone(source: Path, tmp_path: Path) -> None:
    plan = plan_export(open_model(source), ExportOptions(INT8))
    exporter = Exporter(plan, tmp_path / "export", "source")
    workspace = exporter.prepare()
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "mine").write_text("")
    with pytest.raises(UsageError, match="exists; give another folder"):
        exporter.run(workspace, lambda done, total: None, lambda name, quality: None)
    assert contents(tmp_path / "export") == {"mine": b""}
    (tmp_path / "export" / "mine").unlink()
    (tmp_path / "export").rmdir()
    workspace = exporter.prepare()
    assert workspace.num_resumed == 1
    exporter.run(workspace, lambda done, total: None, lambda name, quality: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "source"]


def test_what_was_moved_away_comes_back(source: Path, tmp_path: Path) -> None:
    """A run was killed between the two renames of a replacement."""
    old = contents(write_model(tmp_path / ".a.partial-b.replaced-0123456789abcdef"))
    destination = tmp_path / "a.partial-b"
    with pytest.raises(UsageError, match="exists; give another folder, or --force"):
        export(source, destination, INT8)
    assert contents(destination) == old
    export(source, destination, INT8, replace=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.partial-b", "source"]
    assert (destination / "quantization.json").exists()


def test_links_among_what_a_run_has_left_are_not_followed(source: Path, tmp_path: Path) -> None:
    plan = plan_export(open_model(source), ExportOptions(INT8))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    for name in (plan.fingerprint, "0123456789abcdef"):
        (tmp_path / f".export.partial-{name}").symlink_to("mine")
    (tmp_path / f".export.partial-{plan.fingerprint}.journal").symlink_to("mine/file")
    export(source, tmp_path / "export", INT8)
    assert contents(tmp_path / "mine") == {"file": b"mine"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "mine", "source"]
