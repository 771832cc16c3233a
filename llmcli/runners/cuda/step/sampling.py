"""The sampler's state on the card: every row's `Sampler`, as sample_token reads it, and the tokens it reports.

Everything is allocated once. A run takes no value from the host, so it can be captured in a graph. A slot counts its
runs without a break over all its rows, so an earlier row's result is never taken for a later row's.
Each run updates mirostat's mu. The host gets mu with the token. To continue after an earlier token, pass that token's
mu as `Sampler.mirostat_mu`. `WorkMasks` has the masks of a work's choices.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import cupy
import numpy as np
from numpy.typing import NDArray

from llmcli.errors import CheckpointError, DeviceError, LLMCliError, UsageError
from llmcli.kernels.device import Device, device_errors
from llmcli.kernels.sample_token import IS_PROBLEM, NUM_RESULTS, SPEC, RowLayout, sample_token
from llmcli.runners.base import Masks
from llmcli.runners.cuda.step.arena import Mailbox, allocate
from llmcli.runners.cuda.step.packed_sampler import pack_sampler
from llmcli.sampling.candidates import Candidates, TokenMask, gather_candidates, mask_words, schema
from llmcli.sampling.chain import Choice
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.sampling.penalties import begin_suppress, eos_ban, forced_eos, logit_bias, sequence_bias


class WorkMasks:
    """The masks of a work's choices, made on first use, as the card works meanwhile; None for a work without masks.

    Attributes: error: what they raised; then no choice is allowed anything
    """

    def __init__(self, masks: Masks | None, vocab_size: int):
        self.error: LLMCliError | None = None
        self._make = masks
        self._masks: NDArray[np.uint32] | None = None
        self._num_words = mask_words(vocab_size)

    def mask(self, choice: int) -> TokenMask | None:
        """The mask of a choice; None if any token is allowed."""
        if self._make is None or self.error is not None:
            return None if self._make is None else np.zeros(self._num_words, np.uint32)
        try:
            self._masks = self._make() if self._masks is None else self._masks
        except LLMCliError as error:
            self.error = error
            return self.mask(choice)
        mask: TokenMask = self._masks[choice]
        return mask


_POLLS_BETWEEN_CHECKS = 10_000
# The host must be awake when the choices after drafts come, as it then queues the next step. Until then it dozes for
# this share of the time that such a step took last: a server's other threads need Python's lock.
_DOZING_SHARE = 0.75


class SamplerRun(NamedTuple):
    """A run of a slot's sampler: its number, and the position of the token that it chooses, for messages."""

    slot: int
    number: int
    position: int


