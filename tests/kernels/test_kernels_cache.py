"""The kernel cache: a warm start compiles nothing, and no state of the folder is an error."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llmcli.errors import KernelCompileError
from llmcli.kernels import cache, compiler, environment
from llmcli.kernels.cache import CachedKernels, KernelCache
from llmcli.kernels.compiler import CompiledKernels, KernelResources
from llmcli.kernels.registry import KERNELS

NAMES = ("scale<float>", "scale<short>")


class Compilations:
    """Stands in for the compiler: other machine code each time, and a record of what was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[str, ...], str]] = []

    def __call__(self, source: str, stem: str, names: tuple[str, ...], arch: str) -> CompiledKernels:
        self.calls.append((source, stem, tuple(names), arch))
        resources = {name: KernelResources(len(self.calls), 2, 3, 4, 5) for name in names}
        return CompiledKernels(os.urandom(1000) + b"\n", {name: f"_{name}" for name in names}, resources)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Compilations:
    fake = Compilations()
    monkeypatch.setattr(compiler, "compile_kernels", fake)
    monkeypatch.setattr(compiler, "nearest_architecture", lambda arch: arch)
    monkeypatch.setattr(environment, "compiler_identity", lambda: "13.0.88")
    return fake


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "kernels"
    (folder / "common").mkdir(parents=True)
    (folder / "common" / "part.cuh").write_text("int part;\n")
    (folder / "scale.cu").write_text('#include "common/part.cuh"\n')
    return folder


def test_what_was_compiled_is_found_again(tmp_path: Path, sources: Path, compilations: Compilations) -> None:
    first = KernelCache(tmp_path / "new" / "cache", sources)
    assert first.find("scale", NAMES, "sm_90") is None
    compiled = first.get("scale", NAMES, "sm_90")
    assert KernelCache(tmp_path / "new" / "cache", sources).find("scale", NAMES, "sm_90") == compiled
    assert first.get("scale", NAMES, "sm_90") == compiled
    assert len(compilations.calls) == 1


def test_each_input_of_a_compilation_makes_another_entry(
    tmp_path: Path, sources: Path, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = KernelCache(tmp_path / "cache", sources)
    kernels.get("scale", NAMES, "sm_90")
    assert kernels.find("scale", NAMES[:1], "sm_90") is None
    assert kernels.find("scale", NAMES, "sm_80") is None
    with monkeypatch.context() as patch:
        patch.setattr(environment, "compiler_identity", lambda: "13.4.92")
        assert KernelCache(tmp_path / "cache", sources).find("scale", NAMES, "sm_90") is None
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "OPTIONS", ("--std=c++20",))
        assert kernels.find("scale", NAMES, "sm_90") is None
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_FORMAT", "llmcli kernels 0")
        assert kernels.find("scale", NAMES, "sm_90") is None
    (sources / "common" / "part.cuh").write_text("int other;\n")
    assert kernels.find("scale", NAMES, "sm_90") is None


