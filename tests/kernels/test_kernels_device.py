"""Why a card cannot be used, in one line each; and, on a card, that launches work."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from launched import launched_by

from llmcli.errors import DeviceError, InsufficientMemoryError, KernelCompileError
from llmcli.kernels import device as device_module
from llmcli.kernels import environment
from llmcli.kernels.cache import KernelCache
from llmcli.kernels.device import Device, device_errors, find_problem
from llmcli.kernels.environment import Card, Driver
from llmcli.kernels.registry import KERNELS
from llmcli.kernels.sources import kernels_folder
from llmcli.resources import install_command

A100 = Card(0, "A100", (8, 0), 40 * 2**30)
T4 = Card(1, "Tesla T4", (7, 5), 16 * 2**30)
CUPY_12, CUPY_13 = {"cupy-cuda12x": "14.2.0"}, {"cupy-cuda13x": "14.2.0"}


@pytest.mark.parametrize(
    ("driver", "cupy", "index", "problem"),
    [
        (None, CUPY_13, 0, "there is no NVIDIA driver on this machine"),
        (Driver((13, 0), (), "the driver does not start (CUDA error 3)"), CUPY_13, 0, "the driver does not start"),
        (
            Driver((11, 8), (A100,)),
            CUPY_12,
            0,
            "the NVIDIA driver is for CUDA 11.8; install one for CUDA 12.0 or newer",
        ),
        (Driver((13, 0), ()), CUPY_13, 0, "the NVIDIA driver sees no card"),
        (Driver((13, 0), (A100,)), CUPY_13, 1, "there is no card 1, the NVIDIA driver sees only card 0"),
        (Driver((13, 0), (A100, T4)), CUPY_13, 2, "there is no card 2, the NVIDIA driver sees cards 0 to 1"),
        (Driver((13, 0), (A100,)), CUPY_13, -1, "there is no card -1"),
        (Driver((13, 0), (A100, T4)), CUPY_13, 1, "card 1, Tesla T4, has compute capability 7.5; 8.0 or more (Ampere)"),
        (Driver((13, 0), (A100,)), {}, 0, f"CuPy is not installed; {install_command('llmcli[cuda13]')}"),
        (Driver((12, 4), (A100,)), {}, 0, f"CuPy is not installed; {install_command('llmcli[cuda12]')}"),
        (
            Driver((13, 0), (A100,)),
            CUPY_12 | CUPY_13,
            0,
            "cupy-cuda12x and cupy-cuda13x overwrite each other; pip uninstall cupy-cuda12x cupy-cuda13x, then "
            + install_command("llmcli[cuda13]"),
        ),
        (Driver((12, 4), (A100,)), CUPY_13, 0, "cupy-cuda13x cannot use a driver for CUDA 12.4; pip uninstall"),
        (Driver((13, 0), (A100,)), CUPY_12, 0, "CuPy does not start: cudaErrorOddity"),
    ],
)
def test_each_problem_is_one_line(
    driver: Driver | None, cupy: dict[str, str], index: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "find_driver", lambda: driver)
    monkeypatch.setattr(environment, "cupy_distributions", lambda: cupy)
    monkeypatch.setattr(device_module, "_import_problem", lambda: "CuPy does not start: cudaErrorOddity")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = find_problem(index)
    assert found is not None
    assert found.startswith(problem)
    with pytest.raises(DeviceError) as caught:
        Device.open(index)
    assert str(caught.value) == f"CUDA cannot be used: {found}"
    assert caught.value.exit_code == 4
    assert "\n" not in found


def test_hidden_cards_are_hinted_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_driver", lambda: Driver((13, 0), ()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_problem() == "the NVIDIA driver sees no card; CUDA_VISIBLE_DEVICES is set"


def test_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_driver", lambda: Driver((12, 4), (A100,)))
    monkeypatch.setattr(environment, "cupy_distributions", lambda: CUPY_12)
    monkeypatch.setattr(device_module, "_import_problem", lambda: None)
    assert find_problem() is None


def test_asking_a_machine_without_a_driver_does_not_import_cupy() -> None:
    program = (
        "import sys\nfrom llmcli.kernels import environment\nfrom llmcli.kernels.device import find_problem\n"
        "environment.find_driver = lambda: None\nassert 'no NVIDIA driver' in find_problem()\n"
        "assert not [name for name in sys.modules if name.startswith('cupy')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_cupys_cache_lies_with_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path))
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    environment.prepare_cupy.__wrapped__()
    assert Path(os.environ["CUPY_CACHE_DIR"]).is_relative_to(tmp_path / "kernels")
    assert Path(os.environ["CUPY_CACHE_DIR"]).is_dir()
    monkeypatch.setenv("CUPY_CACHE_DIR", "/elsewhere")
    environment.prepare_cupy.__wrapped__()
    assert os.environ["CUPY_CACHE_DIR"] == "/elsewhere"


@pytest.mark.usefixtures("nvrtc")
def test_cupy_starts_where_no_cache_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    unwritable = str(tmp_path / "file" / "home")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("CUPY_")}
    environ |= {"HOME": unwritable, "LLMCLI_HOME": unwritable}
    program = "from llmcli.kernels.environment import prepare_cupy\n{}import cupy\n"
    without = [sys.executable, "-c", program.format("")]
    assert subprocess.run(without, env=environ, capture_output=True, check=False).returncode != 0
    subprocess.run([sys.executable, "-c", program.format("prepare_cupy()\n")], env=environ, check=True)


@pytest.mark.usefixtures("nvrtc")
def test_each_kernel_is_loaded_once_and_from_a_file_of_its_own(tmp_path: Path) -> None:
    """On a device without a card, whose modules record requests."""
    cache = KernelCache(tmp_path / "cache")
    device = object.__new__(Device)
    device.arch, device._caches, device._kernels = "sm_90", {False: cache}, {}
    device.own_sources, device.uses_own = {}, False
    loaded: list[tuple[str, str]] = []

    def open_module(path: str) -> SimpleNamespace:
        return SimpleNamespace(get_function=lambda lowered: loaded.append((path, lowered)))

    device._cupy = SimpleNamespace(RawModule=open_module)
    names = KERNELS["embedding"].variants[:2]
    device.prepare_all({"embedding": names[:1], "add_parts": KERNELS["add_parts"].variants[:1]})
    device.prepare_all({"embedding": names})
    entries = [("add_parts", KERNELS["add_parts"].variants[0]), *(("embedding", name) for name in names)]
    found = cache.get_all(entries, "sm_90")
    assert sorted(loaded) == sorted((str(one.cubin), one.lowered[name]) for (_, name), one in found.items())
    assert len({path for path, _ in loaded}) == 3


@pytest.mark.usefixtures("nvrtc")
def test_errors_of_cupy_become_errors_of_ours() -> None:
    from cupy.cuda.memory import OutOfMemoryError
    from cupy_backends.cuda.api.runtime import CUDARuntimeError

    full, failed = r"^the card's memory is full \(", "^the card failed: "
    with pytest.raises(InsufficientMemoryError, match=full + "Out of memory allocating 1,024"), device_errors():
        raise OutOfMemoryError(1024, 0, 0)
    with pytest.raises(InsufficientMemoryError, match=full + "cudaErrorMemoryAllocation"), device_errors():
        raise CUDARuntimeError(2)
    with pytest.raises(DeviceError, match=failed + "cudaErrorIllegalAddress: an illegal memory"), device_errors():
        raise CUDARuntimeError(700)


@pytest.mark.parametrize("error", [MemoryError("host"), RuntimeError("bug"), ValueError("bug")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, device_errors():
        raise error
    assert caught.value is error


PROBES = """
#include "common/launch.cuh"

