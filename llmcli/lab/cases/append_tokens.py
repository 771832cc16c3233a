"""Norms and rotates new keys, and appends them and new values to the cache."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from llmcli.kernels.append_tokens import append_tokens, append_tokens_cost
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.attention import (
    DTYPES,
    NewTokens,
    append,
    cache_name,
    cache_outputs,
    expected_cache,
    inputs_of,
    lane_inputs,
    new_tokens,
    with_unused_lanes,
)
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem


def problem_of(tokens: NewTokens, num_parts: int = 0) -> Problem:
    """Append these tokens after adding some parts to them; the cache's other contents stay."""
    layout, dtype = tokens.layout, tokens.keys.dtype
    first, (before, outputs) = tokens.qkv, cache_outputs(tokens)
    given = {**inputs_of(tokens), **before}
    if num_parts:
        generator = np.random.default_rng(num_parts)
        given["parts"] = generator.standard_normal((num_parts, *first.shape)).astype(np.float32)
        total = first.copy()
        for part in given["parts"]:
            total += part
        tokens = replace(tokens, qkv=total)
        given["qkv_before"] = given.pop("qkv")[:, : layout.width]
        outputs["qkv"] = Output(first.shape, initial="qkv_before")

    def reference() -> dict[str, Expected]:
        expected = expected_cache(tokens, append(tokens))
        if num_parts:
            sums, used = first.copy(), tokens.rows >= 0
            sums[used, : layout.q_size] = tokens.qkv[used, : layout.q_size]
            expected["qkv"] = Expected(sums.astype(np.float64), np.zeros(sums.shape))
        return expected

    def solve(device: Device, arrays: Arrays) -> None:
        append_tokens(device, lane_inputs(tokens, arrays), parts=arrays.get("parts"))

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
        cost=append_tokens_cost(len(tokens.used()), layout, dtype.itemsize, num_parts),
        solvers={ENGINE: solve},
        label=cache_name(dtype),
    )


def _checks() -> Iterator[Problem]:
    for dtype in DTYPES:
        for head_dim in (8, 24, 64, 80, 128, 256):
            layout = QkvLayout(9, 3, head_dim)
            yield problem_of(new_tokens(layout, dtype, [0, 15, 16, 100], norms=True, magnitude=3.0))
        for norms, rotary in ((False, True), (True, False), (False, False)):
            yield problem_of(new_tokens(QkvLayout(8, 2, 64), dtype, [3, 70, 0], norms=norms, rotary=rotary))
        unused = with_unused_lanes(new_tokens(QkvLayout(8, 2, 64), dtype, [3, 70], norms=True))
        yield from (problem_of(unused, num_parts) for num_parts in (0, 3))
        for num_parts in (1, 4, 7):
            yield problem_of(new_tokens(QkvLayout(9, 3, 24), dtype, [0, 15, 16, 100], norms=True), num_parts)
        yield problem_of(new_tokens(QkvLayout(9, 3, 24), dtype, [16], norms=True), 3)


def _typical() -> Problem:
    return problem_of(new_tokens(QkvLayout(32, 8, 128), DTYPES[1], [512] * 8))


CASES = KernelCases("append_tokens", _checks, _typical)
