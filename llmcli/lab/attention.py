"""Attention for cases of kernels, in float64: norm, rotary, cache and new tokens, and the bounds of errors."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmcli.kernels.attention_decode import LaneInputs
from llmcli.kernels.qkv import PAGE_TOKENS, LayerCache, QkvLayout
from llmcli.lab.matrices import storage_name, to_storage
from llmcli.lab.problem import ROUNDING, Arrays, Expected, Output, stored_values

# Norm, rotary and attention in float64, and how far correct kernels may be from it.
#
# Every bound is a first-order error, from the roundings that a kernel's header states. Each value has a magnitude: what
# the result would be if nothing cancelled.

EXP2 = 2.0**-22  # relative error of the fast 2^x
# What splitting a number into two 16-bit parts loses, and what rounding one to 16 bits loses.
# Codes (uint8) are multiplied in fp16.
F32, F16, BF16, CODES = (np.dtype(kind) for kind in (np.float32, np.float16, np.uint16, np.uint8))
SPLIT = {F32: 0.0, F16: 2.0**-22, BF16: 2.0**-16, CODES: 2.0**-22}
ROUNDED = {F32: 0.0, F16: 2.0**-11, BF16: 2.0**-8, CODES: 2.0**-11}
# Half the smallest step of fp16: the error of a number near zero.
FLOOR = {F32: 0.0, F16: 2.0**-25, BF16: 0.0, CODES: 2.0**-25}
# The same of a weight times the scale of its value; the largest such weight is 2^6.
WEIGHT_FLOOR = 2.0**-31


@dataclass(frozen=True)
class Estimate:
    """Values in float64, and how far an fp32 computation of them may be."""

    value: np.ndarray
    error: np.ndarray


def exact(value: np.ndarray) -> Estimate:
    """Take inputs as exact."""
    return Estimate(value.astype(np.float64), np.zeros(value.shape))


def normalize(x: Estimate, weight: np.ndarray, eps: float) -> Estimate:
    """RMS norm over the last axis. Squares and their sum, the inverse root (2 ulp), two products."""
    size = x.value.shape[-1]
    inverse = 1.0 / np.sqrt(np.square(x.value).mean(-1, keepdims=True) + np.float64(np.float32(eps)))
    value = weight.astype(np.float64) * x.value * inverse
    return Estimate(value, np.abs(value) * (np.sqrt(size) + 8) * ROUNDING)


def rotate(x: Estimate, cos_sin: np.ndarray, positions: np.ndarray) -> Estimate:
    """Half-split rotary of x [num_tokens, num_heads, head_dim]; two products and a sum an element."""
    angles = cos_sin.astype(np.float64)[positions][:, None]  # [num_tokens, 1, head_dim / 2, 2]
    cosine, sine = angles[..., 0], angles[..., 1]

    def turn(values: np.ndarray, sign: int) -> np.ndarray:
        first, second = np.split(values, 2, axis=-1)
        return np.concatenate((first * cosine - sign * second * sine, second * cosine + first * sine), axis=-1)

    cosine_size, sine_size = np.abs(cosine), np.abs(sine)
    value = turn(x.value, 1)
    cosine, sine = cosine_size, sine_size
    magnitude, carried = turn(np.abs(x.value), -1), turn(x.error, -1)
    return Estimate(value, carried + 3 * ROUNDING * magnitude)


def attend(
    query: Estimate,
    keys: np.ndarray,
    values: np.ndarray,
    positions: np.ndarray,
    window: int | None,
    *,
    query_error: float,
    query_floor: float,
    weight_error: float,
    tensor_cores: bool,
    value_scales: np.ndarray | None = None,
    key_error: np.ndarray | None = None,
) -> Estimate:
    """Attention of each query over the cached tokens up to its position, its own included.

    `query_error` and `weight_error` are relative errors of a query element and of a softmax weight as they enter the
    products, `query_floor` the absolute one of a scaled query element. Sums are of rounded fp32 additions, or of
    `tensor_cores`, which truncate once for 16 products. `key_error` is how far the cached keys may be from `keys`.
    Shapes: query [num_tokens, num_attention_heads, head_dim]; keys, values [num_key_value_heads, seq_len, head_dim]
            float64, key_error the same; value_scales [num_key_value_heads, seq_len] of codes; positions [num_tokens];
            result [num_tokens, num_attention_heads * head_dim]
    """
    num_tokens, num_heads, head_dim = query.value.shape
    group_size = num_heads // keys.shape[0]
    value, error = np.empty((2, num_tokens, num_heads, head_dim))
    scale = head_dim**-0.5
    for token, position in enumerate(positions):
        first = 0 if window is None else max(0, position + 1 - window)
        for head in range(num_heads):
            k = keys[head // group_size, first : position + 1]
            v = values[head // group_size, first : position + 1]
            q, q_error = query.value[token, head], query.error[token, head]
            score = scale * (k @ q)
            magnitude = scale * (np.abs(k) @ np.abs(q))
            weight = np.exp(score - score.max())
            weight /= weight.sum()
            # Of a score: the query's own error, its rounding, products and sum, then the argument of 2^x.
            score_error = (
                scale * (np.abs(k) @ q_error)
                + (query_error + sum_error(head_dim, tensor_cores) + 4 * ROUNDING) * magnitude
                + query_floor * np.abs(k).sum(-1)
                + ROUNDING * (2 * np.abs(score - score.max()) + np.abs(score) + 16)
            ).max()
            num_seen = position + 1 - first
            # Weights are wrong by that in the sum above and in the sum below the fraction; running maxima rescale.
            weights_error = 2 * (score_error + EXP2 * (4 + np.log2(num_seen))) + weight_error
            relative = weights_error + sum_error(num_seen, tensor_cores) + 16 * ROUNDING
            value[token, head] = weight @ v
            error[token, head] = relative * (weight @ np.abs(v)) + 1e-30
            if key_error is not None:
                # A score that is off by e moves the result by its weight * e * (its value - the result).
                moved = weight * (scale * (key_error[head // group_size, first : position + 1] @ np.abs(q)))
                error[token, head] += moved @ np.abs(v) + moved.sum() * np.abs(value[token, head])
            if value_scales is not None:
                scales = value_scales[head // group_size, first : position + 1, None]
                codes = np.abs(v) / np.where(scales == 0, 1.0, scales)
                error[token, head] += WEIGHT_FLOOR * weight.max() * codes.sum(0)
    return Estimate(value.reshape(num_tokens, -1), error.reshape(num_tokens, -1))


def carried_error(
    query: Estimate, keys: np.ndarray, values: np.ndarray, own_key: np.ndarray, own_value: np.ndarray
) -> np.ndarray:
    """How far attention of one token moves, to first order, by errors of its query, key and value.

    `own_key` and `own_value` are the errors of its own key and value, the last of `keys` and `values`.
    Shapes: query [num_attention_heads, head_dim]; keys, values [num_key_value_heads, seq_len, head_dim] float64;
            own_key, own_value [num_key_value_heads, head_dim]; result [num_attention_heads * head_dim]
    """
    num_heads, head_dim = query.value.shape
    group_size = num_heads // keys.shape[0]
    scale = head_dim**-0.5
    error = np.empty((num_heads, head_dim))
    for head in range(num_heads):
        kv_head = head // group_size
        k, v, q = keys[kv_head], values[kv_head], query.value[head]
        weight = np.exp(scale * (k @ q - (k @ q).max()))
        weight /= weight.sum()
        change = weight[:, None] * (v - weight @ v)  # of the result by each token's score, [seq_len, head_dim]
        error[head] = scale * np.abs(change.T @ k) @ query.error[head]
        error[head] += scale * np.abs(change[-1]) * (np.abs(q) @ own_key[kv_head]) + weight[-1] * own_value[kv_head]
    return error.reshape(-1)


def sum_error(num_terms: int, tensor_cores: bool) -> float:
    """Error of a sum relative to that of its terms' magnitudes."""
    return float(np.ceil(num_terms / 16) * 2 * ROUNDING if tensor_cores else np.sqrt(num_terms) * ROUNDING)


