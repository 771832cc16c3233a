"""Attention of new tokens over the cache, a few to each row; before it, new tokens appended."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from llmcli.kernels import attention_decode as kernel
from llmcli.kernels.attention_decode import append_tokens, append_tokens_cost
from llmcli.kernels.attention_rings import RowsPlan, attention_rows, attention_span, attention_span_cost
from llmcli.kernels.device import Device
from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.kernels.qkv import QkvLayout
from llmcli.kernels.stage_wide import UNIT_INPUTS, ImageRows, image_bytes
from llmcli.lab import attention
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import image_of

_LLAMA, _LARGE = QkvLayout(8, 2, 64), QkvLayout(32, 8, 128)

# append_tokens: norms and rotates new keys, and appends them and new values to the cache. Queries stay where they are:
# their sums, normed and rotated, if a case has them.


def append_case(
    tokens: attention.NewTokens, num_parts: int = 0, *, norms_queries: bool = False, rotates_queries: bool = False
) -> Problem:
    """Append these tokens after adding some parts to them; the cache's other contents stay."""
    layout, dtype = tokens.layout, tokens.keys.dtype
    first, (before, outputs) = tokens.qkv, attention.cache_outputs(tokens)
    given = {**attention.inputs_of(tokens), **before}
    has_queries = num_parts > 0 or norms_queries or rotates_queries
    if num_parts:
        given["parts"] = _parts_of(tokens, num_parts)
        tokens = replace(tokens, qkv=_total(first, given["parts"]))
    if has_queries:
        given["qkv_before"] = given.pop("qkv")[:, : layout.width]
        outputs["qkv"] = Output(first.shape, initial="qkv_before")

    def reference() -> dict[str, Expected]:
        expected = attention.expected_cache(tokens, attention.append(tokens))
        if has_queries:
            made = replace(
                tokens,
                q_norm=tokens.q_norm if norms_queries else None,
                cos_sin=tokens.cos_sin if rotates_queries else None,
            ).query()
            values, bound, used = first.astype(np.float64), np.zeros(first.shape), tokens.rows >= 0
            for array, of_queries in ((values, made.value), (bound, made.error)):
                array[used, : layout.q_size] = of_queries.reshape(len(first), -1)[used]
            expected["qkv"] = Expected(values, bound)
        return expected

    def solve(device: Device, arrays: Arrays) -> None:
        append_tokens(
            device,
            attention.lane_inputs(tokens, arrays),
            parts=arrays.get("parts"),
            norms_queries=norms_queries,
            rotates_queries=rotates_queries,
        )

    return Problem(
        "append_tokens",
        {
            "num_lanes": len(tokens.rows),
            "num_key_value_heads": layout.num_key_value_heads,
            "head_dim": layout.head_dim,
        },
        inputs=given,
        outputs=outputs,
        reference=reference,
        cost=append_tokens_cost(len(tokens.used()), layout, dtype.itemsize, num_parts, has_queries),
        solvers={ENGINE: solve},
        label=attention.cache_name(dtype),
    )


def _append_checks() -> Iterator[Problem]:
    for dtype in attention.DTYPES:
        for head_dim in (8, 24, 64, 80, 128, 256):
            layout = QkvLayout(9, 3, head_dim)
            tokens = attention.new_tokens(layout, dtype, [0, 15, 16, 100], norms=True, magnitude=3.0)
            for norms, rotates in ((False, False), (True, False), (True, True)):
                yield append_case(tokens, norms_queries=norms, rotates_queries=rotates)
        for norms, rotates in ((False, True), (True, False), (False, False)):
            yield append_case(attention.new_tokens(_LLAMA, dtype, [3, 70, 0], norms=norms, rotary=rotates))
        unused = attention.with_unused_lanes(attention.new_tokens(_LLAMA, dtype, [3, 70], norms=True))
        for num_parts in (0, 3):
            yield append_case(unused, num_parts)
            yield append_case(unused, num_parts, norms_queries=True, rotates_queries=True)
        for num_parts in (1, 4, 7):
            yield append_case(attention.new_tokens(QkvLayout(9, 3, 24), dtype, [0, 15, 16, 100], norms=True), num_parts)
        yield append_case(attention.new_tokens(QkvLayout(9, 3, 24), dtype, [16], norms=True), 3)


