"""The arrays a runner works in: the KV cache of all layers, and the activations and logits. Nothing here needs CuPy."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from llmcli.kernels.attention_decode import PARTIAL_EXTRA, grid_heads, max_splits
from llmcli.kernels.attention_rows import RowsPlan
from llmcli.kernels.attention_span import SpanPlan
from llmcli.kernels.card_facts import CardFacts
from llmcli.kernels.chunks import num_chunks
from llmcli.kernels.gemv import MAX_ROWS, norm_sums
from llmcli.kernels.stage_wide import image_bytes, padded_inputs
from llmcli.kernels.tiles import TILE_ROWS, TileLayout
from llmcli.runners.base import MAX_SPAN, PAGE_TOKENS, pages_of
from llmcli.runners.cuda.plan.choice import PromptWays, most_tokens_of
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
# Bytes of weights widened at a time for a product of many tokens. They should still be in L2 when the product reads.
WIDENED_BYTES = 128 * 2**20

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
      hidden_size]; outputs float32 and inputs uint8, flat; mixed [chunk, q_size]; row_scale, gated_scale float32
      [chunk], and the constants unit_scale (1) and gated_unit (GATED_SCALE), alike; widened uint8; score_logits float32
      [LOGIT_ROWS, vocab_size]
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
    gated_scale: A
    unit_scale: A
    gated_unit: A
    widened: A
    score_logits: A
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
    stored: StoredModel,
    weights: Weights[Space],
    max_seq_len: int,
    num_rows: int,
    chunk: int,
    ways: PromptWays,
    card: CardFacts,
) -> Workspace[Region]:
    """Plan the workspace for chunks of `chunk` tokens on a card. `ways`: see MemoryPlan."""
    config = stored.config
    matrices = [matrix for layer in weights.layers for matrix in layer.projections]
    qkv, itemsize = qkv_layout(config), ARRAY_DTYPES[stored.cache_type].itemsize
    widest = max(qkv.width, *(matrix.num_rows for matrix in matrices))
    # The largest input of a product, in the type that the product takes.
    input_bytes = chunk * max(padded_inputs(one.layout.num_inputs) * one.activation_dtype.itemsize for one in matrices)
    wide_bytes = _wide_bytes(weights, chunk, card)
    splits = max_splits(card.num_multiprocessors, qkv, itemsize, max_seq_len)
    partial_size = config.head_dim + PARTIAL_EXTRA
    lanes = max(num_lanes(num_rows), MAX_SPAN)
    most_rows = max(lanes, most_tokens_of("rows", chunk) if ways.as_rows else 0)  # of a product
    together = min(lanes, ATTENTION_LANES)
    rows_plan, span_plan = RowsPlan(card, qkv, itemsize), SpanPlan(card, qkv, itemsize)
    serves_rows = lanes >= MANY_LANES and rows_plan.is_possible
    scales = Region((chunk,), FLOAT32)
    # Attention writes what the products after it take.
    is_float = any(layer.o.activation_dtype == np.float32 for layer in weights.layers)
    mixed_dtype = np.dtype(np.float32 if is_float else np.float16)
    of_lanes, of_slots = Region((lanes,), INT32), Region((num_rows,), INT32)
    return Workspace(
        spans=Region((spans_size(chunk, MOST_PARTS, pages_of(max_seq_len)),), INT32),
        hidden=Region((chunk, config.hidden_size), FLOAT32),
        outputs=Region((max(chunk * widest, wide_bytes // FLOAT32.itemsize),), FLOAT32),
        mixed=Region((chunk, config.q_size), mixed_dtype),
        inputs=Region((max(input_bytes, wide_bytes),), BYTE),
        row_scale=scales,
        gated_scale=scales,
        unit_scale=scales,
        gated_unit=scales,
        widened=Region((0 if ways.as_rows else max(_widened_bytes(matrix) for matrix in matrices),), BYTE),
        score_logits=Region((LOGIT_ROWS, config.vocab_size), FLOAT32),
        norm_sums=Region((MAX_ROWS, norm_sums(config.hidden_size)), FLOAT32),
        others=_plan_others(weights, most_rows, card),
        gathered=_plan_gathered(weights, most_rows, chunk),
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


def tiles_at_a_time(layout: TileLayout, itemsize: int, room_bytes: int) -> int:
    """Tiles whose rows fit `room_bytes` when widened to `itemsize` bytes: at least one, at most all."""
    return min(max(room_bytes // (TILE_ROWS * layout.num_inputs * itemsize), 1), layout.num_tiles)


def _plan_gathered(weights: Weights[Space], rows: int, chunk: int) -> Region | None:
    """Plan the inputs of products in another order: of rows and scored rows as float32, of a chunk in its own type."""
    ordered = [matrix for matrix in weights.projections if matrix.order is not None]
    rows = max(rows, LOGIT_ROWS if weights.head.order is not None else 0)
    of_token = ((max(4 * rows, matrix.activation_dtype.itemsize * chunk), matrix) for matrix in ordered)
    num_bytes = max((num_bytes * matrix.layout.num_inputs for num_bytes, matrix in of_token), default=0)
    return Region((num_bytes,), BYTE) if num_bytes else None


def _wide_bytes(weights: Weights[Space], chunk: int, card: CardFacts) -> int:
    """Bytes of the largest image of a chunk; `inputs` and `outputs` may hold one each."""
    sizes = {matrix.layout.num_inputs for matrix in weights.projections if is_wide((matrix,))}
    return max((image_bytes(num_inputs, chunk) for num_inputs in sizes), default=0)


def _plan_others(weights: Weights[Space], most_rows: int, card: CardFacts) -> Region | None:
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


def _widened_bytes(matrix: Projection[Space]) -> int:
    itemsize = matrix.activation_dtype.itemsize
    tiles = tiles_at_a_time(matrix.layout, itemsize, WIDENED_BYTES)
    return tiles * TILE_ROWS * matrix.layout.num_inputs * itemsize
