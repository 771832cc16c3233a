"""A card made of host memory: the launchers that the CUDA runner calls, computed by numpy in float32.

It shows that the runner puts the right arrays into the right launches in the right order, on machines without a card.
What kernels do inside, alignment and timing it does not show: tests/kernels and the tests marked `cuda` do.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import simulated_kernels  # noqa: E402
from simulated_kernels import allocate, floats, on_host, store  # noqa: E402

from llmcli.errors import LLMCliError  # noqa: E402
from llmcli.runners.cuda.packed_sampler import pack_sampler  # noqa: E402
from llmcli.sampling.chain import Choice, choose  # noqa: E402
from llmcli.sampling.sampler import Sampler  # noqa: E402


class SimulatedDevice:
    """Stands for `Device`; copies and launches happen at once."""

    index, name, arch = 0, "Simulated Card", "sm_90"
    num_multiprocessors, l2_bytes, shared_bytes_per_block, can_cluster = 132, 50 * 2**20, 227 * 1024, True
    clock_hertz = 1.98e9

    def __init__(self) -> None:
        self.stream = SimpleNamespace(ptr=0, done=True)
        self.prepared: dict[str, set[str]] = {}

    def activate(self) -> None: ...

    def synchronize(self) -> None: ...

    def record(self, run: Callable[[], None], arrays: Any) -> None:
        """Nothing to start again: each layer runs by itself."""
        run()

    def prepare_all(self, wanted: Any, on_compile: Any = None) -> None:
        self.prepared = {stem: set(names) for stem, names in wanted.items()}


def send(device: Any, target: Any, source: np.ndarray) -> None:
    assert target.nbytes == source.nbytes
    assert target.flags.c_contiguous
    raw = np.frombuffer(np.ascontiguousarray(source).tobytes(), np.uint8)
    on_host(target.reshape(-1)).view(np.uint8)[:] = raw


def copy(device: Any, target: Any, source: Any) -> None:
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


class SimulatedLibrary:
    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def close(self) -> None: ...

    def matmul(self, *, x: Any, weight: Any, out: Any) -> None:
        store(out, floats(x) @ floats(weight).T)


class SimulatedSampler:
    """Stands for `DeviceSampler`, with the host's chain. A token arrives when its step is queued."""

    def __init__(self, device: Any, num_rows: int, vocab_size: int):
        self._vocab_size = vocab_size
        self._samplers: dict[int, Sampler] = {}
        self._results: dict[tuple[int, int], Choice | LLMCliError] = {}
        self._steps: dict[int, int] = {}

    def set_samplers(self, rows: Sequence[int], samplers: Sequence[Sampler]) -> None:
        for row, sampler in zip(rows, samplers, strict=True):
            pack_sampler(sampler, self._vocab_size)  # for what it refuses
            self._samplers[row], self._steps[row] = sampler, 0

    def enqueue(self, *, logits: Any, rows: Any, positions: Any, token_ids: Any, history: Any) -> None:
        for lane, row in enumerate(on_host(rows).tolist()):
            self._steps[row] += 1
            position = int(on_host(positions)[lane]) + 1
            tokens = on_host(history)[row]
            try:
                choice = choose(floats(logits[lane]), tokens[:position].tolist(), self._samplers[row])
            except LLMCliError as error:
                self._results[row, self._steps[row]] = error
                continue
            self._results[row, self._steps[row]] = choice
            self._samplers[row] = replace(self._samplers[row], mirostat_mu=choice.mirostat_mu)
            if position < len(tokens):  # of a full row the token is only told
                tokens[position] = on_host(token_ids)[lane] = choice.token_id
                on_host(positions)[lane] = position

    def wait(self, row: int, step: int, position: int) -> int:
        return self._choice(row, step).token_id

    def mirostat_mu(self, row: int, step: int) -> float | None:
        return self._choice(row, step).mirostat_mu

    def _choice(self, row: int, step: int) -> Choice:
        result = self._results[row, step]
        if isinstance(result, LLMCliError):
            raise result
        return result


def simulate(monkeypatch: pytest.MonkeyPatch, memory_bytes: int = 2**40) -> SimulatedDevice:
    """Put numpy in the place of the card in everything under llmcli.runners.cuda; load with the device returned."""
    from llmcli.runners.cuda import arena, decode, forward, kv_cache, load, placing, products, runner, upload

    device = SimulatedDevice()
    for module in (arena, decode, forward, kv_cache, load, placing, products, runner, upload):
        for name in vars(module).keys() & _REPLACEMENTS.keys():
            monkeypatch.setattr(module, name, _REPLACEMENTS[name])
    monkeypatch.setattr(load, "free_bytes", lambda: memory_bytes)
    monkeypatch.setattr(load, "Cublas", SimulatedLibrary)
    monkeypatch.setattr(load, "DeviceSampler", SimulatedSampler)
    monkeypatch.setattr(upload, "pinned_bytes", lambda num_bytes: np.zeros(num_bytes, np.uint8))
    monkeypatch.setattr(upload.cupy.cuda, "Event", lambda **options: Event())
    return device


def only_on_device(operation: Callable[..., Any]) -> Callable[..., Any]:
    """A dry run computes nothing."""

    @functools.wraps(operation)
    def call(device: Any, **arguments: Any) -> None:
        if isinstance(device, SimulatedDevice):
            operation(device, **arguments)

    return call


_KERNELS = (
    "repack repack_scales repack_zero_points dequantize embedding rms_norm head_norm round_rows scale_bias "
    "residual_add swiglu gemv rotary kv_append attention_prefill attention_decode gemm_packed"
)
_REPLACEMENTS = {function.__name__: function for function in (allocate, send, copy, copy_blocks, fetch)} | {
    name: only_on_device(getattr(simulated_kernels, name)) for name in _KERNELS.split()
}