@pytest.mark.parametrize("suffix", [".cubin", ".json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "absent", "another's", "a folder"])
def test_a_damaged_pair_is_compiled_again(
    tmp_path: Path, sources: Path, compilations: Compilations, suffix: str, damage: str
) -> None:
    kernels = KernelCache(tmp_path / "cache", sources)
    path = kernels.get("scale", NAMES, "sm_90").cubin.with_suffix(suffix)
    other = KernelCache(tmp_path / "other", sources).get("scale", NAMES, "sm_90").cubin.with_suffix(suffix)
    content = path.read_bytes()
    if damage in ("absent", "a folder"):
        path.unlink()
        if damage == "a folder":
            path.mkdir()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        damaged = {"cut": content[:-1], "flipped": flipped, "empty": b"", "another's": other.read_bytes()}
        path.write_bytes(damaged[damage])
    assert kernels.find("scale", NAMES, "sm_90") is None
    again = kernels.get("scale", NAMES, "sm_90")
    assert again.resources[NAMES[0]].registers == 3
    if damage != "a folder":
        assert kernels.find("scale", NAMES, "sm_90") == again


@pytest.mark.parametrize(
    "content", [b"[]", b"{}", b'{"kernels": 1, "sha256": 2}', b"\xff", b"[" * 100_000, b"9" * 5000]
)
def test_a_description_of_another_form_is_no_entry(
    tmp_path: Path, sources: Path, compilations: Compilations, content: bytes
) -> None:
    kernels = KernelCache(tmp_path / "cache", sources)
    kernels.get("scale", NAMES, "sm_90").cubin.with_suffix(".json").write_bytes(content)
    assert kernels.find("scale", NAMES, "sm_90") is None


@pytest.mark.parametrize("obstacle", ["read-only", "a file"])
def test_without_a_folder_nothing_is_kept_and_nothing_fails(
    tmp_path: Path, sources: Path, compilations: Compilations, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    if obstacle == "a file":
        folder.write_text("in the way")
    else:
        folder.mkdir()

        make = cache.tempfile.mkstemp

        def refuse(dir: Path, **keywords: str) -> tuple[int, str]:  # noqa: A002
            if dir == folder:
                raise PermissionError("read-only")  # permissions do not stop root
            return make(dir=dir, **keywords)

        monkeypatch.setattr(cache.tempfile, "mkstemp", refuse)
    kernels = KernelCache(folder, sources)
    for calls in (1, 2):
        cubin = kernels.get("scale", NAMES, "sm_90").cubin
        assert len(compilations.calls) == calls
        assert cubin.parent != folder
        assert len(cubin.read_bytes()) == 1001  # CuPy loads it from there
    del kernels
    gc.collect()
    assert not cubin.parent.exists()


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, sources: Path, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    with pytest.raises(
        KernelCompileError, match="kernel scale can be cached neither in .*: No space left on device; free space"
    ):
        KernelCache(tmp_path / "cache", sources).get("scale", NAMES, "sm_90")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_description_is_written_last(
    tmp_path: Path, sources: Path, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, written = os.replace, []
    monkeypatch.setattr(cache.os, "replace", lambda old, new: (written.append(new.suffix), replace(old, new)))
    KernelCache(tmp_path / "cache", sources).get("scale", NAMES, "sm_90")
    assert written == [".cubin", ".json"]


def test_writers_at_once_leave_one_whole_entry(
    tmp_path: Path, sources: Path, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Barrier(8)
    same = compilations("", "scale", NAMES, "sm_90")  # the compiler makes the same of the same
    monkeypatch.setattr(compiler, "compile_kernels", lambda *_: same)

    def write() -> None:
        start.wait()
        for _ in range(20):
            KernelCache(tmp_path / "cache", sources).compile("scale", NAMES, "sm_90")
            found.append(KernelCache(tmp_path / "cache", sources).find("scale", NAMES, "sm_90"))

    found: list[CachedKernels | None] = []
    writers = [threading.Thread(target=write) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(found) == 160
    assert None not in found
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_warm_start_loads_no_compiler(
    tmp_path: Path, sources: Path, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    KernelCache(tmp_path / "cache", sources).get("scale", NAMES, "sm_90")
    monkeypatch.undo()
    monkeypatch.setattr(environment.metadata, "version", lambda name: "13.0.88")

    def fail(*_: object) -> None:
        raise AssertionError("the compiler was loaded")

    monkeypatch.setattr(environment, "nvrtc_version", fail)
    monkeypatch.setattr(compiler, "compile_kernels", fail)
    assert KernelCache(tmp_path / "cache", sources).get("scale", NAMES, "sm_90").lowered[NAMES[0]] == "_scale<float>"


@pytest.mark.usefixtures("nvrtc")
def test_real_machine_code_survives(tmp_path: Path, sources: Path) -> None:
    (sources / "scale.cu").write_text("template <typename T>\n__global__ void scale(T* x) { *x *= 2; }\n")
    kernels = KernelCache(tmp_path / "cache", sources)
    compiled = kernels.get("scale", NAMES, "sm_80")
    assert compiled.cubin.read_bytes().startswith(b"\x7fELF")
    assert kernels.compile("scale", NAMES, "sm_80") == compiled
    assert kernels.find("scale", NAMES, "sm_80") == compiled


def test_many_are_counted_as_they_are_compiled_and_found_again(
    tmp_path: Path, sources: Path, compilations: Compilations
) -> None:
    (sources / "other.cu").write_text("int other;\n")
    wanted = [("scale", NAMES[0]), ("other", "other"), ("scale", NAMES[1])]
    kernels, counts = KernelCache(tmp_path / "cache", sources), []
    kernels.get("scale", NAMES[:1], "sm_90")
    compiled = kernels.get_all(wanted, "sm_90", lambda done, total: counts.append((done, total)))
    assert counts == [(0, 2), (1, 2), (2, 2)]
    assert sorted(call[1:3] for call in compilations.calls) == [
        ("other", ("other",)),
        ("scale", NAMES[:1]),
        ("scale", NAMES[1:]),
    ]
    assert compiled == {(stem, name): kernels.find(stem, [name], "sm_90") for stem, name in wanted}
    assert KernelCache(tmp_path / "cache", sources).get_all(wanted, "sm_90", lambda *_: counts.clear()) == compiled
    assert len(counts) == len(compilations.calls) == 3


def test_all_cores_compile_at_once(
    tmp_path: Path, sources: Path, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(4)

    def compile_together(*arguments: object) -> CompiledKernels:
        together.wait(timeout=60)
        return compilations(*arguments)

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(compiler, "compile_kernels", compile_together)
    wanted = [("scale", f"scale<{number}>") for number in range(8)]
    assert len(KernelCache(tmp_path / "cache", sources).get_all(wanted, "sm_90")) == 8


def test_the_longest_sources_are_compiled_first(
    tmp_path: Path, sources: Path, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    for stem, length in (("short", 10), ("long", 1000), ("middle", 100)):
        (sources / f"{stem}.cu").write_text("/" * length)
    wanted = [(stem, stem) for stem in ("short", "long", "middle")]
    KernelCache(tmp_path / "cache", sources).get_all(wanted, "sm_90")
    assert [stem for _, stem, _, _ in compilations.calls] == ["long", "middle", "short"]


@pytest.mark.parametrize("error", [KernelCompileError("kernel scale does not compile"), KeyboardInterrupt("^C")])
def test_an_error_ends_the_others_and_keeps_what_is_compiled(
    tmp_path: Path,
    sources: Path,
    compilations: Compilations,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    wanted = [("scale", f"scale<{number}>") for number in range(20)]
    asked, may_end, ended = [], threading.Event(), threading.Event()

    def compile_or_fail(source: str, stem: str, names: tuple[str, ...], arch: str) -> CompiledKernels:
        asked.append(names[0])
        if len(asked) == 4:
            raise error
        if len(asked) > 4:  # one is under way when the error is met
            may_end.wait(timeout=10)
            ended.set()
        return compilations(source, stem, names, arch)

    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(compiler, "compile_kernels", compile_or_fail)
    kernels = KernelCache(tmp_path / "cache", sources)
    with pytest.raises(type(error), match=re.escape(str(error))):
        kernels.get_all(wanted, "sm_90")
    assert not ended.is_set()  # nobody waits for it
    may_end.set()
    for thread in threading.enumerate():
        if thread.name.startswith("compile kernels"):
            thread.join()
    assert len(asked) <= 5  # and no other begins
    found = {name for stem, name in wanted if kernels.find(stem, [name], "sm_90")}
    assert found <= set(asked[:3])
    monkeypatch.setattr(compiler, "compile_kernels", compilations)
    compilations.calls.clear()
    assert len(kernels.get_all(wanted, "sm_90")) == 20
    assert len(compilations.calls) == 20 - len(found)


def test_without_a_folder_all_lie_in_one_temporary_folder(
    tmp_path: Path, sources: Path, compilations: Compilations
) -> None:
    (tmp_path / "cache").write_text("in the way")
    kernels = KernelCache(tmp_path / "cache", sources)
    compiled = kernels.get_all([("scale", f"scale<{number}>") for number in range(20)], "sm_90")
    assert len({entry.cubin.parent for entry in compiled.values()}) == 1
    assert all(entry.cubin.is_file() for entry in compiled.values())


SMALL = [(stem, name) for stem in ("residual_add", "scale_bias", "rms_norm") for name in KERNELS[stem].variants[:2]]


@pytest.mark.usefixtures("nvrtc")
def test_threads_make_the_machine_code_of_one_after_the_other(tmp_path: Path) -> None:
    side_by_side = KernelCache(tmp_path / "threads").get_all(SMALL, "sm_90")
    alone = KernelCache(tmp_path / "alone")
    for (stem, name), entry in side_by_side.items():
        one = alone.get(stem, [name], "sm_90")
        assert entry.cubin.read_bytes() == one.cubin.read_bytes()
        assert (entry.lowered, entry.resources) == (one.lowered, one.resources)


@pytest.mark.usefixtures("nvrtc")
def test_the_error_of_one_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "good.cu").write_text("template <int> __global__ void good() {}\n")
    (tmp_path / "bad.cu").write_text("template <int>\n__global__ void bad() { return nothing; }\n")
    wanted = [("good", f"good<{number}>") for number in range(4)] + [("bad", "bad<1>")]
    with pytest.raises(
        KernelCompileError, match=r"kernel bad does not compile for sm_90: kernels/bad\.cu\(2\): error: .*nothing"
    ):
        KernelCache(tmp_path / "cache", tmp_path).get_all(wanted, "sm_90")


INTERRUPTED = """
import sys, threading
from pathlib import Path
from llmcli.kernels.cache import KernelCache
from llmcli.kernels.registry import KERNELS
def tell(done, total):
    print(done, total, flush=True)
wanted = [("gemv", name) for name in KERNELS["gemv"].variants]
try:
    KernelCache(Path(sys.argv[1])).get_all(wanted, "sm_90", tell)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.usefixtures("nvrtc")
def test_a_ctrl_c_ends_a_compilation_soon(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "cache")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()  # one is compiled, others are being compiled
    process.send_signal(signal.SIGINT)
    lines = process.communicate(timeout=120)[0].splitlines()
    assert process.returncode == 0
    assert lines[-1] == "interrupted"
    num_variants = len(KERNELS["gemv"].variants)
    assert len(lines) < num_variants / 2
    found = [path.suffix for path in (tmp_path / "cache").iterdir()]
    assert found.count(".cubin") == found.count(".json") >= 1
    assert ".part" not in found