class DeviceSampler:
    """The sampler chain on one card, with a slot for each row. Nothing is allocated or compiled after construction.

    Shapes: token_ids, history as in `sample_token`
    Raises: InsufficientMemoryError, DeviceError
    """

    def __init__(self, device: Device, vocab_size: int, mailbox: Mailbox, token_ids: Any, history: Any) -> None:
        num_rows = len(token_ids)
        self._device, self._token_ids, self._history = device, token_ids, history
        self._layout = RowLayout(vocab_size)
        device.prepare(SPEC.stem, SPEC.variants)
        shape = (num_rows, self._layout.row_bytes)
        with device_errors():
            self._state = cupy.ndarray(shape, cupy.uint8, allocate(math.prod(shape)))
            self._state.data.memset_async(0, self._state.nbytes, device.stream)
            self._results, self._results_on_card = _allocate_results(device, num_rows)
        self._mailbox = mailbox
        self._has_mu = np.zeros(num_rows, np.bool_)
        self._step_seconds = 0.0  # from queueing the latest step waited for awake, to its last choice
        self._masked: set[int] = set()  # slots that use their masks, according to their headers
        self._num_runs = [0] * num_rows
        self._marks: list[NDArray[np.uint8] | None] = [None] * num_rows  # each slot's marks, as the card has them

    def set_sampler(self, slot: int, sampler: Sampler) -> None:
        """Give a slot its sampler, from its next run on.

        Raises: UsageError as `pack_sampler`
        """
        packed = pack_sampler(sampler, self._layout.vocab_size)
        packed.header["step"] = self._num_runs[slot]
        marks, held = packed.marks, self._marks[slot]
        if marks is not None and held is not None and np.array_equal(marks, held):
            packed = packed._replace(marks=None)  # the usual case: rows of one model have the same end tokens
        elif marks is not None:
            self._marks[slot] = marks
        for start, values in packed.places(self._layout):
            self._mailbox.send(self._state[slot, start : start + values.nbytes], values)
        self._has_mu[slot] = sampler.params.mirostat_tau != 0 and sampler.params.temperature > 0
        self._masked.discard(slot)

    def allow(self, slot: int, mask: TokenMask | None) -> None:
        """Let a slot choose what the mask allows, from its next run on; without a mask, any token.

        The copy of the mask is queued after all other work, so the card has it in time.
        """
        if mask is None:
            self.allow_any([slot])
        else:
            self.allow_all({slot: mask})

    def allow_any(self, slots: Sequence[int]) -> None:
        """Let each slot choose any token, from its next run on."""
        for slot in sorted(self._masked.intersection(slots)):
            self._send_use(slot, uses_mask=False)
            self._masked.remove(slot)

    def allow_all(self, masks: Mapping[int, TokenMask]) -> None:
        """Let each slot choose what its mask allows, as `allow` does. Adjacent slots share one copy."""
        for slot in sorted(masks.keys() - self._masked):
            self._send_use(slot, uses_mask=True)
            self._masked.add(slot)
        places = slice(self._layout.mask_start, self._layout.mask_start + mask_words(self._layout.vocab_size) * 4)
        slots = sorted(masks)
        # Adjacent slots have the same distance from their index.
        for _, run in groupby(enumerate(slots), lambda pair: pair[1] - pair[0]):
            some = [slot for _, slot in run]
            self._mailbox.send_rows(self._state[some[0] : some[-1] + 1, places], [masks[slot] for slot in some])

    def _send_use(self, slot: int, *, uses_mask: bool) -> None:
        start, flag = self._layout.uses_mask_start, np.array([uses_mask], np.int32)
        self._mailbox.send(self._state[slot, start : start + flag.nbytes], flag)

    def num_runs(self, slot: int) -> int:
        """The number of a slot's latest counted run."""
        return self._num_runs[slot]

    def count_run(self, slot: int) -> int:
        """Count a run that is queued for a slot, and return its number."""
        self._num_runs[slot] += 1
        return self._num_runs[slot]

    def choice(self, slot: int, run: int, position: int, *, queued_at: float | None = None) -> Choice:
        """Wait for a run's choice. `position` is the chosen token's, for messages.

        With `queued_at`, when its step was queued by `time.perf_counter`, the host is awake when the choice comes.
        Raises: CheckpointError, UsageError as `llmcli.sampling.chain.choose`; DeviceError if the card failed
        """
        token_id = self.wait(slot, run, position, queued_at=queued_at)
        mu = float(self._results[slot, 1, run % NUM_RESULTS].view(np.float64)) if self._has_mu[slot] else None
        return Choice(token_id, None, mu)

    def choices(self, runs: Sequence[SamplerRun]) -> list[Choice | LLMCliError]:
        """Wait for the choices of runs; one that failed gives its error, as `choice` raises it.

        They are read together: one by one, the many of a step would take the host longer than the rest of the step.
        Raises: DeviceError if the card failed
        """
        slots, numbers, _ = np.fromiter(chain.from_iterable(runs), np.int64, 3 * len(runs)).reshape(-1, 3).T
        places, expected = (slots, 0, numbers % NUM_RESULTS), numbers.astype(np.uint64)
        words = self._results[places]
        while len(late := np.flatnonzero(words >> np.uint64(32) != expected)):
            last = runs[late[-1]]
            self._wait_for(last.slot, last.number)
            words = self._results[places]
        tokens = (words & np.uint64(0xFFFFFFFF)).tolist()
        choices: list[Choice | LLMCliError] = [Choice(token_id, None, None) for token_id in tokens]
        for place in np.flatnonzero((words & np.uint64(IS_PROBLEM) != 0) | self._has_mu[slots]).tolist():
            try:
                choices[place] = self.choice(*runs[place])
            except (CheckpointError, UsageError) as error:
                choices[place] = error
        return choices

    def enqueue(self, *, logits: Any, rows: Any, positions: Any, next_row: Any = None, draft: Any = None) -> None:
        """Launch one step; arguments as in `sample_token`."""
        sample_token(
            self._device, logits=logits, rows=rows, positions=positions, token_ids=self._token_ids,
            history=self._history, state=self._state, results=self._results_on_card, next_row=next_row, draft=draft,
        )  # fmt: skip

    def has_result(self, slot: int, run: int) -> bool:
        """Whether a run's choice has arrived. The last NUM_RESULTS are kept."""
        return int(self._results[slot, 0, run % NUM_RESULTS]) >> 32 == run

    def wait(self, slot: int, run: int, position: int, *, queued_at: float | None = None) -> int:
        """Wait for a run's token, and return it; `queued_at` as in `choice`.

        Raises: as `choice`
        """
        if queued_at is None:
            self._wait_for(slot, run)
        else:
            self._wait_for(slot, run, dozes_until=queued_at + _DOZING_SHARE * self._step_seconds)
            self._step_seconds = time.perf_counter() - queued_at
        word = int(self._results[slot, 0, run % NUM_RESULTS]) & 0xFFFFFFFF
        if word & IS_PROBLEM:
            raise_problem(word & ~IS_PROBLEM, position)
        return word

    def _wait_for(self, slot: int, run: int, dozes_until: float = math.inf) -> None:
        """Poll for a run's result. A doze, `time.sleep(0)`, takes 50 to 80 us: Linux ends a timer that late."""
        polls = 0
        while not self.has_result(slot, run):
            polls += 1
            if polls % _POLLS_BETWEEN_CHECKS == 0:
                self._check_alive(slot, run)
            if sys.platform == "win32" or time.perf_counter() < dozes_until:
                time.sleep(0)
            else:
                os.sched_yield()  # lets other threads run; returns at once if there are none

    def _check_alive(self, slot: int, run: int) -> None:
        with device_errors():
            is_idle = self._device.stream.done
        if is_idle and not self.has_result(slot, run):
            raise DeviceError(f"the card ended its work without run {run} of the sampler in place {slot}")


