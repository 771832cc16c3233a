"""Launches by CuPy's own call, and which launches go that way: a fake RawKernel records its arguments."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from driverless_card import Driver

from llmcli.errors import DeviceError
from llmcli.kernels import environment
from llmcli.kernels.cache import CachedKernels
from llmcli.kernels.compiler import KernelResources
from llmcli.kernels.device import Device
from llmcli.kernels.driver import LaunchDriver, LoadedKernel
from llmcli.kernels.launches import Offset


class Shape(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int32), ("scale", ctypes.c_float), ("table", ctypes.c_void_p))


class RawKernel:
    """As CuPy's: `kernel.ptr`, a settable limit of shared memory, a call; it may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.kernel = SimpleNamespace(ptr=0x1234)
        self.calls: list[tuple[Any, ...]] = []
        self.limits: list[int] = []
        self._error = error

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "max_dynamic_shared_size_bytes":
            self.limits.append(value)
        else:
            super().__setattr__(name, value)

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int, stream: Any) -> None:
        if self._error is not None:
            raise self._error
        self.calls.append((grid, block, [np.asarray(one).tobytes() for one in args], shared_mem, stream))


class Card(Device):
    """A card with one kernel, whose driver records launches."""

    def __init__(self, raw: RawKernel, can_overlap: bool = True) -> None:
        driver = Driver()
        self.driver_launches = driver.launches
        self.shared_bytes_per_block, self.stream = 100_000, SimpleNamespace(ptr=0x1000)
        self._can_overlap, self._started, self.noted = can_overlap, None, []
        self._driver, self.own_sources, self.uses_own = LaunchDriver(driver), {}, False
        self._kernels = {(False, "a", "a<1>"): LoadedKernel(raw, static_shared_bytes=1024)}

    def launch_a(self, **changes: Any) -> None:
        self.launch("a", "a<1>", **({"grid": (3, 2), "block": 128, "arguments": ()} | changes))


ARRAY = SimpleNamespace(data=SimpleNamespace(ptr=0x7F00_1234_5678), nbytes=16)


def test_every_argument_reaches_cupy_as_it_lies_in_memory() -> None:
    raw = RawKernel()
    card = Card(raw)
    shape = Shape(7, 0.1, 2**40)
    arguments = (np.int32(-7), np.float64(0.1), ARRAY, None, shape, Offset(ARRAY, 8), np.uint64(2**64 - 1))
    card.launch_a(arguments=arguments, shared_bytes=512)
    (call,) = raw.calls
    assert call[:2] == ((3, 2), (128, 1, 1))
    assert call[3:] == (512, card.stream)
    assert call[2] == [
        np.int32(-7).tobytes(),
        np.float64(0.1).tobytes(),
        (0x7F00_1234_5678).to_bytes(8, "little"),
        bytes(8),
        bytes(shape),
        (0x7F00_1234_5680).to_bytes(8, "little"),
        b"\xff" * 8,
    ]
    assert [starter.label for starter, _ in card.noted] == [("a", "a<1>")]
    assert card.driver_launches == []


@pytest.mark.parametrize("can_overlap", [True, False])
@pytest.mark.parametrize("overlaps", [True, False])
def test_the_driver_launches_what_overlaps_and_cupy_all_else(can_overlap: bool, overlaps: bool) -> None:
    raw = RawKernel()
    card = Card(raw, can_overlap)
    card.launch_a(overlaps=overlaps, arguments=(np.int32(5),))
    assert len(card.driver_launches) == (can_overlap and overlaps)
    assert len(raw.calls) == 1 - len(card.driver_launches)


def test_the_driver_launches_what_is_recorded() -> None:
    raw = RawKernel()
    card = Card(raw)
    replay = card.record(lambda: card.launch_a(arguments=(ARRAY,)), [ARRAY])
    replay.start([4096])
    assert card.driver_launches == [[0x7F00_1234_5678], [4096]]
    card.launch_a()
    assert len(raw.calls) == 1


def test_more_shared_memory_than_the_default_is_asked_for_once() -> None:
    raw = RawKernel()
    card = Card(raw)
    for shared_bytes in (0, 47 * 1024, 47 * 1024 + 1, 50_000, 100_000, 60_000):
        card.launch_a(shared_bytes=shared_bytes)
    assert raw.limits == [47 * 1024 + 1, 50_000, 100_000]
    with pytest.raises(ValueError, match="100001 bytes of shared memory a block, this card has 100000"):
        card.launch_a(shared_bytes=100_001)
    assert len(raw.calls) == 6


@pytest.mark.parametrize(
    "argument", [1, 1.0, True, "x", np.float16(1), np.zeros(3)], ids=lambda one: type(one).__name__
)
def test_what_has_no_certain_size_is_refused(argument: Any) -> None:
    raw = RawKernel()
    with pytest.raises(TypeError, match=f"a: argument 1 is {type(argument).__name__}"):
        Card(raw).launch_a(arguments=(None, argument))
    with pytest.raises(ValueError, match="grid"):
        Card(raw).launch_a(grid=(0,))
    assert raw.calls == []


def test_cupys_refusal_names_the_kernel() -> None:
    with pytest.raises(DeviceError, match=r"^kernel a did not start: CUDA_ERROR_X: odd$"):
        Card(RawKernel(RuntimeError("CUDA_ERROR_X: odd"))).launch_a()


@pytest.mark.usefixtures("nvrtc")
def test_cupy_takes_what_it_is_given() -> None:
    """Without a driver its call fails only after every argument has passed."""
    if environment.find_driver() is not None:
        pytest.skip("a driver would be asked to start what is no kernel")
    import cupy
    from cupy.cuda.function import Function

    function = Function.__new__(Function)
    raw = lambda grid, block, args, **options: function(grid, block, args, **options)  # noqa: E731
    kernel = SimpleNamespace(raw=raw, allow_shared=lambda shared_bytes: None)
    card = Card(RawKernel())
    card._kernels = {(False, "a", "a<1>"): kernel}
    card.stream = cupy.cuda.Stream.null
    with pytest.raises(DeviceError, match="did not start: CUDA_ERROR|did not start: cudaError"):
        card.launch_a(arguments=(np.int32(1), ARRAY, None, Shape(1, 2, 3)))


class Module:
    def __init__(self, path: str) -> None:
        self.path = path

    def get_function(self, name: str) -> Any:
        return SimpleNamespace(kernel=SimpleNamespace(ptr=1), origin=(self.path, name))


def test_kernels_come_from_the_cached_file_by_their_lowered_names(tmp_path: Any) -> None:
    card = Card(RawKernel())
    card.arch, card._cupy = "sm_90", SimpleNamespace(RawModule=Module)
    resources = KernelResources(1, 40_000, 0, 0, 0)
    cached = CachedKernels(tmp_path / "b.cubin", {"b<1>": "_b1", "b<2>": "_b2"}, {"b<1>": resources, "b<2>": resources})
    card._caches = {False: SimpleNamespace(get_all=lambda kernels, *_: dict.fromkeys(kernels, cached))}
    card.prepare("b", ["b<1>", "b<2>"])
    assert card._kernels[False, "b", "b<2>"].raw.origin == (str(tmp_path / "b.cubin"), "_b2")
    card._kernels[False, "b", "b<1>"].allow_shared(48 * 1024 - 40_000)
    with pytest.raises(AttributeError):
        _ = card._kernels[False, "b", "b<1>"].raw.max_dynamic_shared_size_bytes
