"""How much of a card's memory a model needs, known before a byte is read, and the refusal if it is not there.

Everything follows from a `StoredModel`, so models whose files do not exist can be planned too. Nothing here needs CuPy.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from llmcli.checkpoint.layout import EMBEDDING, expected_tensors
from llmcli.config.llama import LlamaConfig
from llmcli.errors import InsufficientMemoryError, UnsupportedModelError
from llmcli.kernels.attention_decode import PARTIAL_EXTRA, grid_heads, max_splits
from llmcli.kernels.cublas import WORKSPACE_BYTES
from llmcli.kernels.qkv import QkvLayout
from llmcli.kernels.sample_token import MAX_VOCAB_SIZE, RowLayout
from llmcli.kernels.tiles import TILE_ROWS, TileLayout, segment_offsets
from llmcli.runners.cuda.matrices import MatrixPlan, ModelMatrices, plan_matrices
from llmcli.runners.cuda.regions import ARRAY_DTYPES, Region, held_bytes
from llmcli.runners.cuda.staging import staging_regions
from llmcli.runners.cuda.stored import CODES, StoredModel

# Prompt tokens that run together: wide enough for the tensor cores; the first thing to be cut when memory is short.
PREFILL_CHUNKS = (2048, 1024, 512, 256)
MAX_BATCH = 8  # rows of one decode step
LOGIT_ROWS = 64  # rows whose logits are on the card at a time while a text is scored
# Weights widened at a time for a product of many tokens: few enough to be still in L2 when the product reads them.
WIDENED_BYTES = 128 * 2**20

MAX_HEAD_DIM = 256

# What CUDA takes beside our arrays: kernels, graphs, the state of the matrix library.
RESERVED_BYTES = 256 * 2**20

_SMALLEST_USEFUL_CONTEXT = 128
_FLOAT32, _INT32, _BYTE = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.uint8)


@dataclass(frozen=True)
class MemoryPlan:
    """Everything a runner keeps on the card: three allocations, and the sampler's state.

    `staging` is what loading needs; it takes the workspace's place for that time.
    """

    stored: StoredModel
    matrices: ModelMatrices
    max_seq_len: int
    num_rows: int
    chunk_tokens: int
    weights: tuple[Region, ...]
    cache: tuple[Region, ...]
    workspace: tuple[Region, ...]
    staging: tuple[Region, ...]

    @property
    def weight_bytes(self) -> int:
        """Weights and the tables that stay with them."""
        return held_bytes(self.weights)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of every row at full length."""
        return held_bytes(self.cache)

    @property
    def workspace_bytes(self) -> int:
        """Activations and logits; while weights are loaded, the same memory holds what arrives."""
        return max(held_bytes(self.workspace), held_bytes(self.staging))

    @property
    def sampler_bytes(self) -> int:
        """What sampling keeps for each row."""
        return self.num_rows * RowLayout(self.stored.config.vocab_size).row_bytes

    @property
    def total_bytes(self) -> int:
        """All of it, with what CUDA takes for itself."""
        return self.weight_bytes + self.cache_bytes + self.workspace_bytes + self.sampler_bytes + RESERVED_BYTES


def plan_memory(
    stored: StoredModel,
    *,
    max_seq_len: int,
    num_rows: int,
    chunk_tokens: int | None = None,
    num_multiprocessors: int = 132,
) -> MemoryPlan:
    """Lay everything out, without touching a card.

    Raises: UnsupportedModelError for shapes that no kernel has
    """
    _check_shape(stored.config)
    matrices = plan_matrices(stored)
    chunk = max(min(chunk_tokens or PREFILL_CHUNKS[0], max_seq_len), MAX_BATCH)
    return MemoryPlan(
        stored,
        matrices,
        max_seq_len,
        num_rows,
        chunk,
        weights=tuple(_weights(stored, matrices, max_seq_len)),
        cache=tuple(cache_regions(stored, max_seq_len, num_rows)),
        workspace=tuple(_workspace(stored, matrices, max_seq_len, num_rows, chunk, num_multiprocessors)),
        staging=tuple(staging_regions(stored, matrices)),
    )


