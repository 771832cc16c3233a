"""Rounds keys and values of a prompt's tokens into their pages of the cache."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.kv_append import kv_append, kv_append_cost
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.kv_cache import CODES, Stored, cache_name, page_table, paged, stored
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem, stored_values

_ROW, _NUM_ROWS = 1, 3
_DTYPES = tuple(np.dtype(kind) for kind in (np.float32, np.float16, np.uint16, np.uint8))


def case(layout: QkvLayout, dtype: np.dtype[Any], positions: list[int], max_seq_len: int) -> Problem:
    """One row's tokens, of all magnitudes; the cache is the second of two layers, so that codes need no alignment.

    Each element is rounded once, at its place, and nothing else is written: the rest stays NaN.
    """
    generator = np.random.default_rng(len(positions))
    qkv = (10.0 ** generator.uniform(-6, 4, (len(positions), layout.width + 4))).astype(np.float32)
    qkv *= generator.choice([-1.0, 1.0], qkv.shape)
    qkv[0, layout.k_offset : layout.k_offset + layout.head_dim] = 0.0
    table = page_table(_NUM_ROWS, max_seq_len)
    nothing = _nothing(layout, dtype, max_seq_len)
    shape = paged(nothing, table).elements.shape
    outputs = {name: Output((2, *shape), dtype) for name in ("keys", "values")}
    if dtype == CODES:
        outputs |= {name: Output((2, *shape[:3])) for name in ("key_scales", "value_scales")}

    def reference() -> dict[str, Expected]:
        expected = {}
        for name, offset in (("key", layout.k_offset), ("value", layout.v_offset)):
            cache = nothing.copy()
            for index, position in enumerate(positions):
                token = qkv[index, offset : offset + layout.kv_size].reshape(-1, layout.head_dim)
                cache[_ROW, :, position] = stored(token, dtype)
            pages = paged(cache, table)
            expected[f"{name}s"] = _second_layer(pages.elements)
            if pages.scales is not None:
                expected[f"{name}_scales"] = _second_layer(pages.scales)
        return expected

    def solve(device: Device, arrays: Arrays) -> None:
        kv_append(
            device,
            qkv=arrays["qkv"][:, : layout.width],
            layout=layout,
            pages=arrays["pages"],
            positions=arrays["positions"],
            **{name: arrays[name][1] for name in outputs},
        )

    return Problem(
        "kv_append",
        {"num_tokens": len(positions), "num_key_value_heads": layout.num_key_value_heads, "head_dim": layout.head_dim},
        inputs={"qkv": qkv, "pages": table[_ROW].copy(), "positions": np.array(positions, np.int32)},
        outputs=outputs,
        reference=reference,
        cost=kv_append_cost(len(positions), layout, dtype.itemsize),
        solvers={ENGINE: solve},
        label=cache_name(dtype),
    )


def _nothing(layout: QkvLayout, dtype: np.dtype[Any], max_seq_len: int) -> Stored:
    """A cache full of NaN."""
    shape = (_NUM_ROWS, layout.num_key_value_heads, max_seq_len, layout.head_dim)
    cache = stored(np.zeros(shape, np.float32), dtype)
    cache.poison((slice(None),))
    return cache


def _second_layer(array: np.ndarray) -> Expected:
    """Exactly these elements, behind a layer that nobody wrote."""
    untouched = np.full(array.nbytes, 0xFF, np.uint8).view(array.dtype).reshape(array.shape)
    return Expected(stored_values(np.stack([untouched, array])), 0.0)


def _checks() -> Iterator[Problem]:
    for dtype in _DTYPES:
        for head_dim in (8, 24, 64, 80, 128, 256):
            yield case(QkvLayout(24, 3, head_dim), dtype, [0, 99], 100)
        yield case(QkvLayout(8, 2, 64), dtype, list(range(7, 137)), 200)


CASES = KernelCases("kv_append", _checks, partial(case, QkvLayout(32, 8, 128), _DTYPES[1], list(range(512)), 512))
