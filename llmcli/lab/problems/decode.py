"""A layer of a decode step for one token: attention over the KV cache, then with its projections, and the MLP."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmcli.kernels import attention_decode as kernel
from llmcli.kernels.attention_decode import LaneInputs
from llmcli.kernels.device import Device
from llmcli.kernels.gemv import GATED_SCALE, gemv
from llmcli.kernels.qkv import PAGE_TOKENS, LayerCache, QkvLayout
from llmcli.kernels.spec import KernelCost
from llmcli.kernels.tiles import HALF_ROWS
from llmcli.lab import attention
from llmcli.lab.matrices import StoredMatrix
from llmcli.lab.problem import ENGINE, ROUNDING, ROUNDOFF, Arrays, Expected, Output, Problem, ProblemKind
from llmcli.lab.problems.products import input_error, multiply_row, row_scratch, sum_error, tile_inputs, tiled_matrix
from llmcli.lab.problems.rows import EPS, rms_normed

# Attention of one new token over the KV cache: rotary, append, softmax, values.

_HEAD_DIM = 128
_MANY = 1 << 16  # multiprocessors: more than any card has
_ITEMSIZE = attention.F16.itemsize


@dataclass(frozen=True)
class CachedTokens:
    """The tokens before a new one at `position`, in the cache of one layer and one row, as halves in pages.

    Shapes: keys, values [1, num_key_value_heads, position + 1, _HEAD_DIM], NaN at `position`; table int32 [1,
            pages_per_row]; cos_sin float32 [position + 1, _HEAD_DIM / 2, 2]
    """

    layout: QkvLayout
    position: int
    keys: attention.Stored
    values: attention.Stored
    table: np.ndarray
    cos_sin: np.ndarray

    @classmethod
    def random(cls, generator: np.random.Generator, layout: QkvLayout, position: int) -> "CachedTokens":
        """Normal keys and values in pages of random order."""
        shape = (1, layout.num_key_value_heads, position + 1, _HEAD_DIM)
        keys, values = (attention.stored(generator.standard_normal(shape, np.float32), attention.F16) for _ in range(2))
        for cache in (keys, values):
            cache.poison((slice(None), slice(None), position))
        table = attention.page_table(1, position + 1, seed=position)
        return cls(layout, position, keys, values, table, attention.cos_sin_table(position + 1, _HEAD_DIM))

    @property
    def cost(self) -> KernelCost:
        """The cost of the attention, without the projections. Its results are float32 here."""
        cost = kernel.attention_decode_cost([self.position + 1], self.layout, _ITEMSIZE)
        return replace(cost, written_bytes=cost.written_bytes + 2 * self.layout.q_size)

    def inputs(self) -> dict[str, np.ndarray]:
        """The cache before the call, and the arrays that locate it."""
        return {
            "cached_keys": attention.paged(self.keys, self.table).elements,
            "cached_values": attention.paged(self.values, self.table).elements,
            "page_table": self.table,
            "cos_sin": self.cos_sin,
            "rows": np.zeros(1, np.int32),
            "positions": np.full(1, self.position, np.int32),
        }

    def outputs(self) -> dict[str, Output]:
        """The cache with the new token."""
        shape = attention.paged(self.keys, self.table).elements.shape
        return {name: Output(shape, attention.F16, initial=f"cached_{name}") for name in ("keys", "values")}

    def scratch(self) -> dict[str, Output]:
        """Memory between launches: turned queries (and keys), scores, parts of splits on any card, counters."""
        layout = self.layout
        splits = kernel.max_splits(_MANY, layout, _ITEMSIZE, self._capacity)
        return {
            "queries": Output((layout.q_size,)),
            "turned": Output((layout.q_size + layout.kv_size,)),
            "scores": Output((layout.num_attention_heads, self.position + 1)),
            "partials": Output((layout.num_attention_heads * splits * (_HEAD_DIM + kernel.PARTIAL_EXTRA),)),
            "counters": Output((layout.num_attention_heads,), np.uint32, holds_zeros=True),
        }

    def expected(self, qkv: attention.Estimate) -> tuple[dict[str, Expected], attention.Estimate]:
        """The cache after the call, and the result of attention.

        Shapes: qkv [layout.width]; the result [layout.q_size]
        """
        position = np.array([self.position])
        query, key, value = (self._heads(qkv, begin, end) for begin, end in self._columns())
        query, key = (attention.rotate(one, self.cos_sin, position) for one in (query, key))
        after: dict[str, Expected] = {}
        tokens: list[np.ndarray] = []
        errors: list[np.ndarray] = []
        for name, cache, new in (("keys", self.keys, key), ("values", self.values, value)):
            bound = ROUNDOFF[attention.F16] * np.abs(new.value) + new.error + attention.FLOOR[attention.F16]
            rows, bounds = cache.values, np.zeros(cache.elements.shape)  # earlier tokens stay as they are
            rows[0, :, -1], bounds[0, :, -1] = new.value[0], bound[0]
            after[name] = Expected(self._in_pages(rows), np.nan_to_num(self._in_pages(bounds), nan=0.0))
            tokens.append(rows[0])
            errors.append(bound[0])
        mixed = attention.attend(
            attention.exact(query.value),
            keys=tokens[0],
            values=tokens[1],
            positions=position,
            window=None,
            query_error=attention.SPLIT[attention.F16],
            query_floor=attention.FLOOR[attention.F16],
            weight_error=attention.SPLIT[attention.F16],
            tensor_cores=True,
        )
        moved = attention.carried_error(attention.Estimate(query.value[0], query.error[0]), *tokens, *errors)
        return after, attention.Estimate(mixed.value[0], mixed.error[0] + moved)

    def solve(self, device: Device, arrays: Arrays) -> None:
        """The engine's kernel, from `qkv` to `mixed`."""
        layout = self.layout
        heads = kernel.grid_heads(layout, _ITEMSIZE)
        splits = kernel.max_splits(device.num_multiprocessors, layout, _ITEMSIZE, self._capacity)
        parts = (1, layout.num_attention_heads, splits, _HEAD_DIM + kernel.PARTIAL_EXTRA)
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
        kernel.attention_decode(
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

    def _in_pages(self, rows: np.ndarray) -> np.ndarray:
        """Rows [1, num_key_value_heads, seq_len, _HEAD_DIM] as pages; NaN in places without a token."""
        return attention.paged(attention.Stored(rows, None), self.table).elements

    def _columns(self) -> list[tuple[int, int]]:
        """Columns of queries, keys and values in a row of projections."""
        layout = self.layout
        ends = [layout.q_size, layout.v_offset, layout.width]
        return list(zip([0, *ends[:-1]], ends, strict=True))

    @staticmethod
    def _heads(qkv: attention.Estimate, begin: int, end: int) -> attention.Estimate:
        return attention.Estimate(*(one[begin:end].reshape(1, -1, _HEAD_DIM) for one in (qkv.value, qkv.error)))


def make_decode_cache(num_attention_heads: int, num_key_value_heads: int, position: int) -> Problem:
    """mixed = softmax(q K^T / sqrt(128)) V; q and the new token's key are rotated, and key and value appended.

    Heads have 128 dimensions. The cache holds `position` tokens before.
    Shapes: qkv float32 [(num_attention_heads + 2 * num_key_value_heads) * 128]; cos_sin float32 [position + 1, 64, 2];
            page_table int32 [1, pages_per_row]; keys, values float16 [num_pages, num_key_value_heads, 16, 128], in-out,
            `cached_keys` and `cached_values` at first; mixed float32 [num_attention_heads * 128]; scratch: see
            `CachedTokens.scratch`
    """
    layout = QkvLayout(num_attention_heads, num_key_value_heads, _HEAD_DIM)
    generator = np.random.default_rng([num_attention_heads, num_key_value_heads, position])
    tokens = CachedTokens.random(generator, layout, position)
    qkv = generator.standard_normal(layout.width, np.float32)

    def reference() -> dict[str, Expected]:
        after, mixed = tokens.expected(attention.exact(qkv))
        return {**after, "mixed": Expected(mixed.value, mixed.error)}

    return Problem(
        inputs={"qkv": qkv, **tokens.inputs()},
        outputs={"mixed": Output((layout.q_size,)), **tokens.outputs()},
        scratch=tokens.scratch(),
        reference=reference,
        cost=tokens.cost,
        solvers={ENGINE: tokens.solve},
    )


# The first half of a layer: norm, projections, attention over the cache, residual.


def make_decode_attention(
    hidden_size: int, num_attention_heads: int, num_key_value_heads: int, position: int
) -> Problem:
    """hidden += o @ mixed, mixed as decode_cache's, of qkv @ n, n = norm_weight * hidden / sqrt(mean(hidden^2) + eps).

    The weights are codes of int8, (code - 128) * scale. Heads have 128 dimensions, hidden_size is a multiple of 16.
    Shapes: hidden float32 [hidden_size], in-out, `before` at first; norm_weight float32 [hidden_size]; q_codes,
            k_codes, v_codes uint8 [heads * 128, hidden_size], and in one matrix qkv_codes; o_codes uint8 [hidden_size,
            num_attention_heads * 128]; their scales float32, one a row; qkv and o in tiles; the cache as in
            decode_cache; scratch normed, added float32 [hidden_size], qkv, mixed, that of decode_cache, and row_scratch
    """
    layout = QkvLayout(num_attention_heads, num_key_value_heads, _HEAD_DIM)
    generator = np.random.default_rng([hidden_size, num_attention_heads, num_key_value_heads, position])
    before = generator.standard_normal(hidden_size, dtype=np.float32)
    norm_weight = generator.uniform(0.5, 2, hidden_size).astype(np.float32)
    qkv = _random_codes(generator, layout.width, hidden_size)
    o = _random_codes(generator, hidden_size, layout.q_size)
    tokens = CachedTokens.random(generator, layout, position)
    parts = {
        "q": _rows_of(qkv, 0, layout.k_offset),
        "k": _rows_of(qkv, layout.k_offset, layout.v_offset),
        "v": _rows_of(qkv, layout.v_offset, layout.width),
        "qkv": qkv,
        "o": o,
    }

    def reference() -> dict[str, Expected]:
        after, mixed = tokens.expected(_product(qkv, _normed(before, norm_weight)))
        return {**after, "hidden": _added(before, _product(o, mixed))}

    def solve(device: Device, arrays: Arrays) -> None:
        """The engine's kernels; in the engine attention and the products before round what these products take."""
        hidden, norm = arrays["hidden"], {"norm_weight": arrays["norm_weight"], "eps": float(EPS)}
        multiply_row(device, arrays, tiled_matrix(qkv, arrays, "qkv_"), hidden, arrays["qkv"], **norm)
        tokens.solve(device, arrays)
        multiply_row(device, arrays, tiled_matrix(o, arrays, "o_"), arrays["mixed"], hidden, epilogue="add")

    num_weights = qkv.values.size + o.values.size
    weight_bytes = num_weights + 4 * (layout.width + hidden_size)
    cache = tokens.cost
    return Problem(
        inputs={
            "before": before,
            "norm_weight": norm_weight,
            **_code_inputs(parts),
            **tile_inputs(qkv, "qkv_"),
            **tile_inputs(o, "o_"),
            **tokens.inputs(),
        },
        outputs={"hidden": Output((hidden_size,), initial="before"), **tokens.outputs()},
        scratch={
            "normed": Output((hidden_size,)),
            "added": Output((hidden_size,)),
            "qkv": Output((layout.width,)),
            "mixed": Output((layout.q_size,)),
            **row_scratch(max(hidden_size, layout.q_size)),
            **tokens.scratch(),
        },
        reference=reference,
        cost=KernelCost(
            # The attention's own inputs and results, 4 bytes each, need not leave the card's registers.
            read_bytes=weight_bytes + cache.read_bytes - 4 * layout.width + 8 * hidden_size,
            written_bytes=cache.written_bytes - 4 * layout.q_size + 4 * hidden_size,
            flops=2 * num_weights + cache.flops,
            stored_bytes=weight_bytes + cache.stored_bytes,
        ),
        scalars={"eps": EPS},
        solvers={ENGINE: solve, "attention": tokens.solve},
    )


# The second half of a layer: norm, gate, up, SwiGLU, down, residual.

_STEEPEST = 1.1  # of silu


def make_decode_mlp(hidden_size: int, intermediate_size: int) -> Problem:
    """hidden += down @ (silu(gate @ n) * (up @ n)), n = norm_weight * hidden / sqrt(mean(hidden^2) + eps).

    The weights are codes of int8, (code - 128) * scale, with powers of two as scales. So the same weights are exact as
    halves, and one reference serves kernels for both; the least bytes are those of the codes. Both sizes are multiples
    of 16.
    Shapes: hidden float32 [hidden_size], in-out, `before` at first; norm_weight float32 [hidden_size]; gate, up float16
            and gate_codes, up_codes uint8 [intermediate_size, hidden_size], down float16 and down_codes uint8
            [hidden_size, intermediate_size]; gate_scales, up_scales, down_scales float32, one a row; the same weights
            in tiles, those of gate_up with 8 rows of each; scratch normed, added float32 [hidden_size], gate_out,
            up_out, gated float32 and gated_half float16 [intermediate_size], and row_scratch
    """
    generator = np.random.default_rng([hidden_size, intermediate_size])
    before = generator.standard_normal(hidden_size, dtype=np.float32)
    norm_weight = generator.uniform(0.5, 2, hidden_size).astype(np.float32)
    gate = _random_codes(generator, intermediate_size, hidden_size)
    up = _random_codes(generator, intermediate_size, hidden_size)
    down = _random_codes(generator, hidden_size, intermediate_size)
    matrices = {"gate": gate, "up": up, "down": down}
    gate_up = _in_turn(gate, up)

    def reference() -> dict[str, Expected]:
        normed = _normed(before, norm_weight)
        gates, ups = _product(gate, normed), _product(up, normed)
        silu = gates.value / (1 + np.exp(-gates.value))
        # An exponential of 2 ulp, a sum, a quotient, and the product: 8 roundings at the most.
        silu_bound = _STEEPEST * gates.error + 8 * ROUNDING * np.abs(silu)
        gated_bound = np.abs(ups.value) * silu_bound + (np.abs(silu) + silu_bound) * ups.error
        # The engine's exponential and quotient are faster, and the smallest results become halves over GATED_SCALE.
        gated_bound = gated_bound + 2.0**-16 * np.abs(silu * ups.value) + GATED_SCALE * attention.FLOOR[attention.F16]
        return {"hidden": _added(before, _product(down, attention.Estimate(silu * ups.value, gated_bound)))}

    def solve(device: Device, arrays: Arrays) -> None:
        """The engine's kernels; in the engine the product before rounds what gate_up takes."""
        hidden, gated = arrays["hidden"], arrays["gated_half"].reshape(1, -1)
        norm = {"norm_weight": arrays["norm_weight"], "eps": float(EPS)}
        matrix = tiled_matrix(gate_up, arrays, "gate_up_")
        multiply_row(device, arrays, matrix, hidden, gated, epilogue="swiglu", **norm)
        gemv(
            device,
            matrix=tiled_matrix(down, arrays, "down_"),
            x=gated,
            out=hidden.reshape(1, -1),
            row_scales=arrays["gated_scale"],
            epilogue="add",
        )

    num_weights = 3 * hidden_size * intermediate_size
    num_scales = 2 * intermediate_size + hidden_size
    return Problem(
        inputs={
            "before": before,
            "norm_weight": norm_weight,
            **{name: one.weights.astype(np.float16) for name, one in matrices.items()},
            **_code_inputs(matrices),
            **tile_inputs(gate_up, "gate_up_"),
            **tile_inputs(down, "down_"),
            "gated_scale": np.array([GATED_SCALE], np.float32),
        },
        outputs={"hidden": Output((hidden_size,), initial="before")},
        scratch={
            **{name: Output((hidden_size,)) for name in ("normed", "added")},
            **{name: Output((intermediate_size,)) for name in ("gate_out", "up_out", "gated")},
            "gated_half": Output((intermediate_size,), np.float16),
            **row_scratch(hidden_size),
        },
        reference=reference,
        cost=KernelCost(
            read_bytes=num_weights + 4 * num_scales + 8 * hidden_size,
            written_bytes=4 * hidden_size,
            flops=2 * num_weights,
            stored_bytes=num_weights + 4 * num_scales,
        ),
        scalars={"eps": EPS},
        solvers={ENGINE: solve},
    )


# What both halves share: matrices of int8 codes, (code - 128) * scale, with float32 scales; the norm, the residual.


def _random_codes(generator: np.random.Generator, num_rows: int, num_inputs: int) -> StoredMatrix:
    """Codes of all sizes, whose products with numbers of size 1 have about that size; scales are powers of two."""
    codes = generator.integers(1, 256, (num_rows, num_inputs), dtype=np.uint8)
    exponent = -round(float(np.log2(74 * np.sqrt(num_inputs))))
    scales = np.ldexp(np.float32(1), generator.integers(exponent - 1, exponent + 1, num_rows))
    return _int8(codes, scales.astype(np.float32)[:, None])


def _int8(codes: np.ndarray, scales: np.ndarray) -> StoredMatrix:
    return StoredMatrix("int8", codes, None, "float32", scales)


def _rows_of(matrix: StoredMatrix, begin: int, end: int) -> StoredMatrix:
    assert matrix.scales is not None
    return _int8(matrix.values[begin:end], matrix.scales[begin:end])


def _in_turn(gate: StoredMatrix, up: StoredMatrix) -> StoredMatrix:
    """Rows of both in turn, half a tile of each."""

    def join(*arrays: Any) -> np.ndarray:
        halves = [array.reshape(-1, 1, HALF_ROWS, array.shape[1]) for array in arrays]
        return np.ascontiguousarray(np.concatenate(halves, axis=1).reshape(-1, halves[0].shape[-1]))

    return _int8(join(gate.values, up.values), join(gate.scales, up.scales))


def _code_inputs(matrices: Mapping[str, StoredMatrix]) -> dict[str, np.ndarray]:
    """Codes and scales of matrices by name, as a problem's inputs."""
    inputs: dict[str, np.ndarray] = {}
    for name, matrix in matrices.items():
        assert matrix.scales is not None
        inputs |= {f"{name}_codes": matrix.values, f"{name}_scales": matrix.scales[:, 0]}
    return inputs


def _normed(x: np.ndarray, weight: np.ndarray) -> attention.Estimate:
    """The norm of one row. Half of the error of the sum of squares, then as rms_norm."""
    value = rms_normed(x, weight)
    return attention.Estimate(value, (np.sqrt(x.size) / 2 + 8) * ROUNDING * np.abs(value))


def _product(matrix: StoredMatrix, x: attention.Estimate) -> attention.Estimate:
    """The product with x, which itself may be off by its error."""
    weights = matrix.weights
    sizes = np.abs(weights)
    rounded = (np.sqrt(x.value.size) + 8) * ROUNDING * (sizes @ np.abs(x.value))
    of_inputs = sum_error(sizes, input_error(x.value)) + sum_error(sizes, x.error, 2)
    return attention.Estimate(weights @ x.value, rounded + of_inputs)


def _added(before: np.ndarray, added: attention.Estimate) -> Expected:
    """The residual stream after a product."""
    wide = before.astype(np.float64)
    bound = added.error + 2 * ROUNDING * (np.abs(wide) + np.abs(added.value))
    return Expected(wide + added.value, bound)


KINDS = (
    ProblemKind("decode_cache", "attention of one new token over the KV cache", make_decode_cache),
    ProblemKind("decode_attention", "norm, attention and residual of a layer for one token", make_decode_attention),
    ProblemKind("decode_mlp", "norm, SwiGLU and residual of a layer for one token", make_decode_mlp),
)