def fit_memory(
    stored: StoredModel,
    where: str,
    *,
    max_seq_len: int,
    num_rows: int,
    available: int,
    allows_fewer_rows: bool = False,
    chunk_tokens: int | None = None,
    num_multiprocessors: int = 132,
) -> MemoryPlan:
    """The plan with the most rows (if fewer are allowed) and the widest prefill that fits `available` bytes.

    Raises: InsufficientMemoryError with the figures and the change that would make it fit
    """
    chunks = (chunk_tokens,) if chunk_tokens else PREFILL_CHUNKS
    plan = None
    for rows in range(num_rows, 0, -1) if allows_fewer_rows else (num_rows,):
        for chunk in chunks:
            plan = plan_memory(
                stored,
                max_seq_len=max_seq_len,
                num_rows=rows,
                chunk_tokens=chunk,
                num_multiprocessors=num_multiprocessors,
            )
            if plan.total_bytes <= available:
                return plan
    assert plan is not None
    context = fitting_context(
        stored,
        num_rows=plan.num_rows,
        available=available,
        chunk_tokens=chunks[-1],
        num_multiprocessors=num_multiprocessors,
    )
    narrow = plan_memory(
        replace(stored, kv_cache=CODES),
        max_seq_len=max_seq_len,
        num_rows=plan.num_rows,
        chunk_tokens=plan.chunk_tokens,
        num_multiprocessors=num_multiprocessors,
    )
    if context >= _SMALLEST_USEFUL_CONTEXT:
        remedy = f"use --context {context} or less"
        if narrow.total_bytes <= available:
            remedy += f", or --kv-cache {CODES}"
    elif stored.packed:
        remedy = "use a smaller model, or --device cpu"
    else:
        remedy = "make it smaller with llmcli quantize, or use --device cpu"
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
    num_multiprocessors: int = 132,
) -> int:
    """The largest context that fits, up to what the model was made for; 0 if none does."""

    def fits(max_seq_len: int) -> bool:
        plan = plan_memory(
            stored,
            max_seq_len=max_seq_len,
            num_rows=num_rows,
            chunk_tokens=chunk_tokens,
            num_multiprocessors=num_multiprocessors,
        )
        return plan.total_bytes <= available

    low, high = 0, stored.config.max_position_embeddings
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def matrix_region(matrix: MatrixPlan) -> str:
    """The name of a matrix's bytes in the plan."""
    return f"matrix {matrix.name}"


def bias_region(matrix: MatrixPlan) -> str:
    """The name of a matrix's bias in the plan."""
    return f"bias {matrix.name}"


def _check_shape(config: LlamaConfig) -> None:
    limits = (
        (
            "head_dim",
            config.head_dim,
            config.head_dim % 8 == 0 and config.head_dim <= MAX_HEAD_DIM,
            "a multiple of 8 up to 256",
        ),
        ("vocab_size", config.vocab_size, config.vocab_size <= MAX_VOCAB_SIZE, f"at most {MAX_VOCAB_SIZE}"),
    )
    for name, value, is_possible, expected in limits:
        if not is_possible:
            raise UnsupportedModelError(f"{name} is {value}, expected {expected} on CUDA; use --device cpu")


