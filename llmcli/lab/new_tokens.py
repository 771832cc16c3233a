"""New tokens in lanes, as append_tokens and attention_decode take them, and what must come out, in float64."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.attention import FLOOR, SPLIT, U32, Estimate, attend, cos_sin_table, exact, normalize, rotate
from llmcli.lab.kv_cache import Stored, page_table, paged, share_pages, stored, visible_table
from llmcli.lab.problem import Expected, Output, stored_values

EPS = 1e-5
DTYPES = tuple(np.dtype(kind) for kind in (np.float32, np.float16, np.uint16, np.uint8))
_NO_ROW = -1


@dataclass(frozen=True)
class NewTokens:
    """One call's inputs; lane i has the row `rows[i]`, whose tokens `keys` and `values` hold in order.

    Row -1 marks a lane that nobody uses. With `is_cached` the cache holds the new tokens before attention_decode runs,
    and several lanes may be of one row.
    Shapes: qkv float32 [num_lanes, layout.width]; keys, values [num_rows, num_key_value_heads, seq_len, head_dim]
    """

    layout: QkvLayout
    qkv: np.ndarray
    q_norm: np.ndarray | None
    k_norm: np.ndarray | None
    cos_sin: np.ndarray | None
    rows: np.ndarray
    positions: np.ndarray
    keys: Stored
    values: Stored
    window: int | None
    num_splits: int
    table: np.ndarray
    is_cached: bool = False

    def only(self, lanes: list[int]) -> "NewTokens":
        """The same cache with some of the lanes."""
        return replace(self, qkv=self.qkv[lanes], rows=self.rows[lanes], positions=self.positions[lanes])

    def used(self) -> list[tuple[int, int, int]]:
        """Lane, row and position of each lane that somebody uses."""
        lanes = enumerate(zip(self.rows.tolist(), self.positions.tolist(), strict=True))
        return [(lane, row, position) for lane, (row, position) in lanes if row >= 0]

    def query(self) -> Estimate:
        """Queries as they enter attention. Shapes: result [num_lanes, num_attention_heads, head_dim]"""
        return self._normed_and_rotated(0, self.layout.q_size, self.q_norm)

    def key(self) -> Estimate:
        """Keys before they are rounded. Shapes: result [num_lanes, num_key_value_heads, head_dim]"""
        return self._normed_and_rotated(self.layout.k_offset, self.layout.kv_size, self.k_norm)

    def value(self) -> np.ndarray:
        """Values before they are rounded. Shapes: result float32 [num_lanes, num_key_value_heads, head_dim]"""
        begin = self.layout.v_offset
        return self.qkv[:, begin : begin + self.layout.kv_size].reshape(len(self.qkv), -1, self.layout.head_dim)

    def attention(
        self, lane: int, query: Estimate, keys: Stored, values: Stored, key_error: np.ndarray | None = None
    ) -> Estimate:
        """What one lane gives over its row's tokens, its own included.

        `key_error` is how far the cached keys may be from `keys`.
        Shapes: query as `query()`; keys, values and key_error [num_key_value_heads, seq_len, head_dim]; result
                [1, layout.q_size]
        """
        dtype, seen = keys.dtype, slice(0, int(self.positions[lane]) + 1)
        return attend(
            Estimate(query.value[lane : lane + 1], query.error[lane : lane + 1]),
            keys[:, seen].values,
            values[:, seen].values,
            self.positions[lane : lane + 1],
            self.window,
            query_error=SPLIT[dtype],
            query_floor=FLOOR[dtype],
            weight_error=SPLIT[dtype],
            tensor_cores=dtype != np.float32,
            value_scales=values[:, seen].scales,
            key_error=None if key_error is None else key_error[:, seen],
        )

    def _normed_and_rotated(self, begin: int, size: int, norm: np.ndarray | None) -> Estimate:
        heads = exact(self.qkv[:, begin : begin + size].reshape(len(self.qkv), -1, self.layout.head_dim))
        if norm is not None:
            heads = normalize(heads, norm, EPS)
        if self.cos_sin is not None:
            heads = rotate(heads, self.cos_sin, np.where(self.rows < 0, 0, self.positions))
        return heads


def new_tokens(
    layout: QkvLayout,
    dtype: np.dtype[Any],
    positions: list[int],
    *,
    window: int | None = None,
    norms: bool = False,
    rotary: bool = True,
    num_splits: int = 3,
    max_seq_len: int | None = None,
    magnitude: float = 1.0,
    shared_pages: int = 0,
) -> NewTokens:
    """Normal values; whatever no token of a row may see yet is NaN. All rows begin with as many `shared_pages`."""
    generator = np.random.default_rng(len(positions) + layout.head_dim)
    num_rows = len(positions) + 1
    max_seq_len = max_seq_len or max(positions) + 1
    head_dim = layout.head_dim
    rows = generator.permutation(num_rows)[: len(positions)].astype(np.int32)
    shape = (num_rows, layout.num_key_value_heads, max_seq_len, head_dim)
    keys, values = (stored(generator.normal(size=shape), dtype) for _ in range(2))
    table = page_table(num_rows, max_seq_len, len(positions))
    for cache in (keys, values):
        share_pages(cache, table, rows.tolist(), shared_pages)
    for row, position in zip(rows, positions, strict=True):
        for cache in (keys, values):
            cache.poison((row, slice(None), slice(position, None)))
    weights = generator.uniform(0.5, 2.0, (2, head_dim)).astype(np.float32)
    return NewTokens(
        layout,
        (magnitude * generator.normal(size=(len(positions), layout.width))).astype(np.float32),
        weights[0] if norms else None,
        weights[1] if norms else None,
        cos_sin_table(max_seq_len, head_dim) if rotary else None,
        rows,
        np.array(positions, np.int32),
        keys,
        values,
        window,
        num_splits,
        table,
    )


def with_unused_lanes(tokens: NewTokens) -> NewTokens:
    """The same with a lane in front and behind that nobody uses, full of NaN."""
    lanes = slice(1, len(tokens.rows) + 1)
    qkv = np.full((lanes.stop + 1, tokens.layout.width), np.nan, np.float32)
    rows, positions = np.full(len(qkv), _NO_ROW, np.int32), np.full(len(qkv), 2**30, np.int32)
    qkv[lanes], rows[lanes], positions[lanes] = tokens.qkv, tokens.rows, tokens.positions
    return replace(tokens, qkv=qkv, rows=rows, positions=positions)


def spans_of(tokens: NewTokens, lengths: list[int]) -> NewTokens:
    """Spans of the lanes' rows: so many tokens of each, one a lane, from its position on."""
    generator = np.random.default_rng(sum(lengths))
    positions = [start + np.arange(length) for start, length in zip(tokens.positions, lengths, strict=True)]
    return replace(
        tokens,
        qkv=generator.normal(size=(sum(lengths), tokens.layout.width)).astype(np.float32),
        rows=np.repeat(tokens.rows, lengths),
        positions=np.concatenate(positions).astype(np.int32),
    )


