"""Which device runs a model and why, and the loading of its runner; what is slow to import comes with the load."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from llmcli.cli.terminal import OnProgress, terminal
from llmcli.errors import DeviceError, InsufficientMemoryError, UsageError
from llmcli.kernels.ahead import start_card
from llmcli.kernels.environment import find_driver
from llmcli.timeline import IMPORTS, Timeline

if TYPE_CHECKING:
    from llmcli.checkpoint.model import Model
    from llmcli.runners.base import Runner

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHES = ("auto", "int8")
CPU_DTYPES = {"auto": "float32", "float32": "float32", "bfloat16": "bfloat16"}

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")

# Address space that importing torch takes (2.13: 483 MiB), and some to spare.
_TORCH_MIB = 512

# Rows decoded in one batch: one pass over the weights serves them all.
MAX_BATCH_ROWS = 8


@dataclass(frozen=True)
class RunnerOptions:
    """How the model is to be run, as the flags say it."""

    device: str
    dtype: str
    num_threads: int | None
    kv_cache: str = "auto"

    def __post_init__(self) -> None:
        """Refuse unknown names, and a card that was asked for and cannot be used."""
        if not _DEVICE.fullmatch(self.device):
            raise UsageError(f"--device is {self.device!r}, expected auto, cpu, cuda or cuda:N")
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
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

        Where `auto` finds a driver but no card it can use, a line says why.
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

    @property
    def with_usual_cache(self) -> RunnerOptions:
        """The same device with the usual KV cache; what there was to say about the choice is not said again."""
        device = "cpu" if self.card is None else f"cuda:{self.card}"
        return replace(self, device=device, kv_cache="auto")

    @property
    def note(self) -> str:
        """Why `auto` takes the device it takes; what has had its own line is not said again."""
        return " (no NVIDIA driver)" if self.device == "auto" and not has_driver() else ""


def start_device(device: str, timeline: Timeline | None = None) -> None:
    """Begin to start the card that `--device` may mean, if any, so that it is ready sooner; says nothing."""
    if _DEVICE.fullmatch(device) and device != "cpu":
        start_card(int(device.partition(":")[2] or 0), timeline or Timeline())


def has_driver() -> bool:
    """Whether this machine has an NVIDIA driver at all; asking costs next to nothing where it has none."""
    return find_driver() is not None


def _card_problem(index: int) -> str | None:
    """Why a card cannot be used, None if it can."""
    if not has_driver():
        return "there is no NVIDIA driver"
    from llmcli.kernels.device import find_problem

    return find_problem(index)


def require_room_for_torch() -> None:
    """Refuse a `ulimit -v` under which importing torch ends the process, by C++ code that no one can catch.

    Raises: InsufficientMemoryError.
    """
    if sys.platform == "win32" or "torch" in sys.modules:
        return
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    import psutil

    left_mib = (limit - psutil.Process().memory_info().vms) // 2**20
    if left_mib < _TORCH_MIB:
        raise InsufficientMemoryError(
            f"torch takes {_TORCH_MIB} MiB of address space and `ulimit -v` leaves {max(left_mib, 0)} MiB; "
            "raise the limit"
        )


def load_runner(
    model: Model,
    options: RunnerOptions,
    context: int,
    num_samples: int,
    on_progress: OnProgress,
    timeline: Timeline | None = None,
) -> Runner:
    """Read the weights to where the options say.

    A card gets a row for each of `num_samples`, as far as its memory and one batch allow.
    Raises: LLMCliError and its subclasses
    """
    timeline = timeline or Timeline()
    with timeline.part("driver and CuPy"):
        card = options.card
    if card is None:
        require_room_for_torch()
        with timeline.part("import of torch"):
            from llmcli.runners.torch.load import load

        return load(
            model,
            max_seq_len=context,
            dtype=CPU_DTYPES[options.dtype],
            kv_cache=options.kv_cache,
            num_threads=options.num_threads,
            on_progress=on_progress,
            timeline=timeline,
        )
    with timeline.part(IMPORTS):
        from llmcli.runners.cuda.load import load as load_on_card

    return load_on_card(
        model,
        card=card,
        max_seq_len=context,
        num_rows=min(num_samples, MAX_BATCH_ROWS),
        allows_less=True,
        dtype=options.dtype,
        kv_cache=options.kv_cache,
        on_compile=lambda count: terminal.info(f"compiling {count} kernels for this card, once"),
        on_progress=on_progress,
        timeline=timeline,
    )
