"""Norms and rotates new keys, and appends them and new values to the cache."""

from collections.abc import Iterator

from llmcli.kernels.append_tokens import append_tokens, append_tokens_cost
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.kv_cache import cache_name
from llmcli.lab.new_tokens import (
    DTYPES,
    EPS,
    NewTokens,
    append,
    cache_outputs,
    expected_cache,
    inputs_of,
    new_tokens,
    with_unused_lanes,
)
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Problem


def problem_of(tokens: NewTokens) -> Problem:
    """Append these tokens; what else the cache holds stays."""
    layout, dtype = tokens.layout, tokens.keys.dtype
    before, outputs = cache_outputs(tokens)

    def reference() -> dict[str, Expected]:
        return expected_cache(tokens, append(tokens))

    def solve(device: Device, arrays: Arrays) -> None:
        append_tokens(
            device,
            qkv=arrays["qkv"][:, : layout.width],
            layout=layout,
            k_norm=arrays.get("k_norm"),
            eps=EPS,
            cos_sin=arrays.get("cos_sin"),
            rows=arrays["rows"],
            positions=arrays["positions"],
            page_table=arrays["page_table"],
            **{name: arrays[name][1] for name in outputs},
        )

    return Problem(
        "append_tokens",
        {
            "num_lanes": len(tokens.rows),
            "num_key_value_heads": layout.num_key_value_heads,
            "head_dim": layout.head_dim,
        },
        inputs={**inputs_of(tokens), **before},
        outputs=outputs,
        reference=reference,
        cost=append_tokens_cost(len(tokens.used()), layout, dtype.itemsize),
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
        yield problem_of(with_unused_lanes(new_tokens(QkvLayout(8, 2, 64), dtype, [3, 70], norms=True)))


def _typical() -> Problem:
    return problem_of(new_tokens(QkvLayout(32, 8, 128), DTYPES[1], [512] * 8))


CASES = KernelCases("append_tokens", _checks, _typical)
