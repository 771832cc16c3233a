"""Attention of one new token over the KV cache: rotary, append, softmax, values."""

from dataclasses import dataclass

import numpy as np

from llmcli.kernels.attention_decode import (
    PARTIAL_EXTRA,
    attention_decode,
    attention_decode_cost,
    grid_heads,
    max_splits,
)
from llmcli.kernels.attention_lanes import LaneInputs
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import PAGE_TOKENS, LayerCache, QkvLayout
from llmcli.kernels.spec import KernelCost
from llmcli.lab.attention import (
    F16,
    FLOOR,
    SPLIT,
    Estimate,
    Stored,
    attend,
    carried_error,
    cos_sin_table,
    exact,
    page_table,
    paged,
    rotate,
    stored,
)
from llmcli.lab.problem import ENGINE, ROUNDOFF, Arrays, Expected, Output, Problem, ProblemKind

HEAD_DIM = 128
_MANY = 1 << 16  # multiprocessors: more than any card has
_ITEMSIZE = F16.itemsize


@dataclass(frozen=True)
class CachedTokens:
    """The tokens before a new one at `position`, in the cache of one layer and one row, as halves in pages.

    Shapes: keys, values [1, num_key_value_heads, position + 1, HEAD_DIM], NaN at `position`; table int32 [1,
            pages_per_row]; cos_sin float32 [position + 1, HEAD_DIM / 2, 2]
    """

    layout: QkvLayout
    position: int
    keys: Stored
    values: Stored
    table: np.ndarray
    cos_sin: np.ndarray

    @classmethod
    def random(cls, generator: np.random.Generator, layout: QkvLayout, position: int) -> "CachedTokens":
        """Normal keys and values in pages of random order."""
        shape = (1, layout.num_key_value_heads, position + 1, HEAD_DIM)
        keys, values = (stored(generator.standard_normal(shape, np.float32), F16) for _ in range(2))
        for cache in (keys, values):
            cache.poison((slice(None), slice(None), position))
        table = page_table(1, position + 1, seed=position)
        return cls(layout, position, keys, values, table, cos_sin_table(position + 1, HEAD_DIM))

    @property
    def cost(self) -> KernelCost:
        """The cost of the attention, without the projections."""
        return attention_decode_cost([self.position + 1], self.layout, _ITEMSIZE)

    def inputs(self) -> dict[str, np.ndarray]:
        """The cache before the call, and the arrays that locate it."""
        return {
            "cached_keys": paged(self.keys, self.table).elements,
            "cached_values": paged(self.values, self.table).elements,
            "page_table": self.table,
            "cos_sin": self.cos_sin,
            "rows": np.zeros(1, np.int32),
            "positions": np.full(1, self.position, np.int32),
        }

    def outputs(self) -> dict[str, Output]:
        """The cache with the new token."""
        shape = paged(self.keys, self.table).elements.shape
        return {name: Output(shape, F16, initial=f"cached_{name}") for name in ("keys", "values")}

    def scratch(self) -> dict[str, Output]:
        """Memory between launches: turned queries (and keys), scores, parts of splits on any card, counters."""
        layout = self.layout
        splits = max_splits(_MANY, layout, _ITEMSIZE, self._capacity)
        return {
            "queries": Output((layout.q_size,)),
            "turned": Output((layout.q_size + layout.kv_size,)),
            "scores": Output((layout.num_attention_heads, self.position + 1)),
            "partials": Output((layout.num_attention_heads * splits * (HEAD_DIM + PARTIAL_EXTRA),)),
            "counters": Output((layout.num_attention_heads,), np.uint32, holds_zeros=True),
        }

    def expected(self, qkv: Estimate) -> tuple[dict[str, Expected], Estimate]:
        """The cache after the call, and the result of attention.

        Shapes: qkv [layout.width]; the result [layout.q_size]
        """
        position = np.array([self.position])
        query, key, value = (self._heads(qkv, begin, end) for begin, end in self._columns())
        query, key = (rotate(one, self.cos_sin, position) for one in (query, key))
        after: dict[str, Expected] = {}
        tokens: list[np.ndarray] = []
        errors: list[np.ndarray] = []
        for name, cache, new in (("keys", self.keys, key), ("values", self.values, value)):
            bound = ROUNDOFF[F16] * np.abs(new.value) + new.error + FLOOR[F16]
            rows, bounds = cache.values, np.zeros(cache.elements.shape)  # earlier tokens stay as they are
            rows[0, :, -1], bounds[0, :, -1] = new.value[0], bound[0]
            after[name] = Expected(_in_pages(rows, self.table, np.nan), _in_pages(bounds, self.table, 0.0))
            tokens.append(rows[0])
            errors.append(bound[0])
        mixed = attend(
            exact(query.value),
            keys=tokens[0],
            values=tokens[1],
            positions=position,
            window=None,
            query_error=SPLIT[F16],
            query_floor=FLOOR[F16],
            weight_error=SPLIT[F16],
            tensor_cores=True,
        )
        moved = carried_error(Estimate(query.value[0], query.error[0]), *tokens, *errors)
        return after, Estimate(mixed.value[0], mixed.error[0] + moved)

    def solve(self, device: Device, arrays: Arrays) -> None:
        """The engine's kernel, from `qkv` to `mixed`."""
        layout = self.layout
        heads = grid_heads(layout, _ITEMSIZE)
        splits = max_splits(device.num_multiprocessors, layout, _ITEMSIZE, self._capacity)
        parts = (1, layout.num_attention_heads, splits, HEAD_DIM + PARTIAL_EXTRA)
        lanes = LaneInputs(
            qkv=arrays["qkv"].reshape(1, -1),
            layout=layout,
            q_norm=None,
            k_norm=None,
            eps=0.0,
            cos_sin=arrays["cos_sin"],
            rows=arrays["rows"],
            positions=arrays["positions"],
            page_table=arrays["page_table"],
            cache=LayerCache(arrays["keys"], arrays["values"]),
            window=None,
        )
        attention_decode(
            device,
            lanes,
            is_cached=False,
            partials=arrays["partials"][: int(np.prod(parts))].reshape(parts),
            counters=arrays["counters"][:heads].reshape(1, -1),
            out=arrays["mixed"].reshape(1, -1),
        )

    @property
    def _capacity(self) -> int:
        return int(self.table.shape[1]) * PAGE_TOKENS

    def _columns(self) -> list[tuple[int, int]]:
        """Columns of queries, keys and values in a row of projections."""
        layout = self.layout
        ends = [layout.q_size, layout.v_offset, layout.width]
        return list(zip([0, *ends[:-1]], ends, strict=True))

    @staticmethod
    def _heads(qkv: Estimate, begin: int, end: int) -> Estimate:
        return Estimate(*(one[begin:end].reshape(1, -1, HEAD_DIM) for one in (qkv.value, qkv.error)))


