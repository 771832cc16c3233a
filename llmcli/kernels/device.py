"""One card: its compiled kernels, its stream, and launches on it. Errors there become messages of one line.

Nothing here imports CuPy before the driver has shown a usable card.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import TracebackType
from typing import Any

from llmcli.errors import DeviceError, InsufficientMemoryError
from llmcli.kernels import environment
from llmcli.kernels.arguments import Array
from llmcli.kernels.cache import KernelCache, OnCompile, say_nothing
from llmcli.kernels.driver import LaunchDriver, LoadedKernel, RawLaunch
from llmcli.kernels.launches import CardFacts, Launch, Launcher, addresses_of, check_launch
from llmcli.kernels.replay import Replay, Starter
from llmcli.resources import install_command

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY


class Device(Launcher):
    """One card, ready for launches. Made by `Device.open`.

    All launches of a process on a card are on one non-blocking stream, also those of several devices, such as a model's
    and its draft model's: kernels whose blocks wait for each other need the whole card free.

    `noted`, when a list, gets all starts, to be repeated.
    Attributes: own_sources: see KernelCache; uses_own: whether they are launched, which `engine_kernels` changes
    """

    def __init__(self, card: environment.Card, cache: KernelCache) -> None:
        """Call `open` instead, which checks first that the card can be used."""
        import cupy

        self.index = card.index
        self.name = card.name
        self.arch = "sm_{}{}".format(*card.compute_capability)
        self.noted: list[tuple[Starter, Sequence[int]]] | None = None
        self.own_sources = cache.own
        self.uses_own = bool(cache.own)
        self._caches = {True: cache, False: cache.without_own()}  # by whether own sources are used
        self._kernels: dict[tuple[bool, str, str], LoadedKernel] = {}  # an own one?, stem, name
        self._started: list[tuple[Starter, Sequence[int]]] | None = None  # while something is recorded
        self._cupy = cupy
        with device_errors():
            self.activate()
            self.stream = _stream_of(cupy, card.index)
            runtime = cupy.cuda.runtime
            attribute = runtime.deviceGetAttribute
            # Cards have clusters and overlapping launches from sm_90, and graphs record the latter from CUDA 12.3.
            self.can_cluster = card.compute_capability >= (9, 0)
            self.can_wgmma = card.compute_capability == (9, 0)  # later cards have a different operation
            self._can_overlap = self.can_cluster and runtime.driverGetVersion() >= 12030
            self.num_multiprocessors = int(attribute(runtime.cudaDevAttrMultiProcessorCount, card.index))
            self.clock_hertz = 1e3 * attribute(runtime.cudaDevAttrClockRate, card.index)  # the highest
            self.l2_bytes = int(attribute(runtime.cudaDevAttrL2CacheSize, card.index))
            self.shared_bytes_per_block = int(attribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, card.index))
        self._driver = LaunchDriver()

    @classmethod
    def open(cls, index: int = 0, own_sources: Mapping[str, str] | None = None) -> "Device":
        """Card `index` in the driver's order. `own_sources`: see KernelCache.

        Raises: DeviceError saying why it cannot be used
        """
        driver = environment.find_driver()
        problem = _problem(driver, index)
        if driver is None or problem is not None:
            raise DeviceError(f"CUDA cannot be used: {problem}")
        return cls(driver.cards[index], KernelCache(own=own_sources))

    @property
    def facts(self) -> CardFacts:
        """What plans and predictions need to know of the card."""
        return CardFacts(**{one.name: getattr(self, one.name) for one in fields(CardFacts)})

    def activate(self) -> None:
        """Make this the current card of the calling thread; every thread that launches does this once."""
        self._cupy.cuda.Device(self.index).use()

    def prepare(self, stem: str, names: Iterable[str]) -> None:
        """Load these name expressions of one `.cu` file now, compiling what the cache does not hold.

        Raises: DeviceError
        """
        self.prepare_all({stem: names})

    def prepare_all(self, wanted: Mapping[str, Iterable[str]], on_compile: OnCompile = say_nothing) -> None:
        """Like `prepare` for many files; what the cache lacks is compiled on all cores.

        `on_compile` gets the kernels compiled so far and those to compile, before the first and after each; on a warm
        start it is not called.
        Raises: DeviceError
        """
        kernels = {(stem, name) for stem, names in wanted.items() for name in names}
        missing = sorted(kernel for kernel in kernels if self._key(*kernel) not in self._kernels)
        found = self._caches[self.uses_own].get_all(missing, self.arch, on_compile)
        for (stem, name), cached in found.items():
            with device_errors():
                raw = self._cupy.RawModule(path=str(cached.cubin)).get_function(cached.lowered[name])
                self._kernels[self._key(stem, name)] = LoadedKernel(raw, cached.resources[name].shared_bytes)

    @contextmanager
    def engine_kernels(self) -> Iterator[None]:
        """Inside the block launch the engine's kernels instead of own sources.

        A graph that was captured before keeps its kernels.
        """
        before, self.uses_own = self.uses_own, False
        try:
            yield
        finally:
            self.uses_own = before

    def _key(self, stem: str, name: str) -> tuple[bool, str, str]:
        return self.uses_own and stem in self.own_sources, stem, name

    def make(self, launch: Launch) -> None:
        """Start a launch on the stream. One that overlaps does so on cards that can (sm_90).

        Raises: TypeError, ValueError for what CUDA would misread; DeviceError
        """
        self.start(self._bind(launch), addresses_of(launch.arguments))

    def start(self, starter: Starter, addresses: Sequence[int]) -> None:
        """Start a launch that lacks only its addresses; `record` notes it.

        Raises: DeviceError
        """
        starter.start(addresses)
        if self._started is not None:
            self._started.append((starter, addresses))
        if self.noted is not None:
            self.noted.append((starter, addresses))

    def record(self, run: Callable[[], None], arrays: Sequence[Array | None]) -> Replay:
        """Run `run`, and return its starts as a `Replay`, to be started again with other arrays in place of `arrays`.

        `run` may start anything but another recording.
        Raises: what `run` raises
        """
        self._started = []
        try:
            run()
            return Replay(self.start, self._started, arrays)
        finally:
            self._started = None

    def _bind(self, launch: Launch) -> Starter:
        check_launch(launch, self.shared_bytes_per_block)
        key = self._key(launch.stem, launch.name)
        kernel = self._kernels.get(key)
        if kernel is None:
            self.prepare(launch.stem, [launch.name])
            kernel = self._kernels[key]
        with device_errors():
            kernel.allow_shared(launch.shared_bytes)
        overlaps = launch.overlaps and self._can_overlap
        # The only place that chooses: the driver for what CuPy lacks (see driver.py), CuPy for all else.
        if overlaps or self._started is not None:
            return self._driver.bind(launch, kernel.function, self.stream.ptr, overlaps)
        return RawLaunch(launch, kernel, self.stream)

    def now(self) -> "Moment":
        """Mark the moment when all work launched so far is done."""
        with device_errors():
            event = self._cupy.cuda.Event()
            event.record(self.stream)
        return Moment(event)

    def synchronize(self) -> None:
        """Wait for everything launched so far.

        Raises: DeviceError if a kernel failed
        """
        with device_errors():
            self.stream.synchronize()


class Moment:
    """A moment of a card's work. Made by `Device.now`."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def seconds_until(self, later: "Moment") -> float:
        """The time from this moment to a later one of the same card. Waits for the later one.

        Raises: DeviceError if a kernel failed
        """
        import cupy

        with device_errors():
            later._event.synchronize()
            return 1e-3 * float(cupy.cuda.get_elapsed_time(self._event, later._event))


