"""Activations in fp16 by NumPy, in the order of kernels/common/wide_image.cuh."""

import numpy as np
from numpy.typing import DTypeLike

from llmcli.kernels.stage_wide import IMAGE_TOKENS, STEP_INPUTS, image_bytes, num_steps

_RUN = 16  # neighbouring inputs of a lane


def image_of(values: np.ndarray, unit_inputs: int, dtype: DTypeLike = np.float16) -> np.ndarray:
    """The image of these tokens, for a matrix with such units. Elements of tokens that do not exist are zeros.

    Shapes: values [num_tokens, num_inputs]; result in `dtype`, flat
    """
    num_tokens, num_inputs = values.shape
    steps = num_steps(num_inputs)
    blocks = image_bytes(num_inputs, num_tokens) // (2 * IMAGE_TOKENS * STEP_INPUTS * steps)
    padded = np.zeros((blocks * IMAGE_TOKENS, steps * STEP_INPUTS), dtype)
    padded[:num_tokens, :num_inputs] = values
    # A unit has `parts` runs of each of four lanes, side by side; a step takes one run of each lane.
    parts = unit_inputs // (4 * _RUN)
    runs = padded.reshape(blocks, IMAGE_TOKENS, -1, 4, parts, 8, 2)  # block, token, unit, lane, part, piece, pair
    pieces = runs.transpose(0, 2, 4, 1, 5, 3, 6).reshape(blocks, steps, IMAGE_TOKENS, 8, 8)
    places = np.arange(8) ^ np.arange(IMAGE_TOKENS)[:, None] % 8
    image = np.empty_like(pieces)
    np.put_along_axis(image, np.broadcast_to(places[..., None], pieces.shape), pieces, axis=3)
    return image.reshape(-1)
