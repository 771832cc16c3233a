"""Files that decide what runs: only the user and root can have written them."""

import os
import pwd
import re
import shlex
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmcli import private_folder as module
from llmcli.private_folder import folder_problem, private_folder, read_private, temporary_folder

SOMEBODY = 4242


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a file or folder to another user; without that right, become another user."""
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY, SOMEBODY)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_what_is_made_is_the_users_alone(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        made = private_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    for folder in (made, made.parent, made.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder(made) == made


def test_without_make_nothing_is_made(tmp_path: Path) -> None:
    assert private_folder(tmp_path / "a" / "b", make=False) == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o770, 0o775, 0o1777, 0o722])
@pytest.mark.parametrize("place", ["itself", "its parent", "far above"])
def test_a_folder_that_others_can_write_to_is_refused(mode: int, place: str, tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "above" / "home" / "kernels")
    opened = {"itself": folder, "its parent": folder.parent, "far above": folder.parents[1]}[place]
    opened.chmod(mode)
    if mode == 0o1777 and place != "itself":  # as /tmp: nobody can move others' files away
        assert private_folder(folder) == folder
        return
    with pytest.raises(PermissionError) as refused:
        private_folder(folder)
    assert refused.value.strerror == f"others can write to {opened}; run `chmod go-w {opened}`"
    command = refused.value.strerror.split("`")[1]
    subprocess.run(shlex.split(command), check=True)
    assert private_folder(folder) == folder


@pytest.mark.parametrize("place", ["itself", "its parent"])
def test_a_folder_of_another_user_is_refused(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = private_folder(tmp_path / "home" / "kernels")
    give_away(folder if place == "itself" else folder.parent, monkeypatch)
    with pytest.raises(PermissionError, match=r"belongs to .*; set LLMCLI_HOME to a folder of your own"):
        private_folder(folder)
    with pytest.raises(PermissionError, match=r"belongs to "):
        private_folder(folder / "new")
    assert not (folder / "new").exists()


def test_a_link_leads_to_what_is_checked(tmp_path: Path) -> None:
    real = private_folder(tmp_path / "real" / "kernels")
    (tmp_path / "link").symlink_to(real.parent)
    assert private_folder(tmp_path / "link" / "kernels") == real
    real.parent.chmod(0o777)
    with pytest.raises(PermissionError, match=f"others can write to {re.escape(str(real.parent))};"):
        private_folder(tmp_path / "link" / "kernels")


def test_somebody_who_is_faster_in_a_shared_folder_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, make = tmp_path / "shared", Path.mkdir
    shared.mkdir()
    shared.chmod(0o1777)

    def be_late(path: Path, *arguments: object, **options: object) -> None:
        make(path)
        path.chmod(0o777)
        make(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", be_late)
    with pytest.raises(PermissionError, match="others can write"):
        private_folder(shared / "kernels")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
@pytest.mark.parametrize(
    ("mode", "name", "members", "is_private"),
    [
        (0o775, "somebody", [], True),
        (0o775, "users", [], False),
        (0o775, "somebody", ["mallory"], False),
        (0o777, "somebody", [], False),
    ],
)
def test_a_group_of_the_user_alone_is_nobody_else(
    mode: int, name: str, members: list[str], is_private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian and Fedora make users, whose umask 002 then opens the folders above ours to that group."""
    import grp

    folder = tmp_path / "home" / "kernels"
    folder.mkdir(parents=True, mode=0o700)
    for path in (folder, folder.parent):
        os.chown(path, SOMEBODY, SOMEBODY)
    folder.parent.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_gid=SOMEBODY, pw_name="somebody"))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=name, gr_mem=members))
    assert (folder_problem(folder) is None) == is_private
    folder.parent.chmod(0o755)
    folder.chmod(0o770)  # our folder is the user's alone, with any group
    assert f"others can write to {folder}" in str(folder_problem(folder))


def test_a_file_is_read_if_only_the_user_can_have_written_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"code")
    file.chmod(0o644)
    assert read_private(file) == b"code"
    for mode in (0o666, 0o664, 0o646):
        file.chmod(mode)
        with pytest.raises(PermissionError, match="others can write to"):
            read_private(file)
    file.chmod(0o644)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        read_private(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(PermissionError, match="not a regular file"):
        read_private(tmp_path / "pipe")
    give_away(file, monkeypatch)
    with pytest.raises(PermissionError, match="belongs to"):
        read_private(file)


def test_a_temporary_folder_that_others_could_replace_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    with temporary_folder("x-") as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="others can write"):
        temporary_folder("x-")
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o1777)
    temporary_folder("x-").cleanup()


@pytest.mark.parametrize(
    "make",
    [lambda folder: folder.write_text(""), lambda folder: folder.symlink_to(folder)],
    ids=["a file", "a link to itself"],
)
def test_what_is_the_matter_names_the_place(make: Callable[[Path], object], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    assert folder_problem(folder) is None
    make(folder)
    assert folder_problem(folder / "kernels") == f"{folder} is not a folder"


def test_a_user_without_a_home_has_no_folder_in_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no home folder"):
        private_folder(Path("~/.cache/llmcli/kernels"))
    assert list(tmp_path.iterdir()) == []


def test_where_files_have_no_owners_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HAS_OWNERS", False)
    monkeypatch.delattr(os, "geteuid")
    tmp_path.chmod(0o777)
    folder = private_folder(tmp_path / "kernels")
    (folder / "file").write_bytes(b"x")
    assert read_private(folder / "file") == b"x"
