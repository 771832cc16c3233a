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
from llmcli.kernels.cache import CachedKernels, Kernel, KernelCache
from llmcli.kernels.compiler import CompiledKernels, KernelResources
from llmcli.kernels.registry import KERNELS

FLOAT, SHORT = ("scale", "scale<float>"), ("scale", "scale<short>")


class Compilations:
    """A stand-in for the compiler: other machine code each time, and a record of requests."""

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


def get(kernels: KernelCache, kernel: Kernel = FLOAT, arch: str = "sm_90") -> CachedKernels:
    return kernels.get_all([kernel], arch)[kernel]


def test_what_was_compiled_is_found_again(tmp_path: Path, sources: Path, compilations: Compilations) -> None:
    first = KernelCache(tmp_path / "new" / "cache", sources)
    compiled = get(first)
    assert get(KernelCache(tmp_path / "new" / "cache", sources)) == compiled
    assert get(first) == compiled
    assert len(compilations.calls) == 1


def test_a_source_in_a_folder_of_its_own_is_kept_too(tmp_path: Path, sources: Path, compilations: Compilations) -> None:
    (sources / "studies").mkdir()
    (sources / "studies" / "scale.cu").write_text("int study;\n")
    kernels = ("studies/scale", "scale<float>"), FLOAT
    compiled = KernelCache(tmp_path / "cache", sources).get_all(kernels, "sm_90")
    assert KernelCache(tmp_path / "cache", sources).get_all(kernels, "sm_90") == compiled
    assert len(compilations.calls) == 2


def test_each_input_of_a_compilation_makes_another_entry(
    tmp_path: Path, sources: Path, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = KernelCache(tmp_path / "cache", sources)
    cubins = [get(kernels).cubin, get(kernels, SHORT).cubin, get(kernels, arch="sm_80").cubin]
    with monkeypatch.context() as patch:
        patch.setattr(environment, "compiler_identity", lambda: "13.4.92")
        cubins.append(get(KernelCache(tmp_path / "cache", sources)).cubin)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "OPTIONS", ("--std=c++20",))
        cubins.append(get(kernels).cubin)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_FORMAT", "llmcli kernels 0")
        cubins.append(get(kernels).cubin)
    (sources / "common" / "part.cuh").write_text("int other;\n")
    cubins.append(get(kernels).cubin)
    assert len(set(cubins)) == len(compilations.calls) == 7


