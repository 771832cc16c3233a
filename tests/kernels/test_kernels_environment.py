"""What the machine offers, tested on any machine."""

import ctypes
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from llmcli.kernels import environment


class FakeDriver:
    """Answers like libcuda.so with one card, or with an error."""

    def __init__(self, init_status: int = 0, version: int = 13010):
        self.init_status = init_status
        self.version = version

    def cuDriverGetVersion(self, version) -> int:
        version._obj.value = self.version
        return 0

    def cuInit(self, flags: int) -> int:
        return self.init_status

    def cuDeviceGetCount(self, count) -> int:
        count._obj.value = 1
        return 0

    def cuDeviceGet(self, device, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name, length: int, device) -> int:
        name.value = b"NVIDIA Test"
        return 0

    def cuDeviceTotalMem_v2(self, total, device) -> int:
        total._obj.value = 24 * 2**30
        return 0

    def cuDeviceGetAttribute(self, value, attribute: int, device) -> int:
        value._obj.value = {75: 8, 76: 9}[attribute]
        return 0


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert environment.find_driver() is None


def test_a_card_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver())
    driver = environment.find_driver()
    assert driver == environment.Driver((13, 1), (environment.Card(0, "NVIDIA Test", (8, 9), 24 * 2**30),))


@pytest.mark.parametrize(("status", "problem"), [(100, None), (999, "the driver does not start (CUDA error 999)")])
def test_a_driver_without_cards(monkeypatch: pytest.MonkeyPatch, status: int, problem: str | None) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(init_status=status))
    assert environment.find_driver() == environment.Driver((13, 1), (), problem)


def test_two_cupy_packages_are_both_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    assert environment.cupy_distributions() == versions


def test_the_compiler_has_a_version_or_a_reason() -> None:
    version = environment.nvrtc_version()
    if environment.cupy_distributions():
        assert isinstance(version, tuple)
        assert version >= (12, 0)
    else:
        assert "ModuleNotFoundError" in version


@pytest.fixture
def both_toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The packages of CUDA 12 and 13 side by side, as files without content; no other toolkit is found."""
    folder = tmp_path / "nvidia"
    libraries = ("cuda_nvrtc/lib/libnvrtc.so.12", "cublas/lib/libcublas.so.12", "cublas/lib/libcublasLt.so.12")
    headers = ("cuda_runtime/include/cuda_fp16.h", "cu13/include/cuda_fp16.h")
    for name in (*libraries, "cu13/lib/libnvrtc.so.13", *headers):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    monkeypatch.setattr(environment.sys, "path", [str(tmp_path)])
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    return folder


@pytest.mark.parametrize(("cupy", "headers"), [("cupy-cuda12x", "cuda_runtime"), ("cupy-cuda13x", "cu13")])
def test_headers_match_the_compiler_where_two_toolkits_lie(
    both_toolkits: Path, cupy: str, headers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "cupy_distributions", lambda: {cupy: "14.2.0"})
    assert environment.header_folder() == both_toolkits / headers / "include"
    (both_toolkits / headers / "include" / "cuda_fp16.h").unlink()
    assert environment.header_folder() is not None  # better the others than none


@pytest.mark.parametrize(
    ("cupy", "loaded"),
    [("cupy-cuda12x", ["libnvrtc.so.12", "libcublasLt.so.12", "libcublas.so.12"]), ("cupy-cuda13x", [])],
)
def test_libraries_of_cuda_12_are_loaded_before_those_of_13(
    both_toolkits: Path, cupy: str, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(environment, "cupy_distributions", lambda: {cupy: "14.2.0"})
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: seen.append(Path(path).name))
    environment.prepare_cupy.__wrapped__()
    assert seen == loaded


@pytest.mark.parametrize(("cupy", "version"), [("cupy-cuda12x", "12.9.86"), ("cupy-cuda13x", "13.0.88")])
def test_the_compiler_is_known_by_its_package(cupy: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {cupy: "14.2.0", "nvidia-cuda-nvrtc": "13.0.88", "nvidia-cuda-nvrtc-cu12": "12.9.86"}

    def find(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", find)
    assert environment.compiler_identity() == version
    versions = {cupy: "14.2.0"}
    monkeypatch.setattr(environment, "nvrtc_version", lambda: (12, 4))
    assert environment.compiler_identity() == "12.4"


def test_cub_comes_with_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    environment.cub_folders.cache_clear()
    assert any((folder / "cub" / "cub.cuh").is_file() for folder in environment.cub_folders())
    assert any((folder / "cuda" / "std" / "cstdint").is_file() for folder in environment.cub_folders())
    environment.cub_folders.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(environment.importlib.util, "find_spec", lambda name: None)
        assert environment.cub_folders() == ()
    environment.cub_folders.cache_clear()


@pytest.mark.cuda
def test_the_driver_and_cupy_describe_the_same_card() -> None:
    import cupy

    driver = environment.find_driver()
    assert driver is not None
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    assert driver.cards[0].name == properties["name"].decode()
    assert driver.cards[0].compute_capability == (properties["major"], properties["minor"])
    assert driver.cards[0].memory_bytes == properties["totalGlobalMem"]
    assert driver.cuda_version[0] * 1000 <= cupy.cuda.runtime.driverGetVersion()
    assert environment.header_folder() is not None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="nobody can write into Linux's /proc")
def test_a_home_that_cannot_be_written_keeps_nothing_from_compiling() -> None:
    """CuPy's import makes a folder there, and fails where it cannot."""
    pytest.importorskip("cupy")
    variables = {name: value for name, value in os.environ.items() if name != "CUPY_CACHE_DIR"}
    told = subprocess.run(
        [sys.executable, "-m", "llmcli", "doctor"],
        env={**variables, "HOME": "/proc/nowhere"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    ).stdout
    assert re.search(r"^ok +NVRTC", told, re.MULTILINE), told
    assert "/proc/nowhere/.cache" in told


def test_looking_makes_no_folder(tmp_path: Path) -> None:
    """Neither CuPy's own in the home, nor the one that it gets among ours."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    command = [sys.executable, "-m", "llmcli", "doctor"]
    subprocess.run(command, env={**kept, "HOME": str(tmp_path)}, capture_output=True, check=True, timeout=120)
    assert list(tmp_path.iterdir()) == []