APPEND_TOKENS = KernelCases(
    "append_tokens", _append_checks, lambda: append_case(attention.new_tokens(_LARGE, attention.DTYPES[1], [512] * 8))
)


# attention_decode: norm, rotary, cache and attention of one new token in each lane. attention_rows does the same for
# many lanes, spread over a few blocks and over a whole card; attention_span where several lanes belong to one row.


def decode_case(tokens: attention.NewTokens) -> Problem:
    """Attend from these tokens by attention_decode."""
    layout, num_heads = tokens.layout, tokens.layout.num_attention_heads
    return _attention_case(
        "attention_decode",
        tokens,
        lambda *given, **memory: kernel.attention_decode(*given, is_cached=tokens.is_cached, **memory),
        counters=(len(tokens.rows), kernel.grid_heads(layout, tokens.keys.dtype.itemsize)),
        partials=(len(tokens.rows), num_heads, tokens.num_splits, layout.head_dim + kernel.PARTIAL_EXTRA),
    )


def rows_case(
    tokens: attention.NewTokens, num_blocks: int, *, unit_inputs: int = 0, first_token: int = 0, num_parts: int = 0
) -> Problem:
    """Attend from these tokens by attention_rows, on at most that many blocks, after adding some parts to them.

    With `unit_inputs` their outputs go into an image for such units, from `first_token` on.
    """
    plan, given = RowsPlan(TYPICAL_CARD, tokens.layout, tokens.keys.dtype.itemsize), {}
    if num_parts:
        given = {"qkv": tokens.qkv, "parts": _parts_of(tokens, num_parts)}
        tokens = replace(tokens, qkv=_total(**given))

    def launch(*given: Any, out: Any, **memory: Any) -> None:
        rows = ImageRows(out.view(np.uint8), first_token, unit_inputs) if unit_inputs else out
        attention_rows(*given, out=rows, **memory)

    problem = _attention_case(
        "attention_rows",
        tokens,
        launch,
        counters=(num_blocks,),
        partials=(num_blocks, *plan.partials_shape(tokens.num_splits)[1:]),
    )
    cost = kernel.attention_decode_cost(
        [seen for _, seen in _seen(tokens)], tokens.layout, tokens.keys.dtype.itemsize, num_parts
    )
    problem = replace(problem, inputs={**problem.inputs, **given}, cost=cost)
    return _as_image(problem, tokens, unit_inputs, first_token) if unit_inputs else problem


def _parts_of(tokens: attention.NewTokens, num_parts: int) -> np.ndarray:
    generator = np.random.default_rng(num_parts)
    return generator.standard_normal((num_parts, *tokens.qkv.shape)).astype(np.float32)


