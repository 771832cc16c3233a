"""Which device runs a model and why, the loading of its runner, and how torch's threads wait for each other."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from llmcli.cli import lazy
from llmcli.cli.progress import say_compiling
from llmcli.cli.prompt import chosen_word
from llmcli.cli.terminal import OnProgress, terminal
from llmcli.errors import DeviceError, UsageError
from llmcli.kernels.environment import find_driver, start_card
from llmcli.timeline import IMPORTS, Timeline

_WAITING_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_LOAD = Path("/proc/loadavg")
# Rounds of waiting before a thread sleeps, 0.1 ms: the next work arrives by then, and waking takes as long. By
# default OpenMP waits for milliseconds; three programs on two cores then take ten times as long as in turn.
_WAITING_ROUNDS = 10_000
_LOAD_SAMPLES, _PAUSE_SECONDS = 8, 0.001

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHES = ("auto", "int8")
CPU_DTYPES = ("auto", "float32", "bfloat16")

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")


def choose_waiting(num_threads: int | None) -> None:
    """Let waiting threads sleep at once if other programs need the cores; else after a moment.

    A user's setting stays. `num_threads` will compute; None is one for each core.
    """
    if any(name in os.environ for name in _WAITING_VARIABLES):
        return
    num_cores = os.cpu_count() or 1
    is_crowded = _num_running() + (num_threads or num_cores) > num_cores
    os.environ["GOMP_SPINCOUNT"] = "0" if is_crowded else str(_WAITING_ROUNDS)


def _num_running() -> int:
    """Other threads of this machine that compute now, the median of some samples; 0 if unknown."""
    samples = []
    for _ in range(_LOAD_SAMPLES):
        try:
            samples.append(int(_LOAD.read_text().split()[3].partition("/")[0]) - 1)  # without this thread
        except (OSError, ValueError, IndexError):
            return 0
        time.sleep(_PAUSE_SECONDS)
    return sorted(samples)[_LOAD_SAMPLES // 2]


@dataclass(frozen=True)
class RunnerOptions:
    """How the model is to be run, as the flags say it. `opened` is the card, if it is open already."""

    device: str
    dtype: str
    num_threads: int | None
    kv_cache: str = "auto"
    opened: lazy.device.Device | None = None

    def __post_init__(self) -> None:
        """Refuse unknown names, and a requested card that cannot be used."""
        if not _DEVICE.fullmatch(self.device):
            raise UsageError(f"--device is {self.device!r}, expected auto, cpu, cuda or cuda:N")
        chosen_word("--dtype", self.dtype, DTYPES)
        if self.kv_cache not in KV_CACHES:
            raise UsageError(f"--kv-cache is {self.kv_cache!r}, expected {' or '.join(KV_CACHES)}")
        if self.device.startswith("cuda"):
            if (problem := _card_problem(self._named_card)) is not None:
                raise DeviceError(f"--device {self.device}: {problem}; use --device cpu")
        elif self.device == "cpu" and self.dtype not in CPU_DTYPES:
            raise UsageError(f"--dtype {self.dtype} is for CUDA; on the CPU use float32 or bfloat16")

    @property
    def _named_card(self) -> int:
        return int(self.device.partition(":")[2] or 0)

    @cached_property
    def card(self) -> int | None:
        """The card to use in the driver's order, None for the CPU.

        If `auto` finds a driver but no usable card, a line says why.
        Raises: UsageError if `auto` ends on the CPU, which lacks the dtype.
        """
        if self.device.startswith("cuda"):
            return self._named_card
        if self.device == "cpu":
            return None
        problem = _card_problem(0)
        if problem is None:
            return 0
        if self.dtype not in CPU_DTYPES:
            raise UsageError(f"--dtype {self.dtype} is for CUDA, and {problem}; use float32 or bfloat16")
        if has_driver():
            terminal.warn(f"running on the CPU: {problem}")
        return None

    def require_card(self, why: str) -> int:
        """The card to use. Raises: DeviceError if there is none; its message begins with `why`"""
        if self.card is None:
            problem = "--device cpu was given" if self.device == "cpu" else lazy.device.find_problem()
            raise DeviceError(f"{why}, and no card can be used: {problem}")
        return self.card

    def runs_on_numpy(self, model: lazy.model.Model) -> bool:
        """Whether the CPU runs the model with numpy, which imports ten times as fast as torch.

        It does so for a small model if no flag needs torch. `--dtype float32` asks for torch.
        """
        asks_nothing = (self.dtype, self.kv_cache) == ("auto", "auto") and self.num_threads in (None, 1)
        return asks_nothing and lazy.model.num_parameters(model) < lazy.memory.SMALL_PARAMETERS

    @property
    def with_usual_cache(self) -> RunnerOptions:
        """The same device with the usual KV cache; notes about the choice are not repeated."""
        device = "cpu" if self.card is None else f"cuda:{self.card}"
        return replace(self, device=device, kv_cache="auto")

    @property
    def note(self) -> str:
        """Why `auto` takes the device it takes; notes that had a line of their own are not repeated."""
        return " (no NVIDIA driver)" if self.device == "auto" and not has_driver() else ""


def start_device(device: str, timeline: Timeline | None = None) -> None:
    """Start the card that `--device` may mean, if any, ahead of its use and silently."""
    if _DEVICE.fullmatch(device) and device != "cpu":
        start_card(int(device.partition(":")[2] or 0), timeline or Timeline())


def has_driver() -> bool:
    """Whether this machine has an NVIDIA driver ; cheap to ask if it has none."""
    return find_driver() is not None


def _card_problem(index: int) -> str | None:
    """Why a card cannot be used, None if it can."""
    if not has_driver():
        return "there is no NVIDIA driver"
    return lazy.device.find_problem(index)


def prepare_for_torch(num_threads: int | None) -> None:
    """Set how its threads wait, and refuse a limit on address space that would make its import end the process.

    Raises: InsufficientMemoryError.
    """
    if "torch" in sys.modules:
        return
    choose_waiting(num_threads)
    if sys.platform != "win32":
        lazy.address_space.require_room_for_torch()


def load_runner(
    model: lazy.model.Model,
    options: RunnerOptions,
    context: int,
    num_rows: int | None,
    on_progress: OnProgress,
    timeline: Timeline | None = None,
    *,
    host_rows: int = 1,
    allows_less: bool = True,
) -> lazy.runners.Runner:
    """Read the weights onto the chosen device.

    `num_rows` is for a card; None is as many as it can use. With `allows_less` they share the memory that there is.
    `host_rows` is for the CPU, which gains little from more than one.
    Raises: LLMCliError and its subclasses
    """
    timeline = timeline or Timeline()
    with timeline.part("driver and CuPy"):
        card = options.card
    if card is None and options.runs_on_numpy(model):
        with timeline.part(IMPORTS):
            load_on_numpy = lazy.numpy_load.load
        return load_on_numpy(model, max_seq_len=context, num_rows=host_rows, on_progress=on_progress, timeline=timeline)
    if card is None:
        prepare_for_torch(options.num_threads)
        with timeline.part("import of torch"):
            load_on_torch = lazy.torch_load.load
        return load_on_torch(
            model,
            max_seq_len=context,
            num_rows=host_rows,
            dtype=options.dtype,
            kv_cache=options.kv_cache,
            num_threads=options.num_threads,
            on_compile=say_compiling,
            on_progress=on_progress,
            timeline=timeline,
        )
    with timeline.part(IMPORTS):
        load_on_card, most_rows = lazy.card_model.load, lazy.runners.MAX_ROWS
    return load_on_card(
        model,
        card=card,
        device=options.opened,
        max_seq_len=context,
        num_rows=most_rows if num_rows is None else min(num_rows, most_rows),
        allows_less=allows_less or num_rows is None,
        dtype=options.dtype,
        kv_cache=options.kv_cache,
        on_compile=say_compiling,
        on_progress=on_progress,
        timeline=timeline,
    )
