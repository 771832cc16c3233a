"""How much of a card's memory a model needs, known before a byte is read, and the refusal if it does not fit.

Everything follows from a `StoredModel`, so models whose files do not exist can be planned too. Nothing here needs CuPy.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial

from llmcli.config.llama import LlamaConfig
from llmcli.errors import InsufficientMemoryError, UnsupportedModelError
from llmcli.kernels.launches import TYPICAL_CARD, CardFacts
from llmcli.kernels.sample_token import MAX_VOCAB_SIZE, RowLayout
from llmcli.quantization.schemes import WeightScheme
from llmcli.runners.base import MAX_SPAN, pages_of
from llmcli.runners.cuda.plan.regions import Region, held_bytes
from llmcli.runners.cuda.plan.staging import Staging, plan_staging
from llmcli.runners.cuda.plan.stored import CODES, StoredModel
from llmcli.runners.cuda.plan.weight_layout import Space, Weights, plan_weights
from llmcli.runners.cuda.plan.workspace import LANES_A_PASS, Cache, Workspace, num_lanes, plan_cache, plan_workspace

# Prompt tokens that run together: wide enough for the tensor cores; cut first when memory is short.
PREFILL_CHUNKS = (2048, 1024, 512, 256)

MAX_HEAD_DIM = 256

# CUDA's own overhead: modules and graphs.
RESERVED_BYTES = 256 * 2**20

_SMALLEST_USEFUL_CONTEXT = 128


@dataclass(frozen=True)
class MemoryPlan:
    """Everything a runner keeps on the card: three allocations, and the sampler's state.

    `staging` is what loading needs; it uses the workspace's memory.
    """

    stored: StoredModel
    max_seq_len: int
    num_rows: int
    num_pages: int
    chunk_tokens: int
    weights: Weights[Space]
    cache: Cache[Region]
    workspace: Workspace[Region]
    staging: Staging[Region]

    @cached_property
    def weight_bytes(self) -> int:
        """Weights and the tables that stay with them."""
        return held_bytes(self.weights)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all pages."""
        return held_bytes(self.cache)

    @cached_property
    def workspace_bytes(self) -> int:
        """Activations and logits; while weights are loaded, the same memory holds their pieces."""
        return max(held_bytes(self.workspace), held_bytes(self.staging))

    @property
    def sampler_bytes(self) -> int:
        """What sampling keeps for each row."""
        return self.num_rows * RowLayout(self.stored.config.vocab_size).row_bytes

    @property
    def total_bytes(self) -> int:
        """All of these, and CUDA's own memory."""
        return self.weight_bytes + self.cache_bytes + self.workspace_bytes + self.sampler_bytes + RESERVED_BYTES


def plan_memory(
    stored: StoredModel,
    *,
    max_seq_len: int,
    num_rows: int,
    num_pages: int | None = None,
    chunk_tokens: int | None = None,
    card: CardFacts = TYPICAL_CARD,
) -> MemoryPlan:
    """Lay everything out for such a card, without using one. Without `num_pages` all rows may be full.

    Raises: UnsupportedModelError for shapes that no kernel has
    """
    _check_shape(stored.config)
    lanes = max(num_lanes(num_rows), MAX_SPAN)
    # Lanes use the same activations: make room for all of them.
    chunk = max(min(chunk_tokens or PREFILL_CHUNKS[0], max_seq_len), lanes)
    num_pages = num_pages or num_rows * pages_of(max_seq_len)
    weights = plan_weights(stored, max_seq_len)
    return MemoryPlan(
        stored,
        max_seq_len,
        num_rows,
        num_pages,
        chunk,
        weights=weights,
        cache=plan_cache(stored, num_pages),
        workspace=plan_workspace(stored, weights, max_seq_len, num_rows, chunk, card),
        staging=plan_staging(stored, weights),
    )


