"""A card made of host memory: the launchers that the CUDA runner calls, computed by numpy in float32.

It checks that the runner passes the right arrays to the right launches in the right order, on machines without a card.
It does not check kernels' code, alignment and timing: tests/kernels and the tests marked `cuda` do.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import simulated_attention  # noqa: E402
import simulated_kernels  # noqa: E402
import simulated_wide  # noqa: E402
from emulated import EmulatedDevice  # noqa: E402
from simulated_kernels import allocate, floats, on_host  # noqa: E402

from llmcli.errors import LLMCliError  # noqa: E402
from llmcli.kernels.launches import TYPICAL_CARD, CardFacts  # noqa: E402
from llmcli.runners.cuda.step.packed_sampler import pack_sampler  # noqa: E402
from llmcli.sampling.chain import Choice, choose  # noqa: E402
from llmcli.sampling.params import Sampler  # noqa: E402


class SimulatedDevice:
    """A stand-in for `Device`; copies and launches happen at once."""

    index, name, arch = 0, "Simulated Card", "sm_90"
    num_multiprocessors, l2_bytes, shared_bytes_per_block = 132, 50 * 2**20, 227 * 1024
    can_cluster, can_wgmma = True, True
    clock_hertz = 1.98e9
    uses_own = False
    own_sources: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        self.stream = SimpleNamespace(ptr=0, done=True)
        self.prepared: dict[str, set[str]] = {}

    @property
    def facts(self) -> CardFacts:
        return replace(
            TYPICAL_CARD,
            num_multiprocessors=self.num_multiprocessors,
            shared_bytes_per_block=self.shared_bytes_per_block,
            can_wgmma=self.can_wgmma,
        )

    def activate(self) -> None: ...

    def synchronize(self) -> None: ...

    def now(self) -> "SimulatedMoment":
        return SimulatedMoment(time.perf_counter())

    def record(self, run: Callable[[], None], arrays: Any) -> None:
        """Nothing to start again: each layer runs by itself."""
        run()

    def prepare_all(self, wanted: Any, on_compile: Any = None) -> None:
        self.prepared = {stem: set(names) for stem, names in wanted.items()}


@dataclass(frozen=True)
class SimulatedMoment:
    """A moment of the host."""

    seconds: float

    def seconds_until(self, later: "SimulatedMoment") -> float:
        return later.seconds - self.seconds


def send(device: Any, target: Any, source: np.ndarray) -> None:
    assert target.nbytes == source.nbytes
    assert target.flags.c_contiguous
    raw = np.frombuffer(np.ascontiguousarray(source).tobytes(), np.uint8)
    on_host(target.reshape(-1)).view(np.uint8)[:] = raw


def copy(device: Any, target: Any, source: Any) -> None:
    if isinstance(device, SimulatedDevice):
        on_host(target)[:] = on_host(source)


def copy_blocks(device: Any, target: Any, source: Any, num_bytes: int) -> None:
    for one, other in zip(target, source, strict=True):
        raw = on_host(other.reshape(-1)).view(np.uint8)[:num_bytes]
        on_host(one.reshape(-1)).view(np.uint8)[:num_bytes] = raw


def fetch(device: Any, source: Any) -> np.ndarray:
    return on_host(source).copy()


class Event:
    def synchronize(self) -> None: ...

    def record(self, stream: Any) -> None: ...


class SimulatedMailbox:
    def __init__(self, device: Any, half_bytes: int): ...

    def send(self, target: Any, source: np.ndarray) -> None:
        send(None, target, source)


class SimulatedSampler:
    """A stand-in for `DeviceSampler`, with the host's chain. A token arrives when its run is queued."""

    def __init__(self, device: Any, vocab_size: int, mailbox: Any, token_ids: Any, history: Any):
        self._vocab_size, self._token_ids, self._history = vocab_size, token_ids, history
        self._samplers: dict[int, Sampler] = {}
        self._masks: dict[int, np.ndarray | None] = {}
        self._results: dict[tuple[int, int], Choice | LLMCliError] = {}
        self._num_runs: Counter[int] = Counter()
        self._num_counted: Counter[int] = Counter()
        self._moved_to: dict[int, int] = {}  # where each row's last run wrote its token; -1 if nowhere

    def set_sampler(self, slot: int, sampler: Sampler) -> None:
        pack_sampler(sampler, self._vocab_size)  # for its refusals
        self._samplers[slot] = sampler
        self._masks[slot] = None

    def allow(self, slot: int, mask: np.ndarray | None) -> None:
        self._masks[slot] = None if mask is None else mask.copy()

    def allow_all(self, masks: dict[int, np.ndarray]) -> None:
        for slot, mask in masks.items():
            self.allow(slot, mask)

    def allow_any(self, slots: Sequence[int]) -> None:
        self._masks.update(dict.fromkeys(slots))

    def num_runs(self, slot: int) -> int:
        return self._num_counted[slot]

    def count_run(self, slot: int) -> int:
        self._num_counted[slot] += 1
        return self._num_counted[slot]

    def enqueue(self, *, logits: Any, rows: Any, positions: Any, next_row: Any = None, draft: Any = None) -> None:
        token_ids = self._token_ids
        self._choose(logits, rows, positions, token_ids, self._history)
        if next_row is not None:
            row, position = int(on_host(rows)[0]), int(on_host(positions)[0])
            is_right = row >= 0 and self._moved_to[row] == position and on_host(token_ids)[row] == on_host(draft)[0]
            if not is_right:
                on_host(next_row)[0] = -1

    def _choose(self, logits: Any, rows: Any, positions: Any, token_ids: Any, history: Any) -> None:
        for lane, row in enumerate(on_host(rows).tolist()):
            if row < 0:  # an unused lane
                continue
            self._num_runs[row] += 1
            self._moved_to[row] = -1
            run = self._num_runs[row]
            position = int(on_host(positions)[lane]) + 1
            tokens = on_host(history)[row]
            try:
                choice = choose(
                    floats(logits[lane]), tokens[:position].tolist(), self._samplers[row], mask=self._masks[row]
                )
            except LLMCliError as error:
                self._results[row, run] = error
                continue
            self._results[row, run] = choice
            self._samplers[row] = replace(self._samplers[row], mirostat_mu=choice.mirostat_mu)
            if position < len(tokens):  # a full row's token is not stored
                tokens[position] = on_host(token_ids)[row] = choice.token_id
                on_host(positions)[lane] = self._moved_to[row] = position

    def choice(self, slot: int, run: int, position: int, *, queued_at: float | None = None) -> Choice:
        result = self._results[slot, run]
        if isinstance(result, LLMCliError):
            raise result
        return result

    def choices(self, runs: Sequence[tuple[int, int, int]]) -> list[Choice | LLMCliError]:
        return [self._results[slot, run] for slot, run, _ in runs]


