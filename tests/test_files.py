"""Small files: the reader and its bounds, the writer, and folders that are private."""

import errno
import json
import os
import pwd
import re
import shlex
import stat
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmcli import resources as module
from llmcli.errors import CheckpointError, OutputError, UsageError
from llmcli.reading import MAX_DEPTH, MAX_DIGITS, LoneSurrogateError, SmallFile, parse_json
from llmcli.resources import folder_problem, install_command, private_folder, read_private, temporary_folder
from llmcli.writing import OutputFile

KIND = SmallFile("a thing", 2 * 1024**2, CheckpointError, "download it again")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def nested(depth: int, opening: str, closing: str) -> str:
    return opening * depth + "1" + closing * depth


def test_a_file_of_the_limit_is_read_and_one_byte_more_is_refused(path):
    path.write_bytes(b"x" * KIND.max_bytes)
    assert KIND.read_bytes(path) == b"x" * KIND.max_bytes
    path.write_bytes(b"x" * (KIND.max_bytes + 1))
    with pytest.raises(CheckpointError, match="longer than 2 MiB, too long for a thing"):
        KIND.read_bytes(path)


def test_what_is_not_a_regular_file_is_refused_at_once(path, tmp_path):
    started = time.monotonic()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file, expected a thing"):
        KIND.read_bytes(path)
    link = tmp_path / "link"
    link.symlink_to("/dev/zero")
    for wrong in (link, tmp_path):
        with pytest.raises(CheckpointError, match="not a regular file, expected a thing"):
            KIND.read_bytes(wrong)
    assert time.monotonic() - started < 5


def test_a_pipe_that_takes_the_file_s_place_after_the_look_is_not_waited_for(path, monkeypatch):
    os.mkfifo(path)
    regular = os.stat(__file__)
    monkeypatch.setattr(os, "stat", lambda _: regular)
    assert KIND.read_bytes(path) == b""


def test_a_file_that_is_missing_or_has_an_impossible_name(path):
    with pytest.raises(CheckpointError, match="cannot be read: No such file or directory"):
        KIND.read_bytes(path)
    with pytest.raises(CheckpointError, match="not a valid path: embedded null byte"):
        KIND.read_bytes(Path("a\0b"))
    path.symlink_to(path)
    with pytest.raises(CheckpointError, match="cannot be read: Too many levels of symbolic links"):
        KIND.read_bytes(path)


def test_text_is_utf_8(path):
    path.write_bytes("é".encode())
    assert KIND.read_text(path) == "é"
    path.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="is not UTF-8 text; download it again"):
        KIND.read_text(path)


def test_an_object_is_an_object(path):
    path.write_text('{"a": NaN, "b": [1, "two", null]}')
    assert KIND.read_json_object(path)["b"] == [1, "two", None]
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="holds a JSON list, expected an object; download it again"):
        KIND.read_json_object(path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="is not valid JSON: .*; download it again"):
        KIND.read_json_object(path)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
@pytest.mark.parametrize("depth", [MAX_DEPTH, 900, 100_000])
def test_nesting_is_bounded(opening, closing, depth):
    with pytest.raises(ValueError, match=f"nested more than {MAX_DEPTH} levels deep"):
        parse_json(nested(depth, opening, closing))


def test_nesting_just_below_the_bound_is_read():
    assert parse_json(nested(MAX_DEPTH - 1, "[", "]")) == json.loads(nested(MAX_DEPTH - 1, "[", "]"))


def test_digits_are_bounded():
    assert parse_json("9" * MAX_DIGITS) == 10**MAX_DIGITS - 1
    assert parse_json('{"model_max_length": 1000000000000000019884624838656}')["model_max_length"] == int(1e30)
    for digits in (MAX_DIGITS + 1, 401, 5_000, 1_000_000):
        with pytest.raises(ValueError, match=f"an integer has more than {MAX_DIGITS} digits"):
            parse_json("[" + "9" * digits + "]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (r'"\ud800"', "it has the lone surrogate U+D800, half of a character; leave it out"),
        (r'{"\udfff": 1}', "a key has the lone surrogate U+DFFF, half"),
        (r'[{"a": ["\ud83d"]}]', "[0].a[0] has the lone surrogate U+D83D, half"),
        (r'{"messages": [{"a": "x"}, {"b": {"x\ud83d": 1}}]}', "a key of messages[1].b has the lone surrogate U+D83D"),
        (r'{"a": "x\ud83dy", "b": 1}', "a has the lone surrogate U+D83D"),
    ],
)
def test_half_a_surrogate_pair_is_refused(text, message):
    with pytest.raises(LoneSurrogateError, match=f"^{re.escape(message)}"):
        parse_json(text)
    assert parse_json(r'"\ud83d\ude00"') == "😀"


