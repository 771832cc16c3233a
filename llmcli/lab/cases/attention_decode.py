"""Norm, rotary, cache and attention of one new token in each lane."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from llmcli.kernels.attention_decode import (
    PARTIAL_EXTRA,
    attention_decode,
    attention_decode_cost,
    grid_heads,
    max_splits,
)
from llmcli.kernels.attention_rows import RowsPlan, attention_rows
from llmcli.kernels.attention_span import attention_span, attention_span_cost
from llmcli.kernels.card_facts import TYPICAL_CARD
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.attention import (
    DTYPES,
    NewTokens,
    append,
    cache_name,
    cache_of,
    cache_outputs,
    expected_cache,
    in_cache,
    inputs_of,
    lane_inputs,
    new_tokens,
    spans_of,
    with_unused_lanes,
)
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem

_LLAMA = QkvLayout(8, 2, 64)


def problem_of(tokens: NewTokens, num_blocks: int | None = None, num_spans: int | None = None) -> Problem:
    """Attend from these tokens. Counters must be zeros again; outputs of unused lanes stay NaN.

    With `num_blocks` this is a problem of attention_rows, on at most that many blocks; with `num_spans` one of
    attention_span.
    """
    layout, dtype, num_lanes = tokens.layout, tokens.keys.dtype, len(tokens.rows)
    before, appended = (cache_of(tokens), {}) if tokens.is_cached else cache_outputs(tokens)

    def reference() -> dict[str, Expected]:
        after, query = append(tokens), tokens.query()
        values = np.full((num_lanes, layout.q_size), np.nan)
        bound = np.zeros(values.shape)
        for lane, row, _ in tokens.used():
            out = tokens.attention(lane, query, after.keys[row,], after.values[row,], after.key_error[row])
            values[lane], bound[lane] = out.value[0], out.error[0]
        expected = {"out": Expected(values, bound), "counters": Expected(np.zeros(counters.shape), 0.0)}
        return expected if tokens.is_cached else {**expected, **expected_cache(tokens, after)}

    def solve(device: Device, arrays: Arrays) -> None:
        lanes = lane_inputs(tokens, arrays)
        memory: dict[str, Any] = {name: arrays[name] for name in ("partials", "counters", "out")}
        if num_blocks is not None:
            attention_rows(device, lanes, is_cached=tokens.is_cached, **memory)
        elif num_spans is not None:
            attention_span(device, lanes, num_spans=num_spans, **memory)
        else:
            attention_decode(device, lanes, is_cached=tokens.is_cached, **memory)

    counters_shape: tuple[int, ...] = num_lanes, grid_heads(layout, dtype.itemsize)
    partials_shape = num_lanes, layout.num_attention_heads, tokens.num_splits, layout.head_dim + PARTIAL_EXTRA
    if num_blocks is not None:
        counters_shape = (num_blocks,)
        partials_shape = (
            num_blocks,
            *RowsPlan(TYPICAL_CARD, layout, dtype.itemsize).partials_shape(tokens.num_splits)[1:],
        )
    if num_spans is not None:
        counters_shape = num_lanes, layout.num_attention_heads
    counters = Output(counters_shape, np.uint32, holds_zeros=True)
    partials = Output(partials_shape)
    seen = [(row, min(position + 1, tokens.window or position + 1)) for _, row, position in tokens.used()]
    cost = attention_decode_cost([num_seen for _, num_seen in seen], layout, dtype.itemsize)
    if num_spans is not None:
        cost = attention_span_cost(seen, layout, dtype.itemsize)
    return Problem(
        "attention_rows"
        if num_blocks is not None
        else "attention_span"
        if num_spans is not None
        else "attention_decode",
        {
            "num_lanes": num_lanes,
            "num_tokens": max(num_seen for _, num_seen in seen),
            "num_attention_heads": layout.num_attention_heads,
            "num_key_value_heads": layout.num_key_value_heads,
            "head_dim": layout.head_dim,
            "num_splits": tokens.num_splits,
        },
        inputs={**inputs_of(tokens), **before},
        outputs={"out": Output((num_lanes, layout.q_size)), "counters": counters, **appended},
        scratch={"partials": partials},
        reference=reference,
        cost=cost,
        solvers={ENGINE: solve},
        label=cache_name(dtype) + (f", window {tokens.window}" if tokens.window else ""),
    )


def _checks() -> Iterator[Problem]:
    for dtype in DTYPES:
        for head_dim in (8, 24, 64, 80, 128, 256):
            yield problem_of(new_tokens(QkvLayout(6, 2, head_dim), dtype, [0, 1, 37, 140], norms=True))
        for group_size, num_key_value_heads in ((1, 3), (7, 1), (9, 1), (16, 2)):
            layout = QkvLayout(group_size * num_key_value_heads, num_key_value_heads, 64)
            yield problem_of(new_tokens(layout, dtype, [130, 5], rotary=False))
        for num_splits in (1, 5):
            yield problem_of(new_tokens(_LLAMA, dtype, [15, 16, 127, 128, 129, 640], num_splits=num_splits))
        yield problem_of(new_tokens(_LLAMA, dtype, [0, 22, 23, 200], window=23))
        yield problem_of(with_unused_lanes(new_tokens(_LLAMA, dtype, [140, 3], norms=True)))
        yield problem_of(in_cache(spans_of(new_tokens(_LLAMA, dtype, [125], norms=True, max_seq_len=140), [8])))


def _typical() -> Problem:
    layout, dtype, seq_len = QkvLayout(32, 8, 128), DTYPES[1], 2048
    num_splits = max_splits(TYPICAL_CARD.num_multiprocessors, layout, dtype.itemsize, seq_len)
    return problem_of(new_tokens(layout, dtype, [seq_len - 1], num_splits=num_splits))


CASES = KernelCases("attention_decode", _checks, _typical)
