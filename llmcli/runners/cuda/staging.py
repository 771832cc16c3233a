"""What the card holds of weights on their way: slots for pieces of tensors, and room to convert an embedding."""

from collections.abc import Iterator

import numpy as np

from llmcli.checkpoint.layout import EMBEDDING
from llmcli.kernels.repack import row_bytes
from llmcli.kernels.tiles import TILE_ROWS, tile_layout
from llmcli.runners.cuda.matrices import MatrixPlan, ModelMatrices, Segment
from llmcli.runners.cuda.regions import ARRAY_DTYPES, Region
from llmcli.runners.cuda.stored import StoredModel

# One thread copies about 10 GB/s out of the page cache; eight keep a PCIe 5 bus busy. Pinned memory is slow to get.
NUM_SLOTS = 8
SLOT_BYTES = 32 * 2**20

_MOST_TENSORS_A_LAYER = 40  # seven matrices in four parts each, biases and norms


def rows_of_piece(pitch: int) -> int:
    """Rows of `pitch` bytes that go to the card together: whole tiles, as many as fit a slot but at least one."""
    return max(SLOT_BYTES // pitch // TILE_ROWS, 1) * TILE_ROWS


def staging_regions(stored: StoredModel, matrices: ModelMatrices) -> Iterator[Region]:
    """The arrays `slot 0` and so on, `scratch` for an embedding's tiles, and `flags`, one for each tensor."""
    config = stored.config
    embedding_pitch = config.hidden_size * ARRAY_DTYPES[stored.dtypes[EMBEDDING]].itemsize
    embedding_rows = min(rows_of_piece(embedding_pitch), config.vocab_size)
    largest = max(
        _largest_part(config.vocab_size, embedding_pitch),
        *(_largest_piece(stored, matrix, segment) for matrix in matrices for segment in matrix.segments),
    )
    for index in range(NUM_SLOTS):
        yield Region(f"slot {index}", (largest,), np.dtype(np.uint8))
    scratch = tile_layout(stored.embedding_type, embedding_rows, config.hidden_size)
    yield Region("scratch", (scratch.arena_bytes,), np.dtype(np.uint8))
    yield Region("flags", (config.num_hidden_layers * _MOST_TENSORS_A_LAYER + 8,), np.dtype(np.int32))


def _largest_piece(stored: StoredModel, matrix: MatrixPlan, segment: Segment) -> int:
    form, num_inputs = stored.format_of(segment.module), matrix.layout.num_inputs
    pitches = [row_bytes("float32", num_inputs)]  # what a neighbour's format makes of it, if there is such a one
    if form == matrix.format:
        if form.scheme is None:
            pitches = [row_bytes(stored.dtypes[f"{segment.module}.weight"], num_inputs)]
        else:
            # A row of scales, or of zero points for several rows.
            pitches = [row_bytes(form.weight_type, num_inputs), 4 * form.scheme.num_groups(num_inputs)]
    return max(_largest_part(segment.num_rows, pitch) for pitch in pitches)


def _largest_part(num_rows: int, pitch: int) -> int:
    return min(num_rows * pitch, max(SLOT_BYTES, TILE_ROWS * pitch))