@pytest.mark.parametrize("suffix", [".cubin", ".json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "absent", "another's", "a folder"])
def test_a_damaged_pair_is_compiled_again(
    tmp_path: Path, sources: Path, compilations: Compilations, suffix: str, damage: str
) -> None:
    kernels = KernelCache(tmp_path / "cache", sources)
    path = get(kernels).cubin.with_suffix(suffix)
    other = get(KernelCache(tmp_path / "other", sources)).cubin.with_suffix(suffix)
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
    again = get(kernels)
    assert again.resources[FLOAT[1]].registers == len(compilations.calls) == 3
    if damage != "a folder":
        assert get(kernels) == again


@pytest.mark.parametrize(
    "content", [b"[]", b"{}", b'{"kernels": 1, "sha256": 2}', b"\xff", b"[" * 100_000, b"9" * 5000]
)
def test_a_description_of_another_form_is_no_entry(
    tmp_path: Path, sources: Path, compilations: Compilations, content: bytes
) -> None:
    kernels = KernelCache(tmp_path / "cache", sources)
    get(kernels).cubin.with_suffix(".json").write_bytes(content)
    assert get(kernels).resources[FLOAT[1]].registers == len(compilations.calls) == 2


@pytest.mark.parametrize("way", ["cubin", "description", "folder", "folder above"])
def test_what_others_could_have_written_is_not_loaded(
    tmp_path: Path, sources: Path, compilations: Compilations, way: str
) -> None:
    kernels = KernelCache(tmp_path / "home" / "cache", sources)
    kept = get(kernels).cubin
    places = {"cubin": kept, "description": kept.with_suffix(".json"), "folder": kept.parent}
    places.get(way, kept.parent.parent).chmod(0o777)
    again = get(kernels)
    assert len(compilations.calls) == 2
    assert (again.cubin == kept) == (way in ("cubin", "description"))
    assert again.cubin.stat().st_mode & 0o777 == 0o600
    assert again.cubin.parent.stat().st_mode & 0o022 == 0


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
        cubin = get(kernels).cubin
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
        KernelCompileError, match="kernel scale cannot be cached in .* or .*: No space left on device; free space"
    ):
        get(KernelCache(tmp_path / "cache", sources))
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_description_is_written_last(
    tmp_path: Path, sources: Path, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, written = os.replace, []
    monkeypatch.setattr(cache.os, "replace", lambda old, new: (written.append(new.suffix), replace(old, new)))
    get(KernelCache(tmp_path / "cache", sources))
    assert written == [".cubin", ".json"]


def test_writers_at_once_leave_one_whole_entry(
    tmp_path: Path, sources: Path, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_writers, num_rounds = 8, 20
    all_compile = threading.Barrier(num_writers)  # so that none finds another's result
    same = compilations("", *FLOAT, "sm_90")  # equal input gives equal code

    def compile_together(*_: object) -> CompiledKernels:
        all_compile.wait(timeout=60)
        return same

    def write() -> None:
        for number in range(num_rounds):
            folder = tmp_path / f"cache {number}"
            compiled = get(KernelCache(folder, sources))
            found.append(get(KernelCache(folder, sources)) == compiled)

    monkeypatch.setattr(compiler, "compile_kernels", compile_together)
    found: list[bool] = []
    writers = [threading.Thread(target=write) for _ in range(num_writers)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert found == [True] * num_writers * num_rounds
    assert {len(list(folder.iterdir())) for folder in tmp_path.glob("cache *")} == {2}


def test_a_warm_start_loads_no_compiler(
    tmp_path: Path, sources: Path, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(KernelCache(tmp_path / "cache", sources))
    monkeypatch.undo()
    monkeypatch.setattr(environment.metadata, "version", lambda name: "13.0.88")

    def fail(*_: object) -> None:
        raise AssertionError("the compiler was loaded")

    monkeypatch.setattr(environment, "nvrtc_version", fail)
    monkeypatch.setattr(compiler, "compile_kernels", fail)
    assert get(KernelCache(tmp_path / "cache", sources)).lowered == {FLOAT[1]: "_scale<float>"}


@pytest.mark.usefixtures("nvrtc")
def test_real_machine_code_survives(tmp_path: Path, sources: Path) -> None:
    (sources / "scale.cu").write_text("template <typename T>\n__global__ void scale(T* x) { *x *= 2; }\n")
    compiled = get(KernelCache(tmp_path / "cache", sources), arch="sm_80")
    assert compiled.cubin.read_bytes().startswith(b"\x7fELF")
    again = get(KernelCache(tmp_path / "again", sources), arch="sm_80")
    assert again.cubin.read_bytes() == compiled.cubin.read_bytes()
    assert (again.lowered, again.resources) == (compiled.lowered, compiled.resources)
    assert get(KernelCache(tmp_path / "cache", sources), arch="sm_80") == compiled


def test_many_are_counted_as_they_are_compiled_and_found_again(
    tmp_path: Path, sources: Path, compilations: Compilations
) -> None:
    (sources / "other.cu").write_text("int other;\n")
    wanted = [FLOAT, ("other", "other"), SHORT]
    kernels, counts = KernelCache(tmp_path / "cache", sources), []
    one = get(kernels)
    compiled = kernels.get_all(wanted, "sm_90", lambda done, total: counts.append((done, total)))
    assert counts == [(0, 2), (1, 2), (2, 2)]
    assert sorted(call[1:3] for call in compilations.calls) == [
        ("other", ("other",)),
        ("scale", FLOAT[1:]),
        ("scale", SHORT[1:]),
    ]
    assert set(compiled) == set(wanted)
    assert compiled[FLOAT] == one
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
        if len(asked) > 4:  # one is in progress at the error
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
    monkeypatch.setattr(compiler, "compile_kernels", compilations)
    compilations.calls.clear()
    assert set(kernels.get_all(wanted, "sm_90")) == set(wanted)
    found = set(wanted) - {(stem, names[0]) for _, stem, names, _ in compilations.calls}
    assert {name for _, name in found} <= set(asked[:3])


def test_without_a_folder_all_lie_in_one_temporary_folder(
    tmp_path: Path, sources: Path, compilations: Compilations
) -> None:
    (tmp_path / "cache").write_text("in the way")
    kernels = KernelCache(tmp_path / "cache", sources)
    compiled = kernels.get_all([("scale", f"scale<{number}>") for number in range(20)], "sm_90")
    assert len({entry.cubin.parent for entry in compiled.values()}) == 1
    assert all(entry.cubin.is_file() for entry in compiled.values())


SMALL = [(stem, name) for stem in ("add_parts", "embedding", "gather_columns") for name in KERNELS[stem].variants[:2]]


@pytest.mark.usefixtures("nvrtc")
def test_threads_make_the_machine_code_of_one_after_the_other(tmp_path: Path) -> None:
    side_by_side = KernelCache(tmp_path / "threads").get_all(SMALL, "sm_90")
    alone = KernelCache(tmp_path / "alone")
    for kernel, entry in side_by_side.items():
        one = get(alone, kernel)
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