# For each problem: the host's step that left no token, and sampler fields with which that step leaves no token of a
# vocabulary of one.
_BANS: dict[int, tuple[Callable[..., object], dict[str, Any]]] = {
    5: (logit_bias, {"logit_bias": {0: -np.inf}}),
    6: (sequence_bias, {"sequence_bias": (((0,), -np.inf),)}),
    7: (begin_suppress, {"begin_suppress_token_ids": frozenset({0})}),
    8: (eos_ban, {"eos_token_ids": frozenset({0}), "ignore_eos": True}),
    9: (forced_eos, {"forced_eos_token_ids": frozenset({1})}),
}


def raise_problem(problem: int, position: int) -> None:
    """Raise the error of the host's chain at `position` for a problem that sample_token reported.

    Raises: CheckpointError, UsageError
    """
    if problem <= 3:
        logit = {1: np.nan, 2: np.inf, 3: -np.inf}[problem]
        gather_candidates(np.full(1, logit, np.float32), position)
    one_token = Candidates(np.zeros(1, np.int64), np.zeros(1))
    if problem == 4:
        schema(one_token, np.zeros(mask_words(1), np.uint32), position)
    ban, fields = _BANS[problem]
    sampler = Sampler(SamplingParams(), 0, num_prompt_tokens=position, forced_eos_position=position, **fields)
    ban(one_token, sampler, range(position))


def _allocate_results(device: Device, num_rows: int) -> tuple[NDArray[np.uint64], Any]:
    """Allocate pinned memory [num_rows, 2, NUM_RESULTS]; return it as an array of the host and one of the card."""
    shape = (num_rows, 2, NUM_RESULTS)
    num_bytes = math.prod(shape) * 8
    memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(num_bytes), 0)
    on_host: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, math.prod(shape)).reshape(shape)
    on_host[:] = 0
    unowned = cupy.cuda.UnownedMemory(memory.ptr, num_bytes, memory, device.index)
    return on_host, cupy.ndarray(shape, cupy.uint64, cupy.cuda.MemoryPointer(unowned, 0))
