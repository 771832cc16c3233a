"""What this machine offers to CUDA kernels: driver, cards, CuPy, compiler, headers. Asks, never changes anything.

The driver is asked through its own library, so that a card is seen even where CuPy is missing or broken.
"""

import ctypes
import importlib
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

MIN_COMPUTE_CAPABILITY = (8, 0)

_DRIVER_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE

_CUPY_NAMES = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-7-0")


@dataclass(frozen=True)
class Card:
    """One GPU as the driver describes it.

    Units: bytes
    """

    index: int
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: the highest CUDA version it runs, and its cards; `problem` if it cannot be used."""

    cuda_version: tuple[int, int]
    cards: tuple[Card, ...]
    problem: str | None = None


def find_driver() -> Driver | None:
    """Ask the NVIDIA driver, or None if there is none on this machine."""
    try:
        driver = ctypes.CDLL(_DRIVER_LIBRARY)
    except OSError:
        return None
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    cuda_version = (version.value // 1000, version.value % 1000 // 10)
    status = driver.cuInit(0)
    if status == _NO_DEVICE:
        return Driver(cuda_version, ())
    if status != 0:
        return Driver(cuda_version, (), f"the driver does not start (CUDA error {status})")
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return Driver(cuda_version, tuple(_describe(driver, index) for index in range(count.value)))


def _describe(driver: ctypes.CDLL, index: int) -> Card:
    device, value, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    capability = []
    for attribute in (_MAJOR, _MINOR):
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Card(index, name.value.decode(errors="replace"), (capability[0], capability[1]), total.value)


def cupy_distributions() -> dict[str, str]:
    """The installed CuPy packages and their versions; more than one shadow each other and must not be."""
    found = {}
    for name in _CUPY_NAMES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def nvrtc_version() -> tuple[int, int] | str:
    """The version of the compiler library that CuPy finds, or why there is none."""
    try:
        # Not at module level: without CuPy, this module still says what is missing.
        nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
        major, minor = nvrtc.getVersion()
    except Exception as error:  # CuPy raises RuntimeError, ImportError or its own errors, by version and cause
        return f"{type(error).__name__}: {error}"
    return major, minor


def header_folder() -> Path | None:
    """The folder with the CUDA headers that kernels include, or None."""
    candidates = [Path(path) / "include" for name in ("CUDA_PATH", "CUDA_HOME") if (path := os.environ.get(name))]
    for entry in sys.path:
        candidates += sorted(Path(entry or ".").glob("nvidia/*/include"))
    candidates.append(Path("/usr/local/cuda/include"))
    return next((folder for folder in candidates if (folder / "cuda_fp16.h").is_file()), None)
