"""The CPU as `plan` and `bench` see it. Needs torch, to measure the bandwidth."""

from __future__ import annotations

from llmcli.checkpoint.model import Model
from llmcli.measure.plan import MemoryUse
from llmcli.measure.subject import Subject, TargetPlan
from llmcli.runners.cuda.stored import StoredModel
from llmcli.runners.torch import memory
from llmcli.runners.torch.precision import describe, resolve_dtype
from llmcli.runners.torch.predict import HostPredictor, measure_read_bytes


class HostTarget:
    """The CPU, which computes `model` in the type that `dtype` means for it."""

    def __init__(self, model: Model, dtype: str, kv_cache: str, num_threads: int | None):
        self._dtype = resolve_dtype(dtype, model)
        self.description = f"CPU, {describe(model, self._dtype)}"
        self.read_bytes = measure_read_bytes(num_threads)
        self._asked_dtype = dtype
        self._kv_cache = kv_cache

    def plan(self, subject: Subject, *, context: int, num_rows: int | None) -> TargetPlan:
        """See `Target`. Rows are run one after the other: more than one would gain nothing."""
        model, dtype, kv_cache = subject.model, self._dtype, self._kv_cache
        rows = 1 if num_rows is None else num_rows
        plan = memory.check_memory(model, max_seq_len=context, num_rows=rows, dtype=dtype, kv_cache=kv_cache)
        available = memory.available_memory()
        largest = memory.fitting_context(model, num_rows=rows, dtype=dtype, available=available, kv_cache=kv_cache)
        cache_type = memory.cache_type_of(dtype, kv_cache)
        use = MemoryUse(plan.weight_bytes, plan.cache_bytes, cache_type, plan.workspace_bytes, available, largest)
        predictor = HostPredictor(model, dtype=dtype, read_bytes=self.read_bytes, kv_cache=kv_cache)
        return TargetPlan(use, predictor, rows, StoredModel.of_model(model, self._asked_dtype).precision)
