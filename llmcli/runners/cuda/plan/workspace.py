"""The arrays a runner works in: the KV cache of all layers, and the activations and logits. Nothing here needs CuPy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from llmcli.kernels.attention_decode import PARTIAL_EXTRA, grid_heads, max_splits
from llmcli.kernels.attention_rings import RowsPlan, SpanPlan
from llmcli.kernels.chunks import num_chunks
from llmcli.kernels.gemv import MAX_ROWS, norm_sums
from llmcli.kernels.launches import CardFacts
from llmcli.kernels.stage_wide import image_bytes, padded_inputs
from llmcli.runners.base import MAX_SPAN, PAGE_TOKENS, pages_of
from llmcli.runners.cuda.plan.regions import ARRAY_DTYPES, BYTE, FLOAT32, INT32, UINT32, Region
from llmcli.runners.cuda.plan.stored import CODES, StoredModel
from llmcli.runners.cuda.plan.weight_layout import Projection, Space, Weights, is_wide, qkv_layout

# Lanes that one pass over the weights serves. Above it the number of lanes is a multiple of it, as each needs a graph.
LANES_A_PASS = MAX_SPAN
# Lanes in one launch of attention_decode. Each needs memory for its partial sums.
ATTENTION_LANES = 32
# The fewest lanes that attention_rows serves, where a card and a cache allow it. Fewer are faster one by one.
MANY_LANES = 32
MOST_PARTS = 16  # rows whose prompts run in one chunk
# Tokens of a chunk for which the last layer may run alone: the last one of each row, in one form of gemm_narrow.
MOST_ALONE = MOST_PARTS
LOGIT_ROWS = 64  # rows whose logits are on the card at a time while a text is scored
# The most tokens of short prompts in one pass.
MAX_TOGETHER = 256

A = TypeVar("A")  # Region while it is planned, an array on the card


@dataclass(frozen=True)
class Cache(Generic[A]):
    """The arrays of the KV cache. Each holds all layers.

    Shapes: keys, values [num_hidden_layers, num_pages, num_key_value_heads, PAGE_TOKENS, head_dim]; key_scales,
            value_scales float32, the same without head_dim; None unless the cache holds codes
    """

    keys: A
    values: A
    key_scales: A | None
    value_scales: A | None


def plan_cache(stored: StoredModel, num_pages: int) -> Cache[Region]:
    """Plan a cache of `num_pages` pages."""
    config = stored.config
    tokens = (config.num_hidden_layers, num_pages, config.num_key_value_heads, PAGE_TOKENS)
    vectors = Region((*tokens, config.head_dim), ARRAY_DTYPES[stored.cache_type])
    # One scale per head vector, kept apart so that codes stay aligned. 16-bit scales would save 1.5 % of memory at
    # head_dim 128, and lose the small values of some tokens.
    scales = Region(tokens, FLOAT32) if stored.cache_type == CODES else None
    return Cache(vectors, vectors, scales, scales)


@dataclass(frozen=True)
class Workspace(Generic[A]):
    """The arrays that the forward pass, decoding and scoring write.

    - For chunks and spans: spans int32, flat, which `cut_spans` cuts; and their activations: hidden float32 [chunk,
      hidden_size]; outputs float32 and inputs uint8, flat; mixed [chunk, q_size]; row_scale float32 [chunk], and
      the constants unit_scale (1) and gated_unit (GATED_SCALE), alike; score_logits float32 [LOGIT_ROWS, vocab_size];
      alone_hidden float32 [MOST_ALONE, hidden_size], `hidden` of tokens for which the last layer runs alone
    - For few rows, whose products write what the next one takes: norm_sums float32 [MAX_ROWS, norm_sums(hidden_size)]
    - For products in chunks: others float32, flat, the sums of all chunks but the first; None if no product needs them
    - For a product's inputs in the order of its matrix: gathered uint8, flat; None where no matrix has one
    - For lanes: lane_rows, lane_positions int32 [lanes]; free_rows, held_rows int32 [lanes], lane_rows with -1 where a
      lane's choice has a mask, or has none; lane_logits float32 [lanes, vocab_size]; partials float32
      [lanes at a time, num_attention_heads, splits, head_dim + PARTIAL_EXTRA]; counters uint32 [lanes at a time,
      grid_heads]; row_partials and row_counters, as attention_rows takes them, None where it serves no lanes;
      span_counters uint32 [MAX_SPAN, num_attention_heads], None where attention_span does not serve this cache
    - For lanes with drafts: drafted int32 [3, MAX_SPAN]: each lane's token id, row and position
    - For slots: slot_numbers int32 [num_rows], 0, 1, ...; slot_token_ids int32 [num_rows], chosen last; history int32
      [num_rows, max_seq_len]; page_table int32 [num_rows, pages_per_row]
    """

    spans: A
    hidden: A
    outputs: A
    mixed: A
    inputs: A
    row_scale: A
    unit_scale: A
    gated_unit: A
    score_logits: A
    alone_hidden: A
    norm_sums: A
    others: A | None
    gathered: A | None
    lane_rows: A
    lane_positions: A
    free_rows: A
    held_rows: A
    lane_logits: A
    partials: A
    counters: A
    row_partials: A | None
    row_counters: A | None
    span_counters: A | None
    drafted: A
    slot_numbers: A
    slot_token_ids: A
    history: A
    page_table: A

    def of_spans(self, num_tokens: int, num_rows: int) -> tuple[Any, Any, Any, Any]:
        """Cut the card's array with `cut_spans`."""
        table: Any = self.page_table
        return cut_spans(self.spans, num_tokens, num_rows, table.shape[1])


def spans_size(num_tokens: int, num_rows: int, pages_per_row: int) -> int:
    """Size of the array that `cut_spans` cuts for `num_tokens` tokens of `num_rows` rows, in numbers."""
    return 3 * _aligned_count(num_tokens) + num_rows * pages_per_row