def fit_memory(
    stored: StoredModel,
    where: str,
    *,
    max_seq_len: int,
    num_rows: int,
    available: int,
    allows_less: bool = False,
    chunk_tokens: int | None = None,
    card: CardFacts = TYPICAL_CARD,
    is_here: bool = True,
) -> MemoryPlan:
    """The plan with the widest prefill that fits `available` bytes. `is_here`: the card is in this machine.

    If less is allowed, rows share the pages that fit, at least those of two full rows; if even these do not fit, there
    are fewer rows.
    Raises: InsufficientMemoryError with the figures and the change that would make it fit
    """
    plan_for = partial(plan_memory, stored, max_seq_len=max_seq_len, card=card)
    chunks = (chunk_tokens,) if chunk_tokens else PREFILL_CHUNKS
    pages_of_row = pages_of(max_seq_len)
    plan = None
    for rows in _row_counts(num_rows) if allows_less else (num_rows,):
        for chunk in chunks:
            plan = plan_for(num_rows=rows, chunk_tokens=chunk)
            if plan.total_bytes <= available:
                return plan
            page_bytes = plan.cache_bytes // plan.num_pages
            num_pages = plan.num_pages - -(-(plan.total_bytes - available) // page_bytes)
            if allows_less and num_pages >= min(2, rows) * pages_of_row:
                return plan_for(num_rows=rows, num_pages=num_pages, chunk_tokens=chunk)
    assert plan is not None
    fitting_for = partial(
        fitting_context, num_rows=plan.num_rows, available=available, chunk_tokens=chunks[-1], card=card
    )
    context = fitting_for(stored)
    coded, chunk = replace(stored, kv_cache=CODES), plan.chunk_tokens
    narrow = plan_memory(coded, max_seq_len=max_seq_len, num_rows=plan.num_rows, chunk_tokens=chunk, card=card)
    if context >= _SMALLEST_USEFUL_CONTEXT:
        remedy = f"use --context {context} or less"
        if narrow.total_bytes <= available:
            remedy += f", or --kv-cache {CODES}"
    else:
        scheme = WeightScheme(4, 128)
        int4 = StoredModel.of_config(stored.config, stored_dtype="float16", scheme=scheme, kv_cache=stored.kv_cache)
        context = fitting_for(int4)
        if context < _SMALLEST_USEFUL_CONTEXT:
            remedy = "use a smaller model"
        else:
            remedy = "make it int4 with llmcli quantize --bits 4"
            remedy += f" and use --context {context} or less" if context < max_seq_len else ""
        remedy += ", or use --device cpu" if is_here else ""
    raise InsufficientMemoryError(
        f"{where} with context {max_seq_len} needs {_gib(plan.total_bytes)} of the card's memory (weights "
        f"{_gib(plan.weight_bytes)}, KV cache {_gib(plan.cache_bytes)}), {_gib(available)} is available: {remedy}"
    )


def fitting_context(
    stored: StoredModel,
    *,
    num_rows: int,
    available: int,
    chunk_tokens: int | None = None,
    card: CardFacts = TYPICAL_CARD,
) -> int:
    """The largest context that fits, up to the model's maximum; 0 if none does."""
    plan_for = partial(plan_memory, stored, num_rows=num_rows, chunk_tokens=chunk_tokens, card=card)
    low, high = 0, stored.config.max_position_embeddings
    while low < high:
        middle = (low + high + 1) // 2
        fits = plan_for(max_seq_len=middle).total_bytes <= available
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _row_counts(most: int) -> list[int]:
    """Numbers of rows to try: half as many each time, and at the end one less each time."""
    counts = []
    while most > LANES_A_PASS:
        counts.append(most)
        most = max(most // 2, LANES_A_PASS)
    return [*counts, *range(most, 0, -1)]


def _check_shape(config: LlamaConfig) -> None:
    problem = None
    if config.head_dim % 8 or config.head_dim > MAX_HEAD_DIM:
        problem = f"head_dim is {config.head_dim}, expected a multiple of 8 up to {MAX_HEAD_DIM}"
    elif config.vocab_size > MAX_VOCAB_SIZE:
        problem = f"vocab_size is {config.vocab_size}, expected at most {MAX_VOCAB_SIZE}"
    if problem is not None:
        raise UnsupportedModelError(f"{problem} on CUDA; use --device cpu")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
