"""The writer: its refusals, and that a file is whole or absent."""

import errno
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from llmcli.errors import OutputError, UsageError
from llmcli.writing import OutputFile

KIND = OutputFile("a page of ours", lambda head: head.startswith(b"OURS"), "add --force to replace it")


def test_a_new_file_is_written_with_the_mode_of_the_umask(tmp_path):
    path = tmp_path / "page"
    before = os.umask(0o027)
    try:
        KIND.write(path, b"OURS 1", replace=False)
        private = OutputFile("a diary", KIND.is_own, "", mode=0o600)
        private.write(tmp_path / "diary", b"OURS", replace=False)
    finally:
        os.umask(before)
    assert path.read_bytes() == b"OURS 1"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "diary").stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["diary", "page"]


def test_a_file_of_this_kind_is_replaced_only_on_request(tmp_path):
    path = tmp_path / "page"
    path.write_bytes(b"OURS 1")
    with pytest.raises(UsageError, match=f"{path} exists; add --force to replace it"):
        KIND.write(path, b"OURS 2", replace=False)
    assert path.read_bytes() == b"OURS 1"
    KIND.write(path, b"OURS 2", replace=True)
    assert path.read_bytes() == b"OURS 2"


@pytest.mark.parametrize("replace", [False, True])
def test_nothing_but_a_regular_file_of_this_kind_is_ever_replaced(tmp_path, replace):
    other, link, dangling, fifo = (tmp_path / name for name in ("other", "link", "dangling", "fifo"))
    other.write_bytes(b"precious")
    own = tmp_path / "own"
    own.write_bytes(b"OURS")
    link.symlink_to(own)
    dangling.symlink_to(tmp_path / "nothing")
    os.mkfifo(fifo)
    for path, found in (
        (other, "exists and is not a page of ours"),
        (link, "is a link, not a regular file"),
        (dangling, "is a link, not a regular file"),
        (fifo, "is a device or pipe, not a regular file"),
        (tmp_path, "is a folder, not a regular file"),
        (Path("/dev/null"), "is a device or pipe, not a regular file"),
    ):
        with pytest.raises(UsageError, match=f"{path} {found}; name another file"):
            KIND.write(path, b"OURS", replace=replace)
    assert other.read_bytes() == b"precious"
    assert link.is_symlink()
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", ["no/such/folder", "file/below", "a\0b", "x" * 300])
def test_a_path_that_cannot_be_is_refused_before_the_work(tmp_path, name):
    (tmp_path / "file").write_bytes(b"OURS")
    with pytest.raises(UsageError, match="cannot be written: "):
        KIND.check(tmp_path / name, replace=True)


def test_a_file_that_appears_after_the_check_is_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / "page"
    check = OutputFile.check

    def check_then_lose(self, path, *, replace):
        check(self, path, replace=replace)
        path.write_bytes(b"precious")

    monkeypatch.setattr(OutputFile, "check", check_then_lose)
    with pytest.raises(UsageError, match="exists; add --force"):
        KIND.write(path, b"OURS", replace=False)
    assert path.read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["page"]


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    KIND.write(tmp_path / "page", b"OURS", replace=False)
    assert (tmp_path / "page").read_bytes() == b"OURS"
    with pytest.raises(UsageError, match="exists"):
        KIND.write(tmp_path / "page", b"OURS 2", replace=False)
    assert os.listdir(tmp_path) == ["page"]


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "page"
    path.write_bytes(b"OURS 1")

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        KIND.write(path, b"OURS 2", replace=True)
    assert path.read_bytes() == b"OURS 1"
    assert os.listdir(tmp_path) == ["page"]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_kill_leaves_the_old_file(tmp_path, moment):
    path = tmp_path / "page"
    path.write_bytes(b"OURS 1")
    code = textwrap.dedent(
        f"""
        import os, pathlib, signal
        from llmcli.writing import OutputFile
        os.{moment} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        kind = OutputFile("a page", lambda head: head.startswith(b"OURS"), "")
        kind.write(pathlib.Path({str(path)!r}), b"OURS 2" * 1000, replace=True)
        """
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert path.read_bytes() == b"OURS 1"
