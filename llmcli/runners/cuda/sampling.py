"""The sampler's state on the card: every row's `Sampler`, as sample_token reads it, and the tokens it reports.

Everything is allocated once; between two calls of `set_samplers` a run depends on nothing that the host passes, so it
can be captured in a graph. Mirostat's mu moves on with each run. The host gets it with the token, so a token that is
dropped takes its mu with it: who starts again passes the mu of the last token that counts, as `Sampler.mirostat_mu`.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from llmcli.errors import DeviceError
from llmcli.kernels.device import Device, device_errors
from llmcli.kernels.sample_token import IS_PROBLEM, NUM_RESULTS, SPEC, RowLayout, sample_token
from llmcli.runners.cuda.arena import allocate, send
from llmcli.runners.cuda.packed_sampler import pack_sampler
from llmcli.sampling.candidates import Candidates, gather_candidates
from llmcli.sampling.params import SamplingParams
from llmcli.sampling.penalties import begin_suppress, eos_ban, forced_eos, logit_bias, sequence_bias
from llmcli.sampling.sampler import Sampler

_POLLS_BETWEEN_CHECKS = 10_000


class DeviceSampler:
    """The sampler chain for `num_rows` rows on one card. After construction nothing is allocated or compiled.

    Raises: InsufficientMemoryError, DeviceError
    """

    def __init__(self, device: Device, num_rows: int, vocab_size: int) -> None:
        self._device = device
        self._layout = RowLayout(vocab_size)
        device.prepare(SPEC.stem, SPEC.variants)
        shape = (num_rows, self._layout.row_bytes)
        with device_errors():
            self._state = cupy.ndarray(shape, cupy.uint8, allocate(math.prod(shape)))
            self._state.data.memset_async(0, self._state.nbytes, device.stream)
            self._results, self._results_on_card = _allocate_results(device, num_rows)
        self._has_mu = [False] * num_rows

    def set_samplers(self, rows: Sequence[int], samplers: Iterable[Sampler]) -> None:
        """Give each of `rows` its sampler, from now on, and count its steps from 1. Waits for what is under way.

        Raises: DeviceError; UsageError as `pack_sampler`
        """
        self._device.synchronize()
        layout = self._layout
        for row, sampler in zip(rows, samplers, strict=True):
            packed = pack_sampler(sampler, layout.vocab_size)
            for start, values in (
                (0, packed.header),
                (layout.bias_start, packed.bias),
                (layout.marks_start, packed.marks),
                (layout.sequences_start, packed.sequences),
                (layout.sequence_ids_start, packed.sequence_ids),
            ):
                if values is not None:
                    send(self._device, self._state[row, start : start + values.nbytes], values)
            self._results[row] = 0
            self._has_mu[row] = sampler.params.mirostat_tau != 0 and sampler.params.temperature > 0

    def enqueue(self, *, logits: Any, rows: Any, positions: Any, token_ids: Any, history: Any) -> None:
        """Launch one step; arguments as in `sample_token`."""
        sample_token(
            self._device, logits=logits, rows=rows, positions=positions, token_ids=token_ids, history=history,
            state=self._state, results=self._results_on_card,
        )  # fmt: skip

    def has_result(self, row: int, step: int) -> bool:
        """Whether the row's token of this step (from 1) has arrived. The last NUM_RESULTS are kept."""
        return int(self._results[row, 0, step % NUM_RESULTS]) >> 32 == step

    def mirostat_mu(self, row: int, step: int) -> float | None:
        """Mirostat's mu after the row's token of this step, which has arrived; None if it is off."""
        return float(self._results[row, 1, step % NUM_RESULTS].view(np.float64)) if self._has_mu[row] else None

    def wait(self, row: int, step: int, position: int) -> int:
        """Wait for the row's token of this step, and return it. `position` is the token's own, for messages.

        Raises: CheckpointError, UsageError as `llmcli.sampling.chain.choose`; DeviceError if the card failed
        """
        polls = 0
        while not self.has_result(row, step):
            polls += 1
            if polls % _POLLS_BETWEEN_CHECKS == 0:
                self._check_alive(row, step)
            time.sleep(0)
        word = int(self._results[row, 0, step % NUM_RESULTS]) & 0xFFFFFFFF
        if word & IS_PROBLEM:
            raise_problem(word & ~IS_PROBLEM, position)
        return word

    def _check_alive(self, row: int, step: int) -> None:
        with device_errors():
            is_idle = self._device.stream.done
        if is_idle and not self.has_result(row, step):
            raise DeviceError(f"the card ended its work without sampling step {step} of row {row}")


# By the number of a problem: the step that has left nothing, and what makes it leave nothing of token 0.
_BANS: dict[int, tuple[Callable[..., object], dict[str, Any]]] = {
    4: (logit_bias, {"logit_bias": {0: -np.inf}}),
    5: (sequence_bias, {"sequence_bias": (((0,), -np.inf),)}),
    6: (begin_suppress, {"begin_suppress_token_ids": frozenset({0})}),
    7: (eos_ban, {"eos_token_ids": frozenset({0}), "ignore_eos": True}),
    8: (forced_eos, {"forced_eos_token_ids": frozenset({1})}),
}


def raise_problem(problem: int, position: int) -> None:
    """Raise what the host's chain raises at `position` for a problem that sample_token reports.

    Raises: CheckpointError, UsageError
    """
    if problem <= 3:
        logit = {1: np.nan, 2: np.inf, 3: -np.inf}[problem]
        gather_candidates(np.full(1, logit, np.float32), position)
    ban, fields = _BANS[problem]
    sampler = Sampler(SamplingParams(), 0, num_prompt_tokens=position, forced_eos_position=position, **fields)
    ban(Candidates(np.zeros(1, np.int64), np.zeros(1)), sampler, range(position))


def _allocate_results(device: Device, num_rows: int) -> tuple[NDArray[np.uint64], Any]:
    """Pinned memory [num_rows, 2, NUM_RESULTS] that host and card both address, as an array for each of them."""
    shape = (num_rows, 2, NUM_RESULTS)
    num_bytes = math.prod(shape) * 8
    memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(num_bytes), 0)
    on_host: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, math.prod(shape)).reshape(shape)
    on_host[:] = 0
    unowned = cupy.cuda.UnownedMemory(memory.ptr, num_bytes, memory, device.index)
    return on_host, cupy.ndarray(shape, cupy.uint64, cupy.cuda.MemoryPointer(unowned, 0))
