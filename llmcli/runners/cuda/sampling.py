"""The sampler's state on the card: what `Sampler` says of each row, packed for sample_token, and the tokens it reports.

Everything is allocated once; between two calls of `set_samplers` a run depends on nothing that the host passes, so it
can be captured in a graph.
"""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
from numpy.typing import NDArray

from llmcli.errors import DeviceError
from llmcli.kernels.device import Device, device_errors
from llmcli.kernels.sample_token import (
    IS_BREAKER,
    IS_END,
    IS_PROBLEM,
    NUM_DRY_AMOUNTS,
    NUM_RESULTS,
    ROW_SAMPLER,
    SPEC,
    RowLayout,
    sample_token,
)
from llmcli.runners.cuda.arena import allocate, send
from llmcli.sampling.candidates import Candidates, gather_candidates
from llmcli.sampling.params import SamplingParams
from llmcli.sampling.penalties import eos_ban, logit_bias
from llmcli.sampling.sampler import Sampler

# What the card counts in 32 bits; no window, limit or number of tokens that large differs from this.
_LARGEST_COUNT = 2**31 - 1 - NUM_DRY_AMOUNTS
_POLLS_BETWEEN_CHECKS = 10_000


class PackedSampler(NamedTuple):
    """A `Sampler` as sample_token reads it. Without bias or marked tokens there is no array of them.

    Shapes: header [1] ROW_SAMPLER; bias [vocab_size] float64; marks [vocab_size] uint8
    """

    header: NDArray[np.void]
    bias: NDArray[np.float64] | None
    marks: NDArray[np.uint8] | None


def pack_sampler(sampler: Sampler, vocab_size: int) -> PackedSampler:
    """Pack a sampler for a vocabulary; token ids outside it are left out."""
    params = sampler.params
    header = np.zeros(1, ROW_SAMPLER)
    for name in (
        "temperature", "top_p", "typical_p", "xtc_probability", "xtc_threshold",
        "repetition_penalty", "presence_penalty", "frequency_penalty",
    ):  # fmt: skip
        header[name] = getattr(params, name)
    for name in ("top_k", "penalty_window", "min_new_tokens", "dry_window", "dry_allowed_length"):
        header[name] = min(getattr(params, name), _LARGEST_COUNT)
    header["log_min_p"] = np.log(params.min_p) if params.min_p > 0 else -np.inf
    if params.dry_multiplier != 0:
        with np.errstate(over="ignore"):  # the kernel clips, as the host does
            header["dry_amounts"] = -params.dry_multiplier * np.power(params.dry_base, np.arange(NUM_DRY_AMOUNTS))
    header["uses_dry"] = params.dry_multiplier != 0
    header["seed"] = sampler.seed
    header["sample_index"] = sampler.sample_index
    header["num_prompt_tokens"] = min(sampler.num_prompt_tokens, _LARGEST_COUNT)
    header["ignores_ends"] = sampler.ignore_eos

    biased = [token_id for token_id in sampler.logit_bias if token_id < vocab_size]
    bias = np.zeros(vocab_size) if biased else None
    if bias is not None:
        bias[biased] = [sampler.logit_bias[token_id] for token_id in biased]
    ends, breakers = (
        [token_id for token_id in token_ids if 0 <= token_id < vocab_size]
        for token_ids in (sampler.eos_token_ids, sampler.dry_breaker_token_ids)
    )
    marks = np.zeros(vocab_size, np.uint8)
    marks[ends] |= IS_END
    marks[breakers] |= IS_BREAKER
    header["uses_bias"] = bool(biased)
    header["uses_ends"] = bool(ends)
    # DRY reads the marks of every token, so they must be there if it is on, were there a breaker or not.
    return PackedSampler(header, bias, marks if ends or params.dry_multiplier != 0 else None)


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

    def set_samplers(self, rows: Sequence[int], samplers: Iterable[Sampler]) -> None:
        """Give each of `rows` its sampler, from now on, and count its steps from 1. Waits for what is under way.

        Raises: DeviceError
        """
        self._device.synchronize()
        for row, sampler in zip(rows, samplers, strict=True):
            packed = pack_sampler(sampler, self._layout.vocab_size)
            self._write(row, 0, packed.header)
            if packed.bias is not None:
                self._write(row, self._layout.bias_start, packed.bias)
            if packed.marks is not None:
                self._write(row, self._layout.marks_start, packed.marks)
            self._results[row] = 0

    def enqueue(self, *, logits: Any, rows: Any, positions: Any, token_ids: Any, history: Any) -> None:
        """Launch one step; arguments as in `sample_token`."""
        sample_token(
            self._device, logits=logits, rows=rows, positions=positions, token_ids=token_ids, history=history,
            state=self._state, results=self._results_on_card,
        )  # fmt: skip

    def has_result(self, row: int, step: int) -> bool:
        """Whether the row's token of this step (from 1) has arrived. The last NUM_RESULTS are kept."""
        return int(self._results[row, step % NUM_RESULTS]) >> 32 == step

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
        word = int(self._results[row, step % NUM_RESULTS]) & 0xFFFFFFFF
        if word & IS_PROBLEM:
            raise_problem(word & ~IS_PROBLEM, position)
        return word

    def _check_alive(self, row: int, step: int) -> None:
        with device_errors():
            is_idle = self._device.stream.done
        if is_idle and not self.has_result(row, step):
            raise DeviceError(f"the card ended its work without sampling step {step} of row {row}")

    def _write(self, row: int, start: int, values: NDArray[Any]) -> None:
        send(self._device, self._state[row, start : start + values.nbytes], values)


def raise_problem(problem: int, position: int) -> None:
    """Raise what the host's chain raises at `position` for a problem that sample_token reports.

    Raises: CheckpointError, UsageError
    """
    history = range(position)
    if problem <= 3:
        logit = {1: np.nan, 2: np.inf, 3: -np.inf}[problem]
        gather_candidates(np.full(1, logit, np.float32), position)
    only_one = Candidates(np.zeros(1, np.int64), np.zeros(1))
    if problem == 4:
        logit_bias(only_one, Sampler(SamplingParams(), 0, logit_bias={0: -np.inf}), history)
    eos_ban(only_one, Sampler(SamplingParams(), 0, eos_token_ids=frozenset({0}), ignore_eos=True), history)


def _allocate_results(device: Device, num_rows: int) -> tuple[NDArray[np.uint64], Any]:
    """Pinned memory [num_rows, NUM_RESULTS] that host and card both address, as an array for each of them."""
    shape = (num_rows, NUM_RESULTS)
    num_bytes = num_rows * NUM_RESULTS * 8
    memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(num_bytes), 0)
    on_host: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, num_rows * NUM_RESULTS).reshape(shape)
    on_host[:] = 0
    unowned = cupy.cuda.UnownedMemory(memory.ptr, num_bytes, memory, device.index)
    return on_host, cupy.ndarray(shape, cupy.uint64, cupy.cuda.MemoryPointer(unowned, 0))
