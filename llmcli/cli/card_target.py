"""A card as `plan` and `bench` see it, in this machine or not. Nothing here needs CuPy."""

from __future__ import annotations

from llmcli.checkpoint.model import Model
from llmcli.kernels.card_facts import TYPICAL_CARD, CardFacts
from llmcli.measure.plan import MemoryUse
from llmcli.measure.subject import Subject, TargetPlan
from llmcli.runners.base import MAX_ROWS
from llmcli.runners.cuda.memory import PREFILL_CHUNKS, fit_memory, fitting_context, plan_memory
from llmcli.runners.cuda.predict import CardPredictor
from llmcli.runners.cuda.pricing import Rates
from llmcli.runners.cuda.stored import StoredModel
from llmcli.runners.cuda.weight_layout import plan_weights


class CardTarget:
    """A card; one that is not here is given by its memory and rates."""

    def __init__(
        self,
        description: str,
        dtype: str,
        kv_cache: str,
        rates: Rates,
        available_bytes: int,
        facts: CardFacts = TYPICAL_CARD,
        *,
        speed_first: bool = False,
        is_here: bool = True,
    ):
        self.description = description
        self.read_bytes = rates.read_bytes
        self._dtype = dtype
        self._kv_cache = kv_cache
        self._rates = rates
        self._available_bytes = available_bytes
        self._facts = facts
        self._speed_first = speed_first
        self._is_here = is_here

    def plan(self, subject: Subject, *, context: int, num_rows: int | None) -> TargetPlan:
        """See `Target`."""
        stored = StoredModel.of_model(subject.model, self._dtype, self._kv_cache)
        plan = fit_memory(
            stored,
            subject.full_name,
            max_seq_len=context,
            num_rows=self._most_rows(stored, context) if num_rows is None else num_rows,
            available=self._available_bytes,
            speed_first=self._speed_first,
            card=self._facts,
            is_here=self._is_here,
        )
        largest = fitting_context(
            stored,
            num_rows=plan.num_rows,
            available=self._available_bytes,
            chunk_tokens=PREFILL_CHUNKS[-1],
            speed_first=self._speed_first,
            card=self._facts,
        )
        other_bytes = plan.total_bytes - plan.weight_bytes - plan.cache_bytes
        use = MemoryUse(
            plan.weight_bytes, plan.cache_bytes, stored.cache_type, other_bytes, self._available_bytes, largest
        )
        predictor = CardPredictor(plan, self._rates, self._facts)
        return TargetPlan(use, predictor, plan.num_rows, stored.precision)

    def _most_rows(self, stored: StoredModel, context: int) -> int:
        """The most rows that all fit with a full context, at least one."""
        low, high = 1, MAX_ROWS
        while low < high:
            middle = (low + high + 1) // 2
            plan = plan_memory(
                stored,
                max_seq_len=context,
                num_rows=middle,
                chunk_tokens=PREFILL_CHUNKS[-1],
                speed_first=self._speed_first,
                card=self._facts,
            )
            low, high = (middle, high) if plan.total_bytes <= self._available_bytes else (low, middle - 1)
        return low


def distant_card(memory_gib: float, read_gbps: float, dtype: str, kv_cache: str) -> CardTarget:
    """A card that is not in this machine, as its maker describes it."""
    rates = Rates(read_gbps * 1e9, {})
    num_bytes = int(memory_gib * 2**30)
    return CardTarget(f"a card of {memory_gib:g} GiB", dtype, kv_cache, rates, num_bytes, is_here=False)


def product_types(model: Model, dtype: str) -> list[str]:
    """The types in which a model multiplies on a card. Raises: CheckpointError as `StoredModel.of_model`"""
    stored = StoredModel.of_model(model, dtype)
    projections = plan_weights(stored, max_seq_len=1).projections
    return sorted({stored.attention_type, *(projection.format.activation_type for projection in projections)})