def _weights(stored: StoredModel, matrices: ModelMatrices, max_seq_len: int) -> Iterator[Region]:
    config = stored.config
    # Its rows arrive in whole tiles.
    yield Region(
        EMBEDDING, (segment_offsets([config.vocab_size])[1], config.hidden_size), ARRAY_DTYPES[stored.embedding_type]
    )
    for matrix in matrices:
        yield Region(matrix_region(matrix), (matrix.layout.arena_bytes,), _BYTE)
        if has_bias(config, matrix):
            yield Region(bias_region(matrix), (matrix.layout.padded_rows,), _FLOAT32)
    for tensor in expected_tensors(config):
        if tensor.name.endswith("norm.weight"):
            yield Region(tensor.name, tensor.shape, _FLOAT32)
    yield Region("cos_sin", (max_seq_len, config.head_dim // 2, 2), _FLOAT32)


def has_bias(config: LlamaConfig, matrix: MatrixPlan) -> bool:
    """Whether the layers of a matrix have biases; those that share one always agree."""
    traits, module = config.traits, matrix.segments[0].module
    if module.endswith(("q_proj", "k_proj", "v_proj")):
        return traits.qkv_bias
    if module.endswith("o_proj"):
        return traits.o_bias
    return traits.mlp_bias and ".mlp." in module


def cache_regions(stored: StoredModel, max_seq_len: int, num_rows: int) -> Iterator[Region]:
    """The arrays of the KV cache, all layers of each together."""
    config = stored.config
    tokens = (config.num_hidden_layers, num_rows, config.num_key_value_heads, max_seq_len)
    for name in ("keys", "values"):
        yield Region(name, (*tokens, config.head_dim), ARRAY_DTYPES[stored.cache_type])
    if stored.cache_type == CODES:
        # Of a head's vector one, apart from the codes, which keeps those aligned. 16 bits would save 1.5 % of memory at
        # head_dim 128 and lose the small values of some tokens.
        for name in ("key_scales", "value_scales"):
            yield Region(name, tokens, _FLOAT32)


def _workspace(
    stored: StoredModel,
    matrices: ModelMatrices,
    max_seq_len: int,
    num_rows: int,
    chunk: int,
    num_multiprocessors: int,
) -> Iterator[Region]:
    config = stored.config
    vocab_size = config.vocab_size
    layers = [matrix for matrix in matrices if matrix is not matrices.head]
    widest = max(qkv_layout(config).width, *(matrix.layout.num_rows for matrix in layers))
    # One token's input of a product, in the type that the product takes.
    input_bytes = max(
        matrix.layout.num_inputs * ARRAY_DTYPES[matrix.format.activation_type].itemsize for matrix in layers
    )
    for name in ("token_ids", "rows", "positions"):
        yield Region(name, (chunk,), _INT32)
    yield Region("hidden", (chunk, config.hidden_size), _FLOAT32)
    yield Region("outputs", (chunk * widest,), _FLOAT32)
    yield Region("mixed", (chunk, config.q_size), _FLOAT32)
    yield Region("gated", (MAX_BATCH, config.intermediate_size), _FLOAT32)
    yield Region("inputs", (chunk * input_bytes,), _BYTE)
    for name in ("row_scale", "gated_scale", "unit_scale"):
        yield Region(name, (chunk,), _FLOAT32)
    yield Region("widened", (max(_widened_bytes(matrix) for matrix in layers),), _BYTE)
    qkv, itemsize = qkv_layout(config), ARRAY_DTYPES[stored.cache_type].itemsize
    splits = max_splits(num_multiprocessors, qkv, itemsize, max_seq_len)
    partial_size = config.head_dim + PARTIAL_EXTRA
    yield Region("partials", (MAX_BATCH, config.num_attention_heads, splits, partial_size), _FLOAT32)
    yield Region("counters", (MAX_BATCH, grid_heads(qkv, itemsize)), np.dtype(np.uint32))
    yield Region("library", (WORKSPACE_BYTES,), _BYTE)
    yield Region("history", (num_rows, max_seq_len), _INT32)
    for name in ("lane_token_ids", "lane_rows", "lane_positions"):
        yield Region(name, (num_rows,), _INT32)
    for name in ("even_logits", "odd_logits", "prefill_logits", "decode_logits"):
        yield Region(name, (num_rows, vocab_size), _FLOAT32)
    yield Region("score_logits", (LOGIT_ROWS, vocab_size), _FLOAT32)


def qkv_layout(config: LlamaConfig) -> QkvLayout:
    """How attention finds queries, keys and values in the outputs of their projection."""
    return QkvLayout(config.num_attention_heads, config.num_key_value_heads, config.head_dim)


def tiles_at_a_time(layout: TileLayout, itemsize: int, room_bytes: int) -> int:
    """Tiles whose rows fit `room_bytes` when widened to `itemsize` bytes: at least one, at most all."""
    return min(max(room_bytes // (TILE_ROWS * layout.num_inputs * itemsize), 1), layout.num_tiles)


def _widened_bytes(matrix: MatrixPlan) -> int:
    itemsize = ARRAY_DTYPES[matrix.format.activation_type].itemsize
    tiles = tiles_at_a_time(matrix.layout, itemsize, WIDENED_BYTES)
    return tiles * TILE_ROWS * matrix.layout.num_inputs * itemsize


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
