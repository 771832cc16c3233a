"""A card as `plan` and `bench` see it, in this machine or not. Nothing here needs CuPy."""

from __future__ import annotations

from llmcli.checkpoint.model import Model
from llmcli.kernels.device import Device
from llmcli.measure.plan import MemoryUse
from llmcli.measure.subject import Subject, TargetPlan
from llmcli.runners.base import MAX_ROWS
from llmcli.runners.cuda.matrices import plan_matrices
from llmcli.runners.cuda.memory import PREFILL_CHUNKS, MemoryPlan, fit_memory, fitting_context
from llmcli.runners.cuda.predict import CardPredictor, Rates
from llmcli.runners.cuda.stored import StoredModel

_TYPICAL_MULTIPROCESSORS = 132  # of a card that is not here; a part of the workspace grows with them


class CardTarget:
    """A card; one that is not here is given by its memory and rates."""

    def __init__(
        self,
        description: str,
        dtype: str,
        kv_cache: str,
        rates: Rates,
        available_bytes: int,
        device: Device | None = None,
    ):
        self.description = description
        self.read_bytes = rates.read_bytes
        self._dtype = dtype
        self._kv_cache = kv_cache
        self._rates = rates
        self._available_bytes = available_bytes
        self._device = device
        self._num_multiprocessors = _TYPICAL_MULTIPROCESSORS if device is None else device.num_multiprocessors

    def plan(self, subject: Subject, *, context: int, num_rows: int | None) -> TargetPlan:
        """See `Target`."""
        stored = StoredModel.of_model(subject.model, self._dtype, self._kv_cache)
        plan = fit_memory(
            stored,
            subject.full_name,
            max_seq_len=context,
            num_rows=MAX_ROWS if num_rows is None else num_rows,
            allows_fewer_rows=num_rows is None,
            available=self._available_bytes,
            num_multiprocessors=self._num_multiprocessors,
        )
        largest = fitting_context(
            stored,
            num_rows=plan.num_rows,
            available=self._available_bytes,
            chunk_tokens=PREFILL_CHUNKS[-1],
            num_multiprocessors=self._num_multiprocessors,
        )
        other_bytes = plan.total_bytes - plan.weight_bytes - plan.cache_bytes
        use = MemoryUse(
            plan.weight_bytes, plan.cache_bytes, stored.cache_type, other_bytes, self._available_bytes, largest
        )
        return TargetPlan(use, self._predictor(plan), plan.num_rows, stored.precision)

    def _predictor(self, plan: MemoryPlan) -> CardPredictor:
        if self._device is None:
            return CardPredictor(plan, self._rates)
        return CardPredictor(
            plan,
            self._rates,
            num_multiprocessors=self._device.num_multiprocessors,
            shared_bytes_per_block=self._device.shared_bytes_per_block,
            can_cluster=self._device.can_cluster,
            clock_hertz=self._device.clock_hertz,
        )


def distant_card(memory_gib: float, read_gbps: float, dtype: str, kv_cache: str) -> CardTarget:
    """A card that is not in this machine, as its maker describes it."""
    rates = Rates(read_gbps * 1e9, {})
    return CardTarget(f"a card of {memory_gib:g} GiB", dtype, kv_cache, rates, int(memory_gib * 2**30))


def product_types(model: Model, dtype: str) -> list[str]:
    """The types in which a model multiplies on a card."""
    stored = StoredModel.of_model(model, dtype)
    matrices = plan_matrices(stored)
    return sorted({stored.attention_type, *(matrix.format.activation_type for matrix in matrices)})