template <typename T>
__global__ void store(T* out, const float* absent, int a, float b, unsigned long long c, double d) {
  out[0] = a;
  out[1] = b;
  out[2] = c;
  out[3] = d;
  out[4] = absent == nullptr;
}

// 64 KiB of shared memory, written and read back in another order.
__global__ void reverse(const int* in, int* out) {
  extern __shared__ int buffer[];
  for (int i = threadIdx.x; i < 16384; i += blockDim.x) buffer[i] = in[i];
  __syncthreads();
  for (int i = threadIdx.x; i < 16384; i += blockDim.x) out[i] = buffer[16383 - i];
}

// Lets the next kernel start at once, and writes late.
__global__ void slow_increment(int* value) {
  grid_dependency_wait();
  grid_dependency_launch();
  long long start = clock64();
  while (clock64() - start < 2000000) {
  }
  *value += 1;
}

__global__ void copy(const int* value, int* out, int index) {
  grid_dependency_wait();
  out[index] = *value;
}

__global__ void wild(int* nowhere) { *nowhere = 1; }
"""


@pytest.fixture
def probes(device: Device, tmp_path: Path) -> Device:
    """Card 0 with kernels of this file, and an empty cache at tmp_path / "cache"."""
    return probes_at(tmp_path)


def probes_at(folder: Path) -> Device:
    sources = folder / "kernels"
    (sources / "common").mkdir(parents=True, exist_ok=True)
    (sources / "common" / "launch.cuh").write_text((kernels_folder() / "common" / "launch.cuh").read_text())
    (sources / "probes.cu").write_text(PROBES)
    driver = environment.find_driver()
    assert driver is not None
    opened = Device(driver.cards[0], KernelCache(folder / "cache", sources))
    opened.stream.use()
    return opened


@pytest.mark.cuda
def test_arguments_arrive(probes: Device) -> None:
    import cupy

    out = cupy.zeros(5, np.float64)
    probes.noted = []
    arguments = (out, None, np.int32(-3), np.float32(0.5), np.uint64(2**40), np.float64(0.1))
    probes.launch("probes", "store<double>", grid=(1,), block=1, arguments=arguments)
    probes.synchronize()
    assert out.get().tolist() == [-3, 0.5, 2.0**40, 0.1, 1]
    assert launched_by(probes) == [("probes", "store<double>")]


@pytest.mark.cuda
def test_more_shared_memory_than_the_default(probes: Device) -> None:
    import cupy

    values, out = cupy.arange(16384, dtype=np.int32), cupy.zeros(16384, np.int32)
    for _ in range(2):
        probes.launch("probes", "reverse", grid=(1,), block=256, arguments=(values, out), shared_bytes=65536)
    probes.synchronize()
    assert (out.get() == np.arange(16384)[::-1]).all()
    too_much = probes.shared_bytes_per_block + 1
    with pytest.raises(ValueError, match="this card has"):
        probes.launch("probes", "reverse", grid=(1,), block=256, arguments=(values, out), shared_bytes=too_much)


def increment_and_copy(device: Device, value: Any, out: Any, steps: int, overlaps: bool) -> None:
    for step in range(steps):
        device.launch("probes", "slow_increment", grid=(1,), block=1, arguments=(value,), overlaps=overlaps)
        copy_arguments = (value, out, np.int32(step))
        device.launch("probes", "copy", grid=(1,), block=1, arguments=copy_arguments, overlaps=overlaps)


@pytest.mark.cuda
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_launch_that_overlaps_still_sees_what_came_before(probes: Device, overlaps: bool) -> None:
    import cupy

    value, out = cupy.zeros(1, np.int32), cupy.zeros(8, np.int32)
    increment_and_copy(probes, value, out, 8, overlaps)
    probes.synchronize()
    assert out.get().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.cuda
@pytest.mark.parametrize("overlaps", [False, True])
def test_launches_are_captured_in_a_graph(probes: Device, overlaps: bool) -> None:
    import cupy

    value, out = cupy.zeros(1, np.int32), cupy.zeros(4, np.int32)
    probes.prepare("probes", ["slow_increment", "copy"])
    with probes.stream:
        probes.stream.begin_capture()
        increment_and_copy(probes, value, out, 4, overlaps)
        graph = probes.stream.end_capture()
    assert value.get().tolist() == [0]
    for _ in range(3):
        graph.launch(probes.stream)
    probes.synchronize()
    assert out.get().tolist() == [9, 10, 11, 12]


@pytest.mark.cuda
def test_a_second_start_compiles_nothing(probes: Device, tmp_path: Path) -> None:
    wanted = {"probes": ["copy", "wild"]}
    counts: list[tuple[int, int]] = []
    for one in (probes, probes, probes_at(tmp_path)):
        one.prepare_all(wanted, lambda *count: counts.append(count))
    assert counts == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.cuda
def test_an_unknown_name_is_a_compile_error(probes: Device) -> None:
    with pytest.raises(KernelCompileError, match="kernel probes does not compile"):
        probes.prepare("probes", ["none<float>"])


@pytest.mark.cuda
def test_another_thread_launches_after_activating(probes: Device) -> None:
    import cupy

    value, out = cupy.zeros(1, np.int32), cupy.full(1, 7, np.int32)
    probes.synchronize()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            probes.activate()
            probes.launch("probes", "copy", grid=(1,), block=1, arguments=(value, out, np.int32(0)))
            probes.synchronize()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert out.get().tolist() == [0]


@pytest.mark.cuda
def test_two_devices_of_a_card_have_one_stream(device: Device) -> None:
    """Blocks that wait for each other must find the whole card free: a draft model runs in its model's stream."""
    assert Device.open(device.index).stream is device.stream


@pytest.mark.cuda
def test_a_full_card_is_an_error_of_ours(device: Device) -> None:
    import cupy

    with pytest.raises(InsufficientMemoryError, match="the card's memory is full"), device_errors():
        cupy.empty(2**50, np.uint8)


@pytest.mark.cuda
def test_a_wild_write_is_an_error_of_ours(tmp_path: Path) -> None:
    """In a process of its own, since the card refuses all work of that process from then on."""
    program = (
        "import sys, pathlib, numpy\nfrom test_kernels_device import probes_at\nfrom llmcli.errors import DeviceError\n"
        "device = probes_at(pathlib.Path(sys.argv[1]))\n"
        "device.launch('probes', 'wild', grid=(1,), block=1, arguments=(numpy.uint64(8),))\n"
        "try:\n    device.synchronize()\nexcept DeviceError as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    assert result.stdout.startswith("the card failed: cudaErrorIllegalAddress"), result.stderr