def _total(qkv: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """The sum with all parts, added in order. Shapes: qkv, result [R, width]; parts [num_parts, R, width]"""
    total = qkv.copy()
    for part in parts:
        total += part
    return total


def _as_image(problem: Problem, tokens: attention.NewTokens, unit_inputs: int, first_token: int) -> Problem:
    """The problem with its rows in an image whose other tokens stay zeros."""
    num_rows, width = first_token + len(tokens.rows), tokens.layout.q_size

    def reference() -> dict[str, Expected]:
        expected = problem.reference()
        out, padding = expected["out"], ((first_token, 0), (0, 0))
        rows = (np.pad(some, padding) for some in (out.values, np.broadcast_to(out.bound, out.values.shape)))
        return {**expected, "out": Expected(*(image_of(some, unit_inputs, np.float64) for some in rows))}

    out = Output((image_bytes(width, num_rows) // 2,), np.float16, holds_zeros=True)
    label = f"{problem.label}, image of units of {unit_inputs} from token {first_token} on"
    return replace(problem, reference=reference, outputs={**problem.outputs, "out": out}, label=label)


def span_case(tokens: attention.NewTokens, num_spans: int) -> Problem:
    """Attend from these tokens, those of `num_spans` rows, by attention_span."""
    layout, num_heads = tokens.layout, tokens.layout.num_attention_heads
    problem = _attention_case(
        "attention_span",
        tokens,
        lambda *given, **memory: attention_span(*given, num_spans=num_spans, **memory),
        counters=(len(tokens.rows), num_heads),
        partials=(len(tokens.rows), num_heads, tokens.num_splits, layout.head_dim + kernel.PARTIAL_EXTRA),
    )
    return replace(problem, cost=attention_span_cost(_seen(tokens), layout, tokens.keys.dtype.itemsize))


def _seen(tokens: attention.NewTokens) -> list[tuple[int, int]]:
    """The row of each used lane, and how many tokens it sees."""
    return [(row, min(position + 1, tokens.window or position + 1)) for _, row, position in tokens.used()]


def _attention_case(
    stem: str,
    tokens: attention.NewTokens,
    launcher: Callable[..., None],
    *,
    counters: tuple[int, ...],
    partials: tuple[int, ...],
) -> Problem:
    """Counters, of this shape, must be zeros again; outputs of unused lanes stay NaN."""
    layout, dtype, num_lanes = tokens.layout, tokens.keys.dtype, len(tokens.rows)
    before, appended = (attention.cache_of(tokens), {}) if tokens.is_cached else attention.cache_outputs(tokens)

    def reference() -> dict[str, Expected]:
        after, query = attention.append(tokens), tokens.query()
        values = np.full((num_lanes, layout.q_size), np.nan)
        bound = np.zeros(values.shape)
        for lane, row, _ in tokens.used():
            out = tokens.attention(lane, query, after.keys[row,], after.values[row,], after.key_error[row])
            out = attention.stored_mixed(out, attention.mixed_dtype(dtype))
            values[lane], bound[lane] = out.value[0], out.error[0]
        expected = {"out": Expected(values, bound), "counters": Expected(np.zeros(counters), 0.0)}
        return expected if tokens.is_cached else {**expected, **attention.expected_cache(tokens, after)}

    def solve(device: Device, arrays: Arrays) -> None:
        memory = {name: arrays[name] for name in ("partials", "counters", "out", "parts") if name in arrays}
        launcher(device, attention.lane_inputs(tokens, arrays), **memory)

    seen = [num_seen for _, num_seen in _seen(tokens)]
    return Problem(
        stem,
        {
            "num_lanes": num_lanes,
            "num_tokens": max(seen),
            "num_attention_heads": layout.num_attention_heads,
            "num_key_value_heads": layout.num_key_value_heads,
            "head_dim": layout.head_dim,
            "num_splits": tokens.num_splits,
        },
        inputs={**attention.inputs_of(tokens), **before},
        outputs={
            "out": Output((num_lanes, layout.q_size), attention.mixed_dtype(dtype)),
            "counters": Output(counters, np.uint32, holds_zeros=True),
            **appended,
        },
        scratch={"partials": Output(partials)},
        reference=reference,
        cost=kernel.attention_decode_cost(seen, layout, dtype.itemsize),
        solvers={ENGINE: solve},
        label=attention.cache_name(dtype) + (f", window {tokens.window}" if tokens.window else ""),
    )


def _decode_checks() -> Iterator[Problem]:
    for dtype in attention.DTYPES:
        for head_dim in (8, 24, 64, 80, 128, 256):
            yield decode_case(attention.new_tokens(QkvLayout(6, 2, head_dim), dtype, [0, 1, 37, 140], norms=True))
        for group_size, num_key_value_heads in ((1, 3), (7, 1), (9, 1), (16, 2)):
            layout = QkvLayout(group_size * num_key_value_heads, num_key_value_heads, 64)
            yield decode_case(attention.new_tokens(layout, dtype, [130, 5], rotary=False))
        for num_splits in (1, 5):
            yield decode_case(attention.new_tokens(_LLAMA, dtype, [15, 16, 127, 128, 129, 640], num_splits=num_splits))
        yield decode_case(attention.new_tokens(_LLAMA, dtype, [0, 22, 23, 200], window=23))
        yield decode_case(attention.with_unused_lanes(attention.new_tokens(_LLAMA, dtype, [140, 3], norms=True)))
        yield decode_case(
            attention.in_cache(
                attention.spans_of(attention.new_tokens(_LLAMA, dtype, [125], norms=True, max_seq_len=140), [8])
            )
        )


def _rows_checks() -> Iterator[Problem]:
    for dtype in attention.DTYPES[1:]:
        for head_dim in (8, 24, 64, 80, 128):
            yield rows_case(attention.new_tokens(QkvLayout(6, 2, head_dim), dtype, [0, 1, 37, 140], norms=True), 7)
        for group_size, num_key_value_heads in ((1, 3), (7, 1)):
            layout = QkvLayout(group_size * num_key_value_heads, num_key_value_heads, 64)
            yield rows_case(attention.new_tokens(layout, dtype, [130, 5], rotary=False), 3)
        for num_splits, num_blocks in ((1, 5), (5, 1), (5, 40)):
            tokens = attention.new_tokens(_LLAMA, dtype, [15, 16, 127, 128, 129, 640], num_splits=num_splits)
            yield rows_case(tokens, num_blocks)
        yield rows_case(attention.new_tokens(_LLAMA, dtype, [0, 22, 23, 200], window=23), 5)
        yield rows_case(attention.with_unused_lanes(attention.new_tokens(_LLAMA, dtype, [140, 3], norms=True)), 5)
    for unit_inputs, first_token in zip(UNIT_INPUTS, (0, 3, 126), strict=True):
        tokens = attention.new_tokens(_LLAMA, attention.DTYPES[1], [15, 16, 127, 640], num_splits=5)
        yield rows_case(tokens, 5, unit_inputs=unit_inputs, first_token=first_token)
        tokens = attention.new_tokens(QkvLayout(4, 1, 96), attention.DTYPES[2], [3, 0, 70], num_splits=1)
        yield rows_case(tokens, 3, unit_inputs=unit_inputs, first_token=first_token)
    for num_parts, layout, positions, num_blocks in (
        (3, QkvLayout(8, 2, 64), [15, 16, 640], 5),
        (1, QkvLayout(6, 1, 64), [140, 15, 300], 1),  # one block takes whole rows of one split, two and three
    ):
        tokens = attention.new_tokens(layout, attention.DTYPES[1], positions, norms=True, num_splits=5)
        yield rows_case(tokens, num_blocks, num_parts=num_parts)


def _span_checks() -> Iterator[Problem]:
    for dtype in attention.DTYPES[1:]:
        for head_dim in (8, 24, 80, 128):
            tokens = attention.new_tokens(QkvLayout(6, 2, head_dim), dtype, [0, 37], norms=True, max_seq_len=50)
            yield span_case(attention.spans_of(tokens, [8, 3]), 2)
        for group_size in (1, 7):
            tokens = attention.new_tokens(QkvLayout(group_size, 1, 64), dtype, [125], rotary=False, max_seq_len=140)
            yield span_case(attention.spans_of(tokens, [8]), 1)
        for num_splits, start in ((1, 200), (5, 636), (2, 508)):  # after 511 two splits grow
            tokens = attention.new_tokens(_LLAMA, dtype, [start], num_splits=num_splits, max_seq_len=start + 8)
            yield span_case(attention.spans_of(tokens, [8]), 1)
        tokens = attention.new_tokens(_LLAMA, dtype, [22, 200], window=23, max_seq_len=208)
        yield span_case(attention.spans_of(tokens, [2, 6]), 2)
        tokens = attention.new_tokens(_LLAMA, dtype, [140], norms=True, max_seq_len=150)
        yield span_case(attention.with_unused_lanes(attention.spans_of(tokens, [5])), 1)


def _typical_tokens(seq_len: int, positions: list[int]) -> attention.NewTokens:
    """Tokens of a large layer on a typical card, in halves."""
    num_splits = kernel.max_splits(TYPICAL_CARD.num_multiprocessors, _LARGE, attention.DTYPES[1].itemsize, seq_len)
    return attention.new_tokens(_LARGE, attention.DTYPES[1], positions, num_splits=num_splits, max_seq_len=seq_len)


def _typical_rows() -> Problem:
    positions = np.random.default_rng(0).integers(128, 192, 64).tolist()
    num_blocks = RowsPlan(TYPICAL_CARD, _LARGE, attention.DTYPES[1].itemsize).num_blocks
    return rows_case(_typical_tokens(192, positions), num_blocks)


ATTENTION_DECODE = KernelCases("attention_decode", _decode_checks, lambda: decode_case(_typical_tokens(2048, [2047])))
ATTENTION_ROWS = KernelCases("attention_rows", _rows_checks, _typical_rows)
ATTENTION_SPAN = KernelCases(
    "attention_span", _span_checks, lambda: span_case(attention.spans_of(_typical_tokens(2048, [2040]), [8]), 1)
)
