"""Launcher of append_tokens.cu: norms, rotates and caches some new tokens; several may be of one row."""

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.attention_lanes import LaneInputs
from llmcli.kernels.launches import Launcher
from llmcli.kernels.qkv import CACHE_TYPES, QkvLayout, cached_bytes
from llmcli.kernels.spec import KernelCost, KernelSpec

SPEC = KernelSpec(
    "append_tokens",
    "norm, rotary and cache of a span's keys and values; norm and rotary of a prompt's queries",
    tuple(f"append_tokens<{kind}, {size}>" for kind in CACHE_TYPES.values() for size in (8, 64, 80, 128, 256)),
)

_WARPS = 4


def append_tokens(
    device: Launcher,
    lanes: LaneInputs,
    *,
    parts: Array | None = None,
    norms_queries: bool = False,
    rotates_queries: bool = False,
) -> None:
    """Append a token to the cache in each lane, with the bits that attention_decode would append.

    First `parts` are added to `qkv`, in order: queries there become their sums, keys and values only in the cache.
    Queries there may also be normed, where they have a norm, and rotated, where there are angles.
    May start before the previous kernel has ended, and then reads rows, positions and
    page_table at once: that kernel must not write them, nor one that it overlaps.
    Shapes: parts float32 [num_parts, R, layout.width], for contiguous `qkv`
    Raises: ValueError
    """
    kernel, layout, num_lanes, num_parts = "append_tokens", lanes.layout, lanes.num_lanes, 0
    stride = lanes.check(kernel)
    if parts is not None:
        check(kernel, "qkv", lanes.qkv, dtype=np.float32, shape=(num_lanes, layout.width))
        check(kernel, "parts", parts, dtype=np.float32, shape=(None, num_lanes, layout.width))
        num_parts, stride = parts.shape[0], layout.width  # also for a single token, which has no next row
    q_norm = lanes.q_norm if norms_queries else None
    has_queries = num_parts > 0 or q_norm is not None or (rotates_queries and lanes.cos_sin is not None)
    num_query_heads = layout.num_attention_heads if has_queries else 0
    device.launch(
        kernel,
        f"append_tokens<{CACHE_TYPES[lanes.cache.dtype]}, {layout.head_dim}>",
        grid=(num_lanes, -(-(2 * layout.num_key_value_heads + num_query_heads) // _WARPS)),
        block=32 * _WARPS,
        arguments=(
            lanes.qkv,
            np.int32(layout.k_offset),
            np.int32(layout.v_offset),
            np.int32(stride),
            parts,
            np.int32(num_parts),
            q_norm,
            lanes.k_norm,
            np.float32(lanes.eps),
            lanes.cos_sin,
            lanes.rows,
            lanes.positions,
            lanes.page_table,
            np.int32(lanes.page_table.shape[1]),
            *lanes.cache.arrays,
            np.int32(layout.num_key_value_heads),
            np.int32(num_query_heads),
            np.int32(rotates_queries),
        ),
        overlaps=True,
        cost=lambda: append_tokens_cost(num_lanes, layout, lanes.cache.dtype.itemsize, num_parts, has_queries),
    )


def append_tokens_cost(
    num_tokens: int, layout: QkvLayout, itemsize: int, num_parts: int = 0, has_queries: bool = False
) -> KernelCost:
    """What one call moves and adds; `itemsize` is the cache's. With parts it always has queries."""
    queries = num_tokens * layout.q_size if num_parts or has_queries else 0
    added = num_parts * (queries + 2 * num_tokens * layout.kv_size)
    read = 4 * (queries + 2 * num_tokens * layout.kv_size + added)
    return KernelCost(read, 4 * queries + 2 * num_tokens * cached_bytes(layout, itemsize), added)
