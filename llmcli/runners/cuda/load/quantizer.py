"""`CardQuantizer`: sends blocks of rows to a card and gets packed codes back, while others are read and written.

It replaces the CPU's threads in an export and gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import cupy
import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.export import PackedRows, PendingRows
from llmcli.checkpoint.export_plan import PlannedWeight
from llmcli.kernels.cache import OnCompile, say_nothing
from llmcli.kernels.device import Device, device_errors
from llmcli.kernels.quantize_rows import SPEC, CodeForm, quantize_rows
from llmcli.quantization.rounding import STORED_AS, RowErrors, steps_of_range
from llmcli.quantization.schemes import WeightScheme, packed_size
from llmcli.runners.cuda.plan.regions import BYTE, FLOAT32, INT32, STORED_DTYPES, Region, held_bytes, lay_out
from llmcli.runners.cuda.step.arena import on_card, pinned_bytes, send

WEIGHTS_PER_BLOCK = 1 << 22  # 8 MiB of 16-bit weights: far longer on the bus than any launch takes
NUM_SLOTS = 3  # one is being filled from disk, one is on the card, one is written to disk

_Bytes = npt.NDArray[np.uint8]
A = TypeVar("A")  # Region while it is planned, else an array on the card or on the host


@dataclass(frozen=True)
class _Results(Generic[A]):
    """The results for a block of [num_rows, input_size] weights; no zero points if the scheme has none."""

    packed: A
    scales: A
    squares: A
    num_saturated: A
    zero_points: A | None


@dataclass(frozen=True)
class _Slot:
    """Room for one block and its results, on the host and on the card."""

    source: _Bytes
    source_on_card: Any
    results: _Bytes
    results_on_card: Any
    is_done: Any


class CardQuantizer:
    """Quantizes blocks of the rows of `weights` on a card; memory is taken once. Used by one thread.

    `on_compile` gets the kernels compiled so far and those to compile, if any.
    Raises: InsufficientMemoryError, DeviceError
    """

    capacity = NUM_SLOTS

    def __init__(self, device: Device, weights: Iterable[PlannedWeight], on_compile: OnCompile = say_nothing):
        self._device = device
        device.activate()
        device.prepare_all({SPEC.stem: SPEC.variants}, on_compile)
        source_bytes, result_bytes = self._largest_block(weights)
        blocks = on_card(((Region((source_bytes,), BYTE), Region((result_bytes,), BYTE)),) * NUM_SLOTS)
        self._slots = [
            _Slot(
                source=pinned_bytes(source_bytes),
                source_on_card=source_on_card,
                results=pinned_bytes(result_bytes),
                results_on_card=results_on_card,
                is_done=cupy.cuda.Event(disable_timing=True),
            )
            for source_on_card, results_on_card in blocks
        ]
        self._num_buffers = 0

    def _largest_block(self, weights: Iterable[PlannedWeight]) -> tuple[int, int]:
        source_bytes = result_bytes = 1
        for weight in weights:
            if weight.scheme is not None:
                num_rows = min(self.block_rows(weight.shape[1]), weight.shape[0])
                num_weights = num_rows * weight.shape[1]
                source_bytes = max(source_bytes, num_weights * np.dtype(STORED_AS[weight.info.dtype]).itemsize)
                results = _plan_results((num_rows, weight.shape[1]), weight.scheme)
                result_bytes = max(result_bytes, held_bytes(results))
        return source_bytes, result_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait until the card is done: no copy may still run when the memory is freed."""
        self._device.synchronize()

    def block_rows(self, input_size: int) -> int:
        """How many rows of `input_size` weights make a block."""
        return max(1, WEIGHTS_PER_BLOCK // input_size)

    def buffer(self, shape: tuple[int, int], dtype: str) -> npt.NDArray[Any]:
        """Pinned memory for the next block. First take the block that it held before, by `result`."""
        slot = self._slots[self._num_buffers % NUM_SLOTS]
        self._num_buffers += 1
        stored: npt.NDArray[Any] = Region(shape, np.dtype(STORED_AS[dtype])).place(slot.source)
        return stored

    def submit(self, stored: npt.NDArray[Any], dtype: str, scheme: WeightScheme, scale_dtype: str) -> PendingRows:
        """Queue the block in the latest buffer: the copy to the card, the kernels, the copy back."""
        slot = self._slots[(self._num_buffers - 1) % NUM_SLOTS]
        # On the card, as in files, bfloat16 is kept as uint16.
        weights = Region(stored.shape, stored.dtype).place(slot.source_on_card)
        plan = _plan_results(stored.shape, scheme)
        results: _Results[Any] = lay_out(plan, slot.results_on_card)
        send(self._device, weights, stored)
        form = CodeForm(scheme.num_bits, scheme.code_range[0], scheme.offset, *steps_of_range(scheme))
        quantize_rows(
            self._device,
            weights=weights,
            form=form,
            scale_type=STORED_DTYPES[scale_dtype],
            **vars(results),
        )
        receive(self._device, slot.results, slot.results_on_card, held_bytes(plan))
        with device_errors():
            slot.is_done.record(self._device.stream)
        return _PendingBlock(slot, plan, stored.size)


@dataclass(frozen=True)
class _PendingBlock:
    slot: _Slot
    plan: _Results[Region]
    num_weights: int

    def result(self) -> PackedRows | None:
        """The block. Everything but the codes is copied, as it outlives the slot."""
        with device_errors():
            self.slot.is_done.synchronize()
        found: _Results[Any] = lay_out(self.plan, self.slot.results)
        if not np.isfinite(found.scales).all():
            return None
        return PackedRows(
            packed=found.packed.view(np.int32),
            scales=found.scales.copy(),
            zero_points=None if found.zero_points is None else found.zero_points.copy(),
            errors=RowErrors(
                error_squares=found.squares[:, 0].copy(),
                weight_squares=found.squares[:, 1].copy(),
                num_saturated=int(found.num_saturated.sum()),
                num_weights=self.num_weights,
            ),
        )


def receive(device: Device, target: _Bytes, source: Any, num_bytes: int) -> None:
    """Queue a copy of the first bytes of `source` to pinned memory. Shapes: both uint8 of at least `num_bytes`."""
    with device_errors():
        source.data.copy_to_host_async(target.ctypes.data, num_bytes, device.stream)


def _plan_results(shape: tuple[int, ...], scheme: WeightScheme) -> _Results[Region]:
    """Plan the results for a block of `shape` [num_rows, input_size]."""
    num_rows, input_size = shape
    groups = (num_rows, scheme.num_groups(input_size))
    return _Results(
        packed=Region((num_rows, packed_size(input_size, scheme.num_bits)), np.dtype(np.uint32)),
        scales=Region(groups, FLOAT32),
        squares=Region((num_rows, 2), np.dtype(np.float64)),
        num_saturated=Region((num_rows,), INT32),
        zero_points=None if scheme.is_symmetric else Region(groups, BYTE),
    )