def cut_spans(spans: Any, num_tokens: int, num_rows: int, pages_per_row: int) -> tuple[Any, Any, Any, Any]:
    """Cut the ids, rows and positions of tokens, and the pages of their rows, from an array that holds all of them.

    They are adjacent, so that the host sends them in one copy.
    Shapes: spans int32 [at least spans_size]; result int32 [num_tokens] three times, [num_rows, pages_per_row]
    """
    count = _aligned_count(num_tokens)
    token_ids, rows, positions = (spans[place * count : place * count + num_tokens] for place in range(3))
    pages = spans[3 * count : 3 * count + num_rows * pages_per_row]
    return token_ids, rows, positions, pages.reshape(num_rows, pages_per_row)


def _aligned_count(count: int) -> int:
    """Round up a number of 4-byte numbers to whole vectors of 16 bytes."""
    return -(-count // 4) * 4


def num_lanes(num_rows: int) -> int:
    """Lanes that are launched for `num_rows` rows."""
    return num_rows if num_rows <= LANES_A_PASS else -(-num_rows // LANES_A_PASS) * LANES_A_PASS


def plan_workspace(
    stored: StoredModel, weights: Weights[Space], max_seq_len: int, num_rows: int, chunk: int, card: CardFacts
) -> Workspace[Region]:
    """Plan the workspace for chunks of `chunk` tokens on a card."""
    config = stored.config
    qkv, itemsize = qkv_layout(config), ARRAY_DTYPES[stored.cache_type].itemsize
    # What attention takes, copies of outputs, and the MLP's inner activations: an image, or rows of floats.
    gated = padded_inputs(config.intermediate_size) * any(layer.gate_up.is_float for layer in weights.layers)
    outputs = chunk * max(qkv.width, config.hidden_size, gated)
    outputs = max(outputs, image_bytes(config.intermediate_size, chunk) // FLOAT32.itemsize)
    rounded = [one for one in weights.projections if not one.is_float]
    splits = max_splits(card.num_multiprocessors, qkv, itemsize, max_seq_len)
    partial_size = config.head_dim + PARTIAL_EXTRA
    lanes = max(num_lanes(num_rows), MAX_SPAN)
    most_rows = max(lanes, min(MAX_TOGETHER, chunk))  # of a product in chunks
    together = min(lanes, ATTENTION_LANES)
    rows_plan, span_plan = RowsPlan(card, qkv, itemsize), SpanPlan(card, qkv, itemsize)
    serves_rows = lanes >= MANY_LANES and rows_plan.is_possible
    scales = Region((chunk,), FLOAT32)
    gathered = _images_bytes([one for one in rounded if one.order is not None], chunk)
    # Attention writes what the products after it take.
    mixed_dtype = np.dtype(np.float32 if any(layer.o.is_float for layer in weights.layers) else np.float16)
    of_lanes, of_slots = Region((lanes,), INT32), Region((num_rows,), INT32)
    return Workspace(
        spans=Region((spans_size(chunk, MOST_PARTS, pages_of(max_seq_len)),), INT32),
        hidden=Region((chunk, config.hidden_size), FLOAT32),
        outputs=Region((outputs,), FLOAT32),
        mixed=Region((chunk, config.q_size), mixed_dtype),
        inputs=Region((_images_bytes(rounded, chunk),), BYTE),
        row_scale=scales,
        unit_scale=scales,
        gated_unit=scales,
        score_logits=Region((LOGIT_ROWS, config.vocab_size), FLOAT32),
        alone_hidden=Region((MOST_ALONE, config.hidden_size), FLOAT32),
        norm_sums=Region((MAX_ROWS, norm_sums(config.hidden_size)), FLOAT32),
        others=_plan_others(weights, most_rows),
        gathered=Region((gathered,), BYTE) if gathered else None,
        lane_rows=of_lanes,
        lane_positions=of_lanes,
        free_rows=of_lanes,
        held_rows=of_lanes,
        lane_logits=Region((num_lanes(num_rows), config.vocab_size), FLOAT32),
        partials=Region((together, config.num_attention_heads, splits, partial_size), FLOAT32),
        counters=Region((together, grid_heads(qkv, itemsize)), UINT32),
        row_partials=Region(rows_plan.partials_shape(splits), FLOAT32) if serves_rows else None,
        row_counters=Region((rows_plan.num_blocks,), UINT32) if serves_rows else None,
        span_counters=Region((MAX_SPAN, config.num_attention_heads), UINT32) if span_plan.is_possible else None,
        drafted=Region((3, MAX_SPAN), INT32),
        slot_numbers=of_slots,
        slot_token_ids=of_slots,
        history=Region((num_rows, max_seq_len), INT32),
        page_table=Region((num_rows, pages_of(max_seq_len)), INT32),
    )


def _images_bytes(matrices: Sequence[Projection[Space]], chunk: int) -> int:
    """Bytes of the largest image of a chunk, which rows in fp16 do not exceed."""
    return max((image_bytes(one.layout.num_inputs, chunk) for one in matrices), default=0)


def _plan_others(weights: Weights[Space], most_rows: int) -> Region | None:
    """Plan the sums of all chunks but the first of the largest product; logits are of LOGIT_ROWS rows or more."""
    products = [(one, most_rows) for layer in weights.layers for one in layer.projections]
    products.append((weights.head, max(most_rows, LOGIT_ROWS)))
    sizes = (
        (num_chunks(one.layout) - 1) * one.num_rows * rows
        for one, rows in products
        if rows > MAX_ROWS and is_wide((one,))
    )
    size = max(sizes, default=0)
    return Region((size,), FLOAT32) if size else None
