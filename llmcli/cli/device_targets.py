"""A card and the CPU for `plan` and `bench`.

The card may be in another machine: nothing here needs CuPy. The CPU's bandwidth is measured.
"""

from dataclasses import dataclass, field

from llmcli.checkpoint.layout import EMBEDDING
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.translation import widened
from llmcli.kernels.launches import TYPICAL_CARD, CardFacts
from llmcli.measure.plan import MemoryUse
from llmcli.measure.subject import Subject, TargetPlan
from llmcli.runners.base import MAX_ROWS
from llmcli.runners.cuda.plan.memory import PREFILL_CHUNKS, fit_memory, fitting_context, plan_memory
from llmcli.runners.cuda.plan.regions import STORED_DTYPES
from llmcli.runners.cuda.plan.stored import StoredModel, precision_of
from llmcli.runners.cuda.plan.weight_layout import plan_weights
from llmcli.runners.cuda.predict.predictor import CardPredictor, Rates
from llmcli.runners.host import memory
from llmcli.runners.host.predict import HostPredictor, HostProbes, HostRates


@dataclass
class CardTarget:
    """A card; a distant one is given by its memory and rates."""

    description: str
    dtype: str
    kv_cache: str
    rates: Rates
    available_bytes: int
    facts: CardFacts = TYPICAL_CARD
    is_here: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        self.read_bytes = self.rates.read_bytes

    def plan(self, subject: Subject, *, context: int, num_rows: int | None) -> TargetPlan:
        """See `Target`."""
        stored = StoredModel.of_model(subject.model, self.dtype, self.kv_cache)
        plan = fit_memory(
            stored,
            subject.full_name,
            max_seq_len=context,
            num_rows=self._most_rows(stored, context) if num_rows is None else num_rows,
            available=self.available_bytes,
            card=self.facts,
            is_here=self.is_here,
        )
        largest = fitting_context(
            stored,
            num_rows=plan.num_rows,
            available=self.available_bytes,
            chunk_tokens=PREFILL_CHUNKS[-1],
            card=self.facts,
        )
        other_bytes = plan.total_bytes - plan.weight_bytes - plan.cache_bytes
        use = MemoryUse(
            plan.weight_bytes, plan.cache_bytes, stored.cache_type, other_bytes, self.available_bytes, largest
        )
        predictor = CardPredictor(plan, self.rates, self.facts)
        return TargetPlan(use, predictor, plan.num_rows, stored.precision)

    def _most_rows(self, stored: StoredModel, context: int) -> int:
        """The most rows that fit with a full context, at least one."""
        low, high = 1, MAX_ROWS
        while low < high:
            middle = (low + high + 1) // 2
            plan = plan_memory(
                stored,
                max_seq_len=context,
                num_rows=middle,
                chunk_tokens=PREFILL_CHUNKS[-1],
                card=self.facts,
            )
            low, high = (middle, high) if plan.total_bytes <= self.available_bytes else (low, middle - 1)
        return low


def distant_card(name: str | None, memory_gib: float, read_gbps: float, dtype: str, kv_cache: str) -> CardTarget:
    """A card in another machine, by its maker's figures, and by its name if it is known."""
    rates = Rates(read_gbps * 1e9, {})
    num_bytes = int(memory_gib * 2**30)
    return CardTarget(name or f"a card of {memory_gib:g} GiB", dtype, kv_cache, rates, num_bytes, is_here=False)


def product_types(model: Model, dtype: str) -> list[str]:
    """The types in which a model multiplies on a card. Raises: CheckpointError as `StoredModel.of_model`"""
    stored = StoredModel.of_model(model, dtype)
    projections = plan_weights(stored, max_seq_len=1).projections
    return sorted({stored.attention_type, *("float32" if one.is_float else "float16" for one in projections)})


@dataclass
class HostTarget:
    """The CPU, computing in `dtype` what `probes` time; `asked_dtype` is the flag's value: that or `auto`.

    With `holds_floats` quantized weights are held as floats too; `widens_prompts` is as for `HostDevice`.
    """

    probes: HostProbes
    description: str
    dtype: str
    asked_dtype: str
    kv_cache: str
    holds_floats: bool = field(default=False, kw_only=True)
    widens_prompts: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._rates = HostRates(self.probes)
        self.read_bytes = self._rates.read_bytes

    def plan(self, subject: Subject, *, context: int, num_rows: int | None) -> TargetPlan:
        """See `Target`. Rows are run one after the other: more rows gain nothing."""
        model = widened(subject.model) if self.holds_floats else subject.model
        dtype, kv_cache, num_threads = self.dtype, self.kv_cache, self.probes.num_threads
        rows = 1 if num_rows is None else num_rows
        plan = memory.check_memory(
            model,
            max_seq_len=context,
            num_rows=rows,
            dtype=dtype,
            num_threads=num_threads,
            kv_cache=kv_cache,
            has_other_types=not self.holds_floats,
        )
        available = memory.available_memory(num_threads)
        largest = memory.fitting_context(model, num_rows=rows, dtype=dtype, available=available, kv_cache=kv_cache)
        cache_type = memory.cache_type_of(dtype, kv_cache)
        use = MemoryUse(plan.weight_bytes, plan.cache_bytes, cache_type, plan.workspace_bytes, available, largest)
        predictor = HostPredictor(
            model, self._rates, dtype=dtype, kv_cache=kv_cache, widens_prompts=self.widens_prompts
        )
        tensors = subject.model.tensors
        asked, stored = self.asked_dtype, STORED_DTYPES[tensors.tensors[EMBEDDING].dtype]
        schemes = (layer.scheme for layer in tensors.quantized.values())
        return TargetPlan(use, predictor, rows, precision_of(schemes, stored if asked == "auto" else asked))