@functools.cache
def _stream_of(cupy: Any, card: int) -> Any:
    """The stream of all launches of this process on a card, which is the current one."""
    return cupy.cuda.Stream(non_blocking=True)


class _DeviceErrors:
    """The result of `device_errors`. It has no state; one object serves all calls."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, MemoryError | RuntimeError):
            return
        # By name, since importing these classes loads CuPy and, for cuBLAS, a library that may be missing.
        library = type(error).__module__.partition(".")[0]
        if library not in ("cupy", "cupy_backends"):
            return
        if isinstance(error, MemoryError) or getattr(error, "status", None) == _OUT_OF_MEMORY:
            raise InsufficientMemoryError(f"the card's memory is full ({_first_line(error)})") from error
        raise DeviceError(f"the card failed: {_first_line(error)}") from error


_DEVICE_ERRORS = _DeviceErrors()


def device_errors() -> _DeviceErrors:
    """Turn what CuPy raises inside into DeviceError, and a full card into InsufficientMemoryError."""
    return _DEVICE_ERRORS


def find_problem(index: int = 0) -> str | None:
    """Why card `index` cannot be used, in one line, or None. Compilers are not checked: a warm start needs none."""
    return _problem(environment.find_driver(), index)


def _problem(driver: environment.Driver | None, index: int) -> str | None:
    if driver is None:
        return "there is no NVIDIA driver on this machine"
    return _card_problem(driver, index) or _cupy_problem(driver.cuda_version)


def _card_problem(driver: environment.Driver, index: int) -> str | None:
    if driver.problem:
        return driver.problem
    if driver.cuda_version < environment.MIN_CUDA_VERSION:
        need = _dotted(environment.MIN_CUDA_VERSION)
        return f"the NVIDIA driver is for CUDA {_dotted(driver.cuda_version)}; install one for CUDA {need} or newer"
    if not driver.cards:
        hidden = "; CUDA_VISIBLE_DEVICES is set" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        return f"the NVIDIA driver sees no card{hidden}"
    if not 0 <= index < len(driver.cards):
        numbers = "only card 0" if len(driver.cards) == 1 else f"cards 0 to {len(driver.cards) - 1}"
        return f"there is no card {index}, the NVIDIA driver sees {numbers}"
    card = driver.cards[index]
    if card.compute_capability < environment.MIN_COMPUTE_CAPABILITY:
        have, need = _dotted(card.compute_capability), _dotted(environment.MIN_COMPUTE_CAPABILITY)
        return f"card {index}, {card.name}, has compute capability {have}; {need} or more (Ampere) is needed"
    return None


def _cupy_problem(cuda_version: tuple[int, int]) -> str | None:
    found = environment.cupy_distributions()
    install = install_command(f"llmcli[cuda{13 if cuda_version >= (13, 0) else 12}]")
    if not found:
        return f"CuPy is not installed; {install}"
    if len(found) > 1:
        return f"{' and '.join(found)} overwrite each other; pip uninstall {' '.join(found)}, then {install}"
    if "cupy-cuda13x" in found and cuda_version < (13, 0):
        version = _dotted(cuda_version)
        return f"cupy-cuda13x cannot use a driver for CUDA {version}; pip uninstall cupy-cuda13x, then {install}"
    return _import_problem()


@functools.cache
def _import_problem() -> str | None:
    try:
        environment.prepare_cupy()
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # a broken installation fails in as many ways as there are libraries
        return f"CuPy does not start: {_first_line(error)}"
    return None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