def in_cache(tokens: NewTokens) -> NewTokens:
    """The same once append_tokens has run."""
    after = append(tokens)
    return replace(tokens, keys=after.keys, values=after.values, is_cached=True)


@dataclass(frozen=True)
class Rounded:
    """Vectors as the cache stores them, and how far the right bits may be from that.

    Shapes: bound of each element, and error of each value stood for, as the vectors; scale_bound [..., 1] beside codes
    """

    vectors: Stored
    bound: np.ndarray
    scale_bound: np.ndarray | None
    error: np.ndarray


def rounded(x: Estimate, dtype: np.dtype[Any]) -> Rounded:
    """Round vectors that are known within an error. Bounds are 0 wherever all that x may be rounds alike."""
    vectors = stored(x.value, dtype)
    if vectors.scales is None:
        # Rounding is monotone: what is stored lies between the two ends, rounded.
        low, high = (stored(x.value + sign * x.error, dtype).values for sign in (-1, 1))
        bound = np.maximum(high - vectors.values, vectors.values - low)
        return Rounded(vectors, bound, None, bound)
    # A scale, and what is divided by it, are each rounded twice.
    largest = np.abs(x.value).max(-1, keepdims=True)
    scale = largest / 127
    scale_error = x.error.max(-1, keepdims=True) / 127 + 4 * U32 * scale
    step = np.where(scale == 0, 1.0, scale)
    ratio = x.value / step
    ratio_error = (x.error + np.abs(ratio) * scale_error) / step + 4 * U32 * np.abs(ratio)
    is_open = np.abs(np.abs(ratio - np.rint(ratio)) - 0.5) <= ratio_error
    bound = is_open.astype(np.float64)
    return Rounded(vectors, bound, scale_error, bound * scale + (np.abs(ratio) + 1) * scale_error)


