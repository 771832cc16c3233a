"""What this machine offers to CUDA kernels: driver, cards, CuPy, compiler, headers.

All but `prepare_cupy` and `start_card` only look, and make no file. They ask the driver through its own library, so
that a card is found even if CuPy is missing or broken.
"""

import ctypes
import functools
import importlib
import importlib.util
import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from threading import Thread

from llmcli.resources import kernel_cache_folder, private_folder
from llmcli.timeline import Timeline

MIN_COMPUTE_CAPABILITY = (8, 0)
MIN_CUDA_VERSION = (12, 0)

DRIVER_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE

_CUPY_NAMES = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-7-0")
_NVRTC_NAMES = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}
_CUBLAS_NAMES = {12: "nvidia-cublas-cu12", 13: "nvidia-cublas"}
_CCCL_PARTS = ("cub", "libcudacxx", "thrust")
_DRIVER_VERSION = Path("/sys/module/nvidia/version")

# Where NVIDIA's packages for CUDA 12 keep the libraries that CuPy loads, dependencies first.
_CUDA12_LIBRARIES = ("cuda_nvrtc/lib/libnvrtc.so.12", "cublas/lib/libcublasLt.so.12", "cublas/lib/libcublas.so.12")


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
        driver = ctypes.CDLL(DRIVER_LIBRARY)
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


def pci_bus_id(index: int) -> str | None:
    """The bus address of card `index` in the driver's order, such as 0000:1b:00.0; None if the driver does not say."""
    try:
        driver = ctypes.CDLL(DRIVER_LIBRARY)
    except OSError:
        return None
    device, address = ctypes.c_int(), ctypes.create_string_buffer(32)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return None
    return None if driver.cuDeviceGetPCIBusId(address, len(address), device) else address.value.decode()


def cupy_distributions() -> dict[str, str]:
    """The installed CuPy packages and their versions; there must be at most one, as they shadow each other."""
    found = {}
    for name in _CUPY_NAMES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cupy_cuda_major() -> int:
    """The CUDA that the installed CuPy is for; 13 without one."""
    return 12 if "cupy-cuda12x" in cupy_distributions() else 13


def toolkit_extra() -> str:
    """The extra that brings compiler and headers, for the CuPy that is installed, else for the driver, if any."""
    found, driver = cupy_distributions(), find_driver()
    if driver is None and not found:
        return "compile"
    is_newer = driver is not None and driver.cuda_version >= (13, 0)
    return "cuda13" if "cupy-cuda13x" in found or (is_newer and not found) else "cuda12"


@functools.cache
def prepare_cupy(*, keeps_kernels: bool = True) -> None:
    """Do what CuPy needs before it is imported.

    It gets a cache folder of ours, as its import fails where its own cannot be made; none of our kernels is in it.
    Without `keeps_kernels` no folder is made, and kernels of CuPy's own stay in memory.
    A CuPy for CUDA 12 gets the libraries of CUDA 12: it would prefer those of 13 if these are installed too, and
    torch's packages for Linux bring them.
    """
    if not os.environ.get("CUPY_CACHE_DIR"):
        folder = None
        if keeps_kernels:
            with suppress(OSError):
                folder = private_folder(kernel_cache_folder() / "cupy")
        if folder is None:  # CuPy requires one that exists, and then does not touch it
            os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        os.environ["CUPY_CACHE_DIR"] = str(folder or tempfile.gettempdir())
    if cupy_cuda_major() != 12:
        return
    for name in _CUDA12_LIBRARIES:
        for folder in _nvidia_folders():
            if (folder / name).is_file():
                ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
                break


def nvrtc_version() -> tuple[int, int] | str:
    """The version of the compiler library that CuPy finds, or why there is none."""
    try:
        prepare_cupy(keeps_kernels=False)  # only the compiler is used, but it imports CuPy
        # Not at module level: without CuPy, this module still reports what is missing.
        nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
        major, minor = nvrtc.getVersion()
    except Exception as error:  # CuPy raises RuntimeError, ImportError or its own errors, by version and cause
        return f"{type(error).__name__}: {error}"
    return major, minor


def compiler_identity() -> str:
    """The compiler's full version if a package brought it, else the version it reports; "" without a compiler.

    The package is asked first, since loading the library takes ten times as long.
    """
    try:
        return metadata.version(_NVRTC_NAMES[cupy_cuda_major()])
    except metadata.PackageNotFoundError:
        version = nvrtc_version()
    return "" if isinstance(version, str) else ".".join(map(str, version))


def card_libraries() -> dict[str, str]:
    """Versions, by name, of CuPy, the kernels' compiler, and cuBLAS if it is a package."""
    versions = {**cupy_distributions(), "NVRTC": compiler_identity()}
    try:
        versions["cuBLAS"] = metadata.version(_CUBLAS_NAMES[cupy_cuda_major()])
    except metadata.PackageNotFoundError:
        versions["cuBLAS"] = "the system's"
    return versions


def driver_version() -> str | None:
    """The driver's own version, such as 580.159.03, if the system shows it."""
    try:
        return _DRIVER_VERSION.read_text().strip()
    except OSError:
        return None


def header_folder() -> Path | None:
    """The folder with the CUDA headers that kernels include, or None."""
    candidates = [Path(path) / "include" for name in ("CUDA_PATH", "CUDA_HOME") if (path := os.environ.get(name))]
    wants_13 = cupy_cuda_major() == 13
    for folder in _nvidia_folders():
        # Headers of another CUDA than the compiler's may not compile: they come last.
        candidates += sorted(
            folder.glob("*/include"), key=lambda path: ((path.parent.name == "cu13") != wants_13, path)
        )
    candidates.append(Path("/usr/local/cuda/include"))
    return next((folder for folder in candidates if (folder / "cuda_fp16.h").is_file()), None)


@functools.cache
def cub_folders() -> tuple[Path, ...]:
    """The folders with the headers of CUB and its dependencies, which come with CuPy; none without CuPy."""
    spec = importlib.util.find_spec("cupy")  # does not import it
    places = (spec and spec.submodule_search_locations) or ()
    parts = (Path(place) / "_core/include/cupy/_cccl" / part for place in places for part in _CCCL_PARTS)
    return tuple(folder for folder in parts if folder.is_dir())


def _nvidia_folders() -> list[Path]:
    return [folder for entry in sys.path if (folder := Path(entry or ".") / "nvidia").is_dir()]


def start_card(index: int, timeline: Timeline) -> Thread | None:
    """Prepare card `index` in its own thread, which takes CUDA some tenths of a second; None without CuPy.

    Meanwhile Python can import and read files. What fails here fails again, with a message, when the card is opened.
    """
    if importlib.util.find_spec("cupy") is None:
        return None
    thread = Thread(target=_start, args=(index, timeline), name="start card")
    thread.start()
    return thread


def _start(index: int, timeline: Timeline) -> None:
    """Make the context that everything on the card shares. Calls by ctypes let Python run meanwhile."""
    with timeline.beside("driver and context"):
        try:
            driver = ctypes.CDLL(DRIVER_LIBRARY)
        except OSError:
            return
        card, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(card), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), card)