def test_toml_has_the_same_bounds(path):
    kind = SmallFile("a preset", 1024**2, UsageError, "correct the file")
    path.write_text('[sampling]\ntop_p = 0.5\nname = "x"')
    assert kind.read_toml(path) == {"sampling": {"top_p": 0.5, "name": "x"}}
    for text in (
        "a = " + nested(5_000, "[", "]"),
        "a = " + nested(70, "[", "]"),
        "a = " + "9" * 200,
        "a = ",
        "a = 1\na = 2",
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match="is not valid TOML: .*; correct the file"):
            kind.read_toml(path)
    path.write_text("a = " + "9" * 5_000)
    with pytest.raises(UsageError, match="is not valid TOML"):
        kind.read_toml(path)


def test_a_short_file_takes_little_memory_whatever_its_kind_may_have(path):
    path.write_bytes(b"x")
    large = SmallFile("a large thing", 2**30, CheckpointError, "download it again")
    tracemalloc.start()
    try:
        assert large.read_bytes(path) == b"x"
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024**2
    finally:
        tracemalloc.stop()


# The writer: its refusals, and that a file is whole or absent.


WRITTEN = OutputFile("a page of ours", lambda head: head.startswith(b"OURS"), "add --force to replace it")


def test_a_new_file_is_written_with_the_mode_of_the_umask(tmp_path):
    path = tmp_path / "page"
    before = os.umask(0o027)
    try:
        WRITTEN.write(path, b"OURS 1", replace=False)
        private = OutputFile("a diary", WRITTEN.is_own, "", mode=0o600)
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
        WRITTEN.write(path, b"OURS 2", replace=False)
    assert path.read_bytes() == b"OURS 1"
    WRITTEN.write(path, b"OURS 2", replace=True)
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
            WRITTEN.write(path, b"OURS", replace=replace)
    assert other.read_bytes() == b"precious"
    assert link.is_symlink()
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", ["no/such/folder", "file/below", "a\0b", "x" * 300])
def test_a_path_that_cannot_be_is_refused_before_the_work(tmp_path, name):
    (tmp_path / "file").write_bytes(b"OURS")
    with pytest.raises(UsageError, match="cannot be written: "):
        WRITTEN.check(tmp_path / name, replace=True)


def test_a_file_that_appears_after_the_check_is_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / "page"
    check = OutputFile.check

    def check_then_lose(self, path, *, replace):
        check(self, path, replace=replace)
        path.write_bytes(b"precious")

    monkeypatch.setattr(OutputFile, "check", check_then_lose)
    with pytest.raises(UsageError, match="exists; add --force"):
        WRITTEN.write(path, b"OURS", replace=False)
    assert path.read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["page"]


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    WRITTEN.write(tmp_path / "page", b"OURS", replace=False)
    assert (tmp_path / "page").read_bytes() == b"OURS"
    with pytest.raises(UsageError, match="exists"):
        WRITTEN.write(tmp_path / "page", b"OURS 2", replace=False)
    assert os.listdir(tmp_path) == ["page"]


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "page"
    path.write_bytes(b"OURS 1")

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        WRITTEN.write(path, b"OURS 2", replace=True)
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


# Files that decide what runs: only the user and root can have written them.


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


def test_what_is_missing_is_installed_from_where_the_program_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a clone, installed from a clone that still is there, and from an index; by this environment's pip."""
    clone, site = tmp_path / "a clone", tmp_path / "site"
    for folder in (clone / "llmcli", site / "llmcli"):
        folder.mkdir(parents=True)
    (clone / "pyproject.toml").touch()
    (tmp_path / "bin").mkdir()
    for name in ("python", "pip"):
        (tmp_path / "bin" / name).touch(mode=0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    origin: dict[str, object] = {}
    installed = SimpleNamespace(read_text=lambda name: json.dumps(origin) if origin else None)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: installed)
    monkeypatch.chdir(tmp_path)

    monkeypatch.setattr(module, "_PACKAGE", clone / "llmcli")
    assert install_command("llmcli[serve]") == f'pip install "{clone}[serve]"'
    assert install_command("hf_xet") == "pip install hf_xet"
    monkeypatch.chdir(clone)
    assert install_command("llmcli[serve]") == 'pip install ".[serve]"'
    monkeypatch.setattr(module, "_PACKAGE", site / "llmcli")
    assert install_command("llmcli[serve]") == 'pip install "llmcli[serve]"'
    origin.update(url=clone.as_uri(), dir_info={})
    assert install_command("llmcli[serve]") == 'pip install ".[serve]"'
    (clone / "pyproject.toml").unlink()
    assert install_command("llmcli[serve]") == 'pip install "llmcli[serve]"'
    monkeypatch.setenv("PATH", "/usr/bin")
    assert install_command("hf_xet") == f"{tmp_path / 'bin' / 'python'} -m pip install hf_xet"