@dataclass(frozen=True)
class Appended:
    """The cache once the new tokens are in it, and how far right keys may be from that.

    Shapes: key_bound float64 as the keys' elements and scales; key_error float64 as the keys' elements, of values
    """

    keys: Stored
    values: Stored
    key_bound: Stored
    key_error: np.ndarray


def append(tokens: NewTokens) -> Appended:
    """Append every lane's token."""
    keys, values, key, value = tokens.keys.copy(), tokens.values.copy(), tokens.key(), tokens.value()
    bound, key_error = np.zeros(keys.elements.shape), np.zeros(keys.elements.shape)
    scale_bound = None if keys.scales is None else np.zeros(keys.scales.shape)
    for lane, row, position in tokens.used():
        place = (row, slice(None), position)
        new = rounded(Estimate(key.value[lane], key.error[lane]), keys.dtype)
        keys[place], bound[place], key_error[place] = new.vectors, new.bound, new.error
        if scale_bound is not None and new.scale_bound is not None:
            scale_bound[place] = new.scale_bound[..., 0]
        values[place] = stored(value[lane], keys.dtype)
    return Appended(keys, values, Stored(bound, scale_bound), key_error)


def inputs_of(tokens: NewTokens) -> dict[str, np.ndarray]:
    """Arrays of a call that no kernel changes; rows of `qkv` are further apart than they are long."""
    padded = np.full((len(tokens.qkv), tokens.layout.width + 16), np.nan, np.float32)
    padded[:, : tokens.layout.width] = tokens.qkv
    given = {
        "qkv": padded,
        "q_norm": tokens.q_norm,
        "k_norm": tokens.k_norm,
        "cos_sin": tokens.cos_sin,
        "rows": tokens.rows,
        "positions": tokens.positions,
        "page_table": visible_table(tokens.table, tokens.rows, tokens.positions),
    }
    return {name: array for name, array in given.items() if array is not None}


def cache_of(tokens: NewTokens) -> dict[str, np.ndarray]:
    """Keys and values in pages as the second of two layers, so that codes need no alignment; scales beside codes."""
    return _by_name(paged(tokens.keys, tokens.table), paged(tokens.values, tokens.table))


def cache_outputs(tokens: NewTokens) -> tuple[dict[str, np.ndarray], dict[str, Output]]:
    """The cache as inputs that hold what is there before, and as outputs that begin with it."""
    before = cache_of(tokens)
    outputs = {name: Output(array.shape, array.dtype, initial=f"{name}_before") for name, array in before.items()}
    return {f"{name}_before": array for name, array in before.items()}, outputs


def expected_cache(tokens: NewTokens, after: Appended) -> dict[str, Expected]:
    """The cache afterwards: keys within their bounds, all else exact."""
    expected = _by_name(paged(after.keys, tokens.table), paged(after.values, tokens.table))
    bound = paged(after.key_bound, tokens.table)
    bounds = {"keys": bound.elements, "key_scales": bound.scales}
    return {name: Expected(stored_values(array), _bound(array, bounds.get(name))) for name, array in expected.items()}


def _bound(array: np.ndarray, bound: np.ndarray | None) -> np.ndarray:
    bounds = np.zeros(array.shape)
    if bound is not None:
        bounds[1] = np.nan_to_num(bound, nan=0.0)  # NaN where pages hold no token
    return bounds


def _by_name(keys: Stored, values: Stored) -> dict[str, np.ndarray]:
    named = {
        "keys": keys.elements,
        "values": values.elements,
        "key_scales": keys.scales,
        "value_scales": values.scales,
    }
    return {name: _second_layer(array) for name, array in named.items() if array is not None}


def _second_layer(array: np.ndarray) -> np.ndarray:
    """Behind a layer of NaN."""
    front = np.full(array.nbytes, 0xFF, np.uint8).view(array.dtype).reshape(array.shape)
    return np.stack([front, array])