def make(num_attention_heads: int, num_key_value_heads: int, position: int) -> Problem:
    """mixed = softmax(q K^T / sqrt(128)) V; q and the new token's key are rotated, and key and value appended.

    Heads have 128 dimensions. The cache holds `position` tokens before.
    Shapes: qkv float32 [(num_attention_heads + 2 * num_key_value_heads) * 128]; cos_sin float32 [position + 1, 64, 2];
            page_table int32 [1, pages_per_row]; keys, values float16 [num_pages, num_key_value_heads, 16, 128], in-out,
            `cached_keys` and `cached_values` at first; mixed float32 [num_attention_heads * 128]; scratch: see
            `CachedTokens.scratch`
    """
    layout = QkvLayout(num_attention_heads, num_key_value_heads, HEAD_DIM)
    generator = np.random.default_rng([num_attention_heads, num_key_value_heads, position])
    tokens = CachedTokens.random(generator, layout, position)
    qkv = generator.standard_normal(layout.width, np.float32)

    def reference() -> dict[str, Expected]:
        after, mixed = tokens.expected(exact(qkv))
        return {**after, "mixed": Expected(mixed.value, mixed.error)}

    return Problem(
        "decode_cache",
        {
            "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_key_value_heads,
            "position": position,
        },
        inputs={"qkv": qkv, **tokens.inputs()},
        outputs={"mixed": Output((layout.q_size,)), **tokens.outputs()},
        scratch=tokens.scratch(),
        reference=reference,
        cost=tokens.cost,
        solvers={ENGINE: tokens.solve},
    )


def _in_pages(rows: np.ndarray, table: np.ndarray, empty: float) -> np.ndarray:
    """Rows [1, num_key_value_heads, seq_len, HEAD_DIM] as pages; `empty` fills places without a token."""
    num_heads, seq_len = rows.shape[1:3]
    pages = np.full((int(table.max()) + 4, num_heads, PAGE_TOKENS, HEAD_DIM), empty)
    tokens = np.arange(seq_len)
    pages[table[0, tokens // PAGE_TOKENS], :, tokens % PAGE_TOKENS] = rows[0].transpose(1, 0, 2)
    return pages


DECODE_CACHE = ProblemKind("decode_cache", "attention of one new token over the KV cache", make)
