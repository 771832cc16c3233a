"""attention_decode's work where several lanes belong to one row."""

from collections.abc import Iterator

from llmcli.kernels.attention_decode import max_splits
from llmcli.kernels.card_facts import TYPICAL_CARD
from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.attention import DTYPES, new_tokens, spans_of, with_unused_lanes
from llmcli.lab.cases.attention_decode import problem_of
from llmcli.lab.problem import KernelCases, Problem

_LLAMA = QkvLayout(8, 2, 64)


def _checks() -> Iterator[Problem]:
    for dtype in DTYPES[1:]:
        for head_dim in (8, 24, 80, 128):
            tokens = new_tokens(QkvLayout(6, 2, head_dim), dtype, [0, 37], norms=True, max_seq_len=50)
            yield problem_of(spans_of(tokens, [8, 3]), num_spans=2)
        for group_size in (1, 7):
            tokens = new_tokens(QkvLayout(group_size, 1, 64), dtype, [125], rotary=False, max_seq_len=140)
            yield problem_of(spans_of(tokens, [8]), num_spans=1)
        for num_splits, start in ((1, 200), (5, 636), (2, 508)):  # after 511 two splits grow
            tokens = new_tokens(_LLAMA, dtype, [start], num_splits=num_splits, max_seq_len=start + 8)
            yield problem_of(spans_of(tokens, [8]), num_spans=1)
        tokens = new_tokens(_LLAMA, dtype, [22, 200], window=23, max_seq_len=208)
        yield problem_of(spans_of(tokens, [2, 6]), num_spans=2)
        tokens = new_tokens(_LLAMA, dtype, [140], norms=True, max_seq_len=150)
        yield problem_of(with_unused_lanes(spans_of(tokens, [5])), num_spans=1)


def _typical() -> Problem:
    layout, dtype, seq_len = QkvLayout(32, 8, 128), DTYPES[1], 2048
    num_splits = max_splits(TYPICAL_CARD.num_multiprocessors, layout, dtype.itemsize, seq_len)
    tokens = new_tokens(layout, dtype, [seq_len - 8], num_splits=num_splits, max_seq_len=seq_len)
    return problem_of(spans_of(tokens, [8]), num_spans=1)


CASES = KernelCases("attention_span", _checks, _typical)
