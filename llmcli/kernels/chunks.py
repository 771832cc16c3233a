"""The chunks into which a product's inputs are cut. The matrix alone decides them: so any kernel gives the same bits.

A chunk is one chain of products in the tensor cores; the chunks' sums are added in order. One row needs several chains
on each multiprocessor, as a chain advances by one product at a time. Many tokens want few: sums are written and added.
"""

from llmcli.kernels.tiles import TileLayout

SPAN_INPUTS = 128  # a chunk has whole spans
# A row of few inputs takes as long as its chain, so it has more chunks.
_MOST_CHUNKS, _MOST_OF_SHORT_ROWS, _SHORT_SPANS = 4, 8, 64
# The fewest chains of a matrix: some eight of each multiprocessor of a large card. A chunk of int4 is read in half the
# time (docs/log/2026-11-28-one-arithmetic.md).
_FEWEST_CHAINS, _FEWEST_OF_INT4 = 1024, 3072


def num_spans(layout: TileLayout) -> int:
    """Spans of a row's inputs."""
    return -(-layout.num_inputs // SPAN_INPUTS)


def num_chunks(layout: TileLayout, *, is_gated: bool = False) -> int:
    """The chunks of a matrix: a power of two. Gate and up, whose outputs are multiplied, have one."""
    is_short = layout.weight_type == "int4" or num_spans(layout) <= _SHORT_SPANS
    most = 1 if is_gated else min(_MOST_OF_SHORT_ROWS if is_short else _MOST_CHUNKS, num_spans(layout))
    fewest_chains = _FEWEST_OF_INT4 if layout.weight_type == "int4" else _FEWEST_CHAINS
    chunks = 1
    while 2 * chunks <= most and chunks * layout.num_tiles < fewest_chains:
        chunks *= 2
    return chunks
