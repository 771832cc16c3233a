"""attention_decode's work for many lanes, spread over a few blocks and over a whole card."""

from collections.abc import Iterator

import numpy as np

from llmcli.kernels.attention_decode import max_splits
from llmcli.kernels.attention_rows import RowsPlan
from llmcli.kernels.card_facts import TYPICAL_CARD
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.attention import DTYPES, in_cache, new_tokens, spans_of, with_unused_lanes
from llmcli.lab.cases.attention_decode import problem_of
from llmcli.lab.problem import KernelCases, Problem

_LLAMA = QkvLayout(8, 2, 64)


def _checks() -> Iterator[Problem]:
    for dtype in DTYPES[1:]:
        for head_dim in (8, 24, 64, 80, 128):
            yield problem_of(new_tokens(QkvLayout(6, 2, head_dim), dtype, [0, 1, 37, 140], norms=True), 7)
        for group_size, num_key_value_heads in ((1, 3), (7, 1)):
            layout = QkvLayout(group_size * num_key_value_heads, num_key_value_heads, 64)
            yield problem_of(new_tokens(layout, dtype, [130, 5], rotary=False), 3)
        for num_splits, num_blocks in ((1, 5), (5, 1), (5, 40)):
            tokens = new_tokens(_LLAMA, dtype, [15, 16, 127, 128, 129, 640], num_splits=num_splits)
            yield problem_of(tokens, num_blocks)
        yield problem_of(new_tokens(_LLAMA, dtype, [0, 22, 23, 200], window=23), 5)
        yield problem_of(with_unused_lanes(new_tokens(_LLAMA, dtype, [140, 3], norms=True)), 5)
        yield problem_of(in_cache(spans_of(new_tokens(_LLAMA, dtype, [125], norms=True, max_seq_len=140), [8])), 5)


def _typical() -> Problem:
    layout, dtype, seq_len = QkvLayout(32, 8, 128), DTYPES[1], 192
    num_splits = max_splits(TYPICAL_CARD.num_multiprocessors, layout, dtype.itemsize, seq_len)
    positions = np.random.default_rng(0).integers(128, seq_len, 64).tolist()
    tokens = new_tokens(layout, dtype, positions, num_splits=num_splits, max_seq_len=seq_len)
    return problem_of(tokens, RowsPlan(TYPICAL_CARD, layout, dtype.itemsize).num_blocks)


CASES = KernelCases("attention_rows", _checks, _typical)