class EmulatedCard(SimulatedDevice):
    """One whose launches run the kernels themselves, compiled for the CPU when they are first launched."""

    def __init__(self, kernels: EmulatedDevice):
        super().__init__()
        self._kernels = kernels

    def launch(self, stem: str, name: str, *, overlaps: bool = False, **launch: Any) -> None:
        self._kernels.compile_name(stem, name)
        self._kernels.launch(stem, name, **launch)


def emulate(monkeypatch: pytest.MonkeyPatch, kernels: EmulatedDevice) -> EmulatedCard:
    """Replace the card by kernels on the CPU; load with the returned device."""
    _replace(monkeypatch, _MEMORY, 2**40)
    return EmulatedCard(kernels)


def simulate(monkeypatch: pytest.MonkeyPatch, memory_bytes: int = 2**40) -> SimulatedDevice:
    """Replace the card by numpy in everything under llmcli.runners.cuda; load with the returned device."""
    _replace(monkeypatch, _MEMORY | _LAUNCHERS, memory_bytes)
    return SimulatedDevice()


def _replace(monkeypatch: pytest.MonkeyPatch, replacements: dict[str, Any], memory_bytes: int) -> None:
    from llmcli.runners.cuda.load import model as load
    from llmcli.runners.cuda.load import upload, weight_pieces
    from llmcli.runners.cuda.step import arena, attention, forward, lanes, products
    from llmcli.runners.cuda.step import device as card

    for module in (arena, attention, card, forward, lanes, load, products, upload, weight_pieces):
        for name in vars(module).keys() & replacements.keys():
            monkeypatch.setattr(module, name, replacements[name])
    monkeypatch.setattr(load, "free_bytes", lambda: memory_bytes)
    monkeypatch.setattr(load, "DeviceSampler", SimulatedSampler)
    monkeypatch.setattr(load, "Mailbox", SimulatedMailbox)
    monkeypatch.setattr(upload, "pinned_bytes", lambda num_bytes: np.zeros(num_bytes, np.uint8))
    monkeypatch.setattr(upload.cupy.cuda, "Event", lambda **options: Event())


def only_on_device(operation: Callable[..., Any]) -> Callable[..., Any]:
    """A dry run computes nothing."""

    @functools.wraps(operation)
    def call(device: Any, *inputs: Any, **arguments: Any) -> None:
        if isinstance(device, SimulatedDevice):
            operation(device, *inputs, **arguments)

    return call


_KERNELS = {
    simulated_kernels: "repack repack_scales lift_scales repack_zero_points embedding gather_columns gemv gemv_float",
    simulated_wide: "stage_wide gather_image gemm_wide gemm_wide_swiglu add_parts",
    simulated_attention: "append_tokens attention_prefill attention_decode attention_rows attention_span",
}
_MEMORY: dict[str, Any] = {function.__name__: function for function in (allocate, send, copy, copy_blocks, fetch)}
_LAUNCHERS: dict[str, Any] = {
    name: only_on_device(getattr(module, name)) for module, names in _KERNELS.items() for name in names.split()
}
