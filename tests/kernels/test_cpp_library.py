"""The C++ of kernels/cpu: compiled once, for every set of instructions; the program runs without it if that fails."""

import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.kernels import cpp_library
from llmcli.kernels.cpp_library import INSTRUCTIONS, OPTIONS, open_library, source_folder

ROOT = Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
calls: list[tuple[int, int]] = []


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    calls.clear()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "kernels"


def opened() -> bool:
    return open_library("avx2", lambda done, total: calls.append((done, total))) is not None


def written_compiler(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@needs_compiler
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_every_form_compiles_without_a_warning(instructions: str, tmp_path: Path) -> None:
    options = [*OPTIONS, *INSTRUCTIONS[instructions], "-Wall", "-Wextra", "-Werror", "-O1"]
    command = ["c++", *options, *map(str, source_folder().glob("*.cpp")), "-o", str(tmp_path / "library.so")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@needs_compiler
def test_a_second_start_runs_no_compiler(home: Path, copier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(copier))
    assert opened()
    assert calls == [(0, 1), (1, 1)]
    (kept,) = home.iterdir()
    assert (kept.suffix, kept.name[:9]) == (".so", "cpu-avx2-")
    assert opened()
    assert len(calls) == 2


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library, for compilers that only copy it: compiling takes several seconds."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCLI_HOME", str(folder))
        assert open_library("avx2", lambda done, total: None) is not None
    (library,) = (folder / "kernels").iterdir()
    return library


@pytest.fixture
def copier(compiled: Path, tmp_path: Path) -> Path:
    """A compiler that writes the compiled library, whatever the sources are."""
    text = f'while [ "$1" != -o ]; do shift; done\nexec cp {shlex.quote(str(compiled))} "$2"'
    return written_compiler(tmp_path / "copier", text)


@needs_compiler
@pytest.mark.parametrize("damage", ["half", "a bit", "nothing left", "text"])
def test_a_damaged_library_is_compiled_again(
    damage: str, home: Path, copier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(copier))
    assert opened()
    (kept,) = home.iterdir()
    whole = kept.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    # As a new file of that name: an open one keeps its own.
    kept.unlink()
    kept.write_bytes({"half": whole[: len(whole) // 2], "a bit": flipped, "nothing left": b"", "text": b"x"}[damage])
    assert opened()
    assert len(calls) == 4
    assert len(kept.read_bytes()) == len(whole)


def open_to_others(kept: Path, way: str) -> None:
    """Change a kept library as if somebody else had written it."""
    if way == "a file of another user":
        os.chown(kept, 4242, 4242)
    elif way == "a link":
        kept.rename(kept.with_name("elsewhere"))
        kept.symlink_to(kept.with_name("elsewhere"))
    else:
        {"the file": kept, "its folder": kept.parent, "the folder above": kept.parent.parent}[way].chmod(0o777)


@needs_compiler
@pytest.mark.parametrize("way", ["the file", "its folder", "the folder above", "a file of another user", "a link"])
def test_a_library_that_others_could_have_written_is_not_loaded(
    way: str, home: Path, copier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "a file of another user" and os.geteuid() != 0:
        pytest.skip("gives a file to another user")
    monkeypatch.setenv("CXX", str(copier))
    loaded: list[Path] = []
    monkeypatch.setattr(cpp_library.ctypes, "CDLL", lambda path: loaded.append(Path(path)) or path)
    assert opened()
    (kept,) = home.iterdir()
    assert loaded == [kept]
    open_to_others(kept, way)
    before = kept.stat().st_ino
    assert opened()
    assert len(calls) == 4
    if "folder" in way:
        assert loaded[-1].parent != home
        assert loaded[-1].parent.stat().st_mode & 0o777 == 0o700
    else:  # one of ours takes its place
        assert loaded[-1] == kept
        assert kept.lstat().st_ino != before
        assert opened()
        assert len(calls) == 4


STARTED = """
from llmcli.kernels.cpp_library import open_library
print(open_library("avx2"))
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's list of processes")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_compiler_outlives_the_program(end: signal.Signals, tmp_path: Path) -> None:
    """A compiler with child processes, as g++."""
    told = tmp_path / "pids"
    new, old = shlex.quote(f"{told}.new"), shlex.quote(str(told))
    compiler = written_compiler(tmp_path / "compiler", f"sleep 600 &\necho $$ $! > {new}\nmv {new} {old}\nwait")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LLMCLI_HOME": str(tmp_path), "CXX": str(compiler)}
    with subprocess.Popen([sys.executable, "-c", STARTED], env=environment, stderr=subprocess.DEVNULL) as process:
        wait_until(told.exists)
        pids = list(map(int, told.read_text().split()))
        assert all(map(is_running, pids))
        process.send_signal(end)
        process.wait(timeout=60)
    wait_until(lambda: not any(map(is_running, pids)))


def test_a_compiler_that_takes_too_long_is_ended(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "pid"
    monkeypatch.setattr(cpp_library, "_COMPILE_SECONDS", 1)
    text = f"sleep 600 &\necho $! > {shlex.quote(str(told))}\nwait"
    monkeypatch.setenv("CXX", str(written_compiler(tmp_path / "compiler", text)))
    assert not opened()
    wait_until(lambda: not is_running(int(told.read_text())))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@needs_compiler
def test_other_sources_and_other_compilers_have_other_files(
    home: Path, copier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(copier))
    assert opened()
    monkeypatch.setenv("CXX", str(written_compiler(tmp_path / "mine", f'exec {shlex.quote(str(copier))} "$@"')))
    assert opened()
    folder = tmp_path / "cpu"
    shutil.copytree(source_folder(), folder)
    monkeypatch.setattr(cpp_library, "source_folder", lambda: folder)
    for name in ("codes_product.cpp", "token_operators.cpp", "vectors.h"):
        with (folder / name).open("a") as file:
            file.write("// changed\n")
        assert opened()
    assert len(list(home.iterdir())) == 5


@pytest.mark.parametrize("text", [None, "exit 1", "exit 0"], ids=["absent", "fails", "writes nothing"])
def test_without_a_compiler_there_is_no_library(
    text: str | None, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    monkeypatch.setenv("CXX", str(compiler if text is None else written_compiler(compiler, text)))
    assert not opened()
    assert calls == ([] if text is None else [(0, 1), (1, 1)])  # so that the message of compiling ends
    assert not home.exists()


@needs_compiler
def test_a_cache_that_cannot_be_written(home: Path, copier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(copier))
    home.parent.mkdir()
    home.write_text("a file where the folder would be")
    assert opened()


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's list of libraries")
def test_its_threads_are_those_of_torch(copier: Path, tmp_path: Path) -> None:
    """With a second OpenMP library a program would have twice the threads, which wait for each other."""
    program = """
import torch
from llmcli.kernels.cpp_library import open_library
assert open_library("avx2") is not None
torch.ones(10**6).sum()
print(*{line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split("/")[-1]})
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LLMCLI_HOME": str(tmp_path), "CXX": str(copier)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert len(result.stdout.split()) == 1, result.stdout