def cos_sin_table(max_seq_len: int, head_dim: int, theta: float = 10000.0) -> np.ndarray:
    """Angles as the runner uploads them: [max_seq_len, head_dim / 2, 2] float32."""
    inverse = (1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))).astype(np.float32)
    angles = np.arange(max_seq_len, dtype=np.float32)[:, None] * inverse
    return np.stack((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)


# A layer's KV cache for cases of kernels: floats as they are stored, or 8-bit codes with scales; and its pages.

NO_PAGE = 2**30  # reading there ends the test
Place = tuple[Any, ...]


@dataclass(frozen=True)
class Stored:
    """Vectors as a cache holds them. Shapes: elements [..., head_dim]; scales float32 [...] with codes, else None."""

    elements: np.ndarray
    scales: np.ndarray | None

    @property
    def dtype(self) -> np.dtype:
        """The type of the elements."""
        return self.elements.dtype

    @property
    def values(self) -> np.ndarray:
        """The exact values that the elements represent, in float64."""
        if self.scales is None:
            return stored_values(self.elements)
        return (self.elements.astype(np.float64) - 128) * self.scales[..., None].astype(np.float64)

    def __getitem__(self, place: Place) -> "Stored":
        return Stored(self.elements[place], None if self.scales is None else self.scales[place])

    def __setitem__(self, place: Place, other: "Stored") -> None:
        self.elements[place] = other.elements
        if self.scales is not None:
            self.scales[place] = other.scales

    def copy(self) -> "Stored":
        """A copy of both."""
        return Stored(self.elements.copy(), None if self.scales is None else self.scales.copy())

    def poison(self, place: Place) -> None:
        """Put NaN where nothing may be read; with codes, in the scales."""
        self.elements[place].view(np.uint8)[...] = 0xFF
        if self.scales is not None:
            self.scales[place].view(np.uint8)[...] = 0xFF

    def tobytes(self) -> bytes:
        """The bytes of both."""
        return self.elements.tobytes() + (b"" if self.scales is None else self.scales.tobytes())


def stored(x: np.ndarray, dtype: np.dtype) -> Stored:
    """Round vectors as the cache does: codes in float32, one operation at a time."""
    if dtype != CODES:
        return Stored(to_storage(x, dtype), None)
    cut = np.clip(x.astype(np.float32), np.float32(-65504), np.float32(65504))
    scales = np.abs(cut).max(-1) / np.float32(127)
    codes = np.rint(cut / np.where(scales == 0, np.float32(1), scales)[..., None])
    return Stored((np.clip(codes, -127, 127) + 128).astype(np.uint8), scales)


def page_table(num_rows: int, num_tokens: int, seed: int = 0) -> np.ndarray:
    """Room for `num_tokens` a row, in random order and with holes. Shapes: result int32 [num_rows, pages_per_row]."""
    pages_per_row = -(-num_tokens // PAGE_TOKENS)
    pages = np.random.default_rng(seed).permutation(num_rows * pages_per_row + 3)
    return pages[: num_rows * pages_per_row].reshape(num_rows, pages_per_row).astype(np.int32)


def share_pages(cache: Stored, table: np.ndarray, rows: list[int], num_pages: int) -> None:
    """Let all `rows` begin with the first row's tokens, in the same pages."""
    shared = slice(0, num_pages * PAGE_TOKENS)
    for row in rows[1:]:
        cache[row, :, shared] = cache[rows[0], :, shared]
        table[row, :num_pages] = table[rows[0], :num_pages]


def visible_table(table: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The same table without the pages after a row's last position."""
    visible = np.full_like(table, NO_PAGE)
    for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
        if row >= 0:
            num_pages = position // PAGE_TOKENS + 1
            visible[row, :num_pages] = table[row, :num_pages]
    return visible


def paged(cache: Stored, table: np.ndarray) -> Stored:
    """Rows [num_rows, num_key_value_heads, seq_len, head_dim] as pages; places without a token are poisoned."""
    _, num_heads, seq_len, head_dim = cache.elements.shape
    shape = (int(table.max()) + 4, num_heads, PAGE_TOKENS, head_dim)
    pages = Stored(np.zeros(shape, cache.dtype), None if cache.scales is None else np.zeros(shape[:3], np.float32))
    pages.poison((slice(None),))
    for row, index in np.ndindex(table.shape):
        tokens = cache[row, :, index * PAGE_TOKENS : min((index + 1) * PAGE_TOKENS, seq_len)]
        pages[table[row, index], :, : tokens.elements.shape[1]] = tokens
    return pages


def cache_name(dtype: np.dtype[Any]) -> str:
    """The name of the type of a cache's elements."""
    return "codes" if dtype == CODES else storage_name(dtype)


# New tokens in lanes, as append_tokens and attention_decode take them, and the right results, in float64.

EPS = 1e-5
DTYPES = tuple(np.dtype(kind) for kind in (np.float32, np.float16, np.uint16, np.uint8))
_NO_ROW = -1


@dataclass(frozen=True)
class NewTokens:
    """One call's inputs; lane i has the row `rows[i]`, whose tokens `keys` and `values` hold in order.

    Row -1 marks an unused lane. With `is_cached` the cache holds the new tokens before attention_decode runs, and
    several lanes may be of one row.
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
        """Lane, row and position of each used lane."""
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
        """The result of one lane over its row's tokens, its own included.

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
    """Normal values; NaN for tokens that no row may see yet. All rows begin with the same `shared_pages` pages."""
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
    """The same with an unused lane before and after, full of NaN."""
    lanes = slice(1, len(tokens.rows) + 1)
    qkv = np.full((lanes.stop + 1, tokens.layout.width), np.nan, np.float32)
    rows, positions = np.full(len(qkv), _NO_ROW, np.int32), np.full(len(qkv), 2**30, np.int32)
    qkv[lanes], rows[lanes], positions[lanes] = tokens.qkv, tokens.rows, tokens.positions
    return replace(tokens, qkv=qkv, rows=rows, positions=positions)


def spans_of(tokens: NewTokens, lengths: list[int]) -> NewTokens:
    """Spans of the lanes' rows: `lengths` tokens of each, one a lane, from its position on."""
    generator = np.random.default_rng(sum(lengths))
    positions = [start + np.arange(length) for start, length in zip(tokens.positions, lengths, strict=True)]
    return replace(
        tokens,
        qkv=generator.normal(size=(sum(lengths), tokens.layout.width)).astype(np.float32),
        rows=np.repeat(tokens.rows, lengths),
        positions=np.concatenate(positions).astype(np.int32),
    )


def in_cache(tokens: NewTokens) -> NewTokens:
    """The same after append_tokens has run."""
    after = append(tokens)
    return replace(tokens, keys=after.keys, values=after.values, is_cached=True)


@dataclass(frozen=True)
class Rounded:
    """Vectors as the cache stores them, and how far right bits may be from them.

    Shapes: bound of each element, and error of each represented value, as the vectors; scale_bound [..., 1] with codes
    """

    vectors: Stored
    bound: np.ndarray
    scale_bound: np.ndarray | None
    error: np.ndarray


def rounded(x: Estimate, dtype: np.dtype[Any]) -> Rounded:
    """Round vectors that are known within an error. Bounds are 0 where all possible x round alike."""
    vectors = stored(x.value, dtype)
    if vectors.scales is None:
        # Rounding is monotone: the stored value lies between the two ends, rounded.
        low, high = (stored(x.value + sign * x.error, dtype).values for sign in (-1, 1))
        bound = np.maximum(high - vectors.values, vectors.values - low)
        return Rounded(vectors, bound, None, bound)
    # A scale, and the quotient by it, are each rounded twice.
    largest = np.abs(x.value).max(-1, keepdims=True)
    scale = largest / 127
    scale_error = x.error.max(-1, keepdims=True) / 127 + 4 * ROUNDING * scale
    step = np.where(scale == 0, 1.0, scale)
    ratio = x.value / step
    ratio_error = (x.error + np.abs(ratio) * scale_error) / step + 4 * ROUNDING * np.abs(ratio)
    is_open = np.abs(np.abs(ratio - np.rint(ratio)) - 0.5) <= ratio_error
    bound = is_open.astype(np.float64)
    return Rounded(vectors, bound, scale_error, bound * scale + (np.abs(ratio) + 1) * scale_error)


@dataclass(frozen=True)
class Appended:
    """The cache with the new tokens, and how far right keys may be from it.

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
    """Arrays of a call that no kernel changes; there is a gap between rows of `qkv`."""
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


def lane_inputs(tokens: NewTokens, arrays: Arrays) -> LaneInputs:
    """The same for a launcher, from arrays on the card."""
    return LaneInputs(
        qkv=arrays["qkv"][:, : tokens.layout.width],
        layout=tokens.layout,
        q_norm=arrays.get("q_norm"),
        k_norm=arrays.get("k_norm"),
        eps=EPS,
        cos_sin=arrays.get("cos_sin"),
        rows=arrays["rows"],
        positions=arrays["positions"],
        page_table=arrays["page_table"],
        cache=cache_in(arrays),
        window=tokens.window,
    )


def cache_in(arrays: Arrays) -> LayerCache:
    """The second of the two layers of `cache_of`, on the card."""
    names = ("keys", "values", "key_scales", "value_scales")
    return LayerCache(**{name: arrays[name][1] for name in names if name in arrays})


def cache_of(tokens: NewTokens) -> dict[str, np.ndarray]:
    """Keys and values in pages as the second of two layers, so that codes need no alignment; scales with codes."""
    return _by_name(paged(tokens.keys, tokens.table), paged(tokens.values, tokens.table))


def cache_outputs(tokens: NewTokens) -> tuple[dict[str, np.ndarray], dict[str, Output]]:
    """The cache as inputs with its first contents, and as outputs that begin with them."""
    before = cache_of(tokens)
    outputs = {name: Output(array.shape, array.dtype, initial=f"{name}_before") for name, array in before.items()}
    return {f"{name}_before": array for name, array in before.items()}, outputs


def mixed_dtype(cache_dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of attention's outputs in cases: that of usual models."""
    return F32 if cache_dtype == F32 else F16


def stored_mixed(mixed: Estimate, dtype: np.dtype[Any]) -> Estimate:
    """Attention's outputs as they are stored."""
    if dtype == F32:
        return mixed
    error = mixed.error + ROUNDED[F16] * (np.abs(mixed.value) + mixed.error) + FLOOR[F16]
    return Estimate(mixed.value, error)


def expected_cache(tokens: NewTokens, after: Appended) -> dict[str, Expected]:
    """The cache after the call: keys within their bounds, all else exact."""
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
    return {name: second_layer(array) for name, array in named.items() if array is not None}


def second_layer(array: np.ndarray) -> np.ndarray:
    """The array after a layer of NaN."""
    front = np.full(array.nbytes, 0xFF, np.uint8).view(array.dtype).reshape(array.shape)
    return np.stack([front, array])
