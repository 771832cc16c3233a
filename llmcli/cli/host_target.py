"""The CPU as `plan` and `bench` see it. Measures its bandwidth."""

from __future__ import annotations

from llmcli.checkpoint.layout import EMBEDDING
from llmcli.checkpoint.translation import widened
from llmcli.measure.plan import MemoryUse
from llmcli.measure.subject import Subject, TargetPlan
from llmcli.runners.cuda.regions import STORED_DTYPES
from llmcli.runners.cuda.stored import precision_of
from llmcli.runners.host import memory
from llmcli.runners.host.predict import HostPredictor, HostProbes, HostRates


class HostTarget:
    """The CPU, computing in `dtype` what `probes` time; `asked_dtype` is that or `auto`, as the flag says it.

    With `holds_floats` quantized weights are held as floats too; `widens_prompts` is as for `HostDevice`.
    """

    def __init__(
        self,
        probes: HostProbes,
        description: str,
        dtype: str,
        asked_dtype: str,
        kv_cache: str,
        *,
        holds_floats: bool = False,
        widens_prompts: bool = False,
    ):
        self.description = description
        self._rates = HostRates(probes)
        self.read_bytes = self._rates.read_bytes
        self._num_threads = probes.num_threads
        self._dtype = dtype
        self._asked_dtype = asked_dtype
        self._kv_cache = kv_cache
        self._holds_floats = holds_floats
        self._widens_prompts = widens_prompts

    def plan(self, subject: Subject, *, context: int, num_rows: int | None) -> TargetPlan:
        """See `Target`. Rows are run one after the other: more than one would gain nothing."""
        model = widened(subject.model) if self._holds_floats else subject.model
        dtype, kv_cache, num_threads = self._dtype, self._kv_cache, self._num_threads
        rows = 1 if num_rows is None else num_rows
        plan = memory.check_memory(
            model,
            max_seq_len=context,
            num_rows=rows,
            dtype=dtype,
            num_threads=num_threads,
            kv_cache=kv_cache,
            has_other_types=not self._holds_floats,
        )
        available = memory.available_memory(num_threads)
        largest = memory.fitting_context(model, num_rows=rows, dtype=dtype, available=available, kv_cache=kv_cache)
        cache_type = memory.cache_type_of(dtype, kv_cache)
        use = MemoryUse(plan.weight_bytes, plan.cache_bytes, cache_type, plan.workspace_bytes, available, largest)
        predictor = HostPredictor(
            model, self._rates, dtype=dtype, kv_cache=kv_cache, widens_prompts=self._widens_prompts
        )
        tensors = subject.model.tensors
        asked, stored = self._asked_dtype, STORED_DTYPES[tensors.tensors[EMBEDDING].dtype]
        schemes = (layer.scheme for layer in tensors.quantized.values())
        return TargetPlan(use, predictor, rows, precision_of(schemes, stored if asked == "auto" else asked))
