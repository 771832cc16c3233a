"""Activations in fp16 by NumPy, in the order of kernels/common/wide_image.cuh."""

import numpy as np
from numpy.typing import DTypeLike

from llmcli.kernels.stage_wide import IMAGE_TOKENS, STEP_INPUTS, image_bytes, num_steps


def image_of(values: np.ndarray, unit_inputs: int, dtype: DTypeLike = np.float16) -> np.ndarray:
    """The image of these tokens, for a matrix with such units. Elements of tokens that do not exist are zeros.

    Shapes: values [num_tokens, num_inputs]; result in `dtype`, flat
    """
    num_tokens, num_inputs = values.shape
    steps = num_steps(num_inputs)
    blocks = image_bytes(num_inputs, num_tokens) // (2 * IMAGE_TOKENS * STEP_INPUTS * steps)
    padded = np.zeros((blocks * IMAGE_TOKENS, steps * STEP_INPUTS), dtype)
    padded[:num_tokens, :num_inputs] = values
    # A unit has a run of so many neighbours for each of four lanes. A k-step takes four inputs of each lane: two pairs,
    # which are the same word of two pieces. Four k-steps are a step.
    column = np.arange(steps * STEP_INPUTS)
    unit, lane, place = column // unit_inputs, column % unit_inputs // (unit_inputs // 4), column % (unit_inputs // 4)
    k_step = unit * (unit_inputs // 16) + place // 4
    piece, element = k_step % 4 * 2 + place % 4 // 2, 2 * lane + place % 2
    token = np.arange(blocks * IMAGE_TOKENS)[:, None]
    row = (token // IMAGE_TOKENS * steps + k_step // 4) * IMAGE_TOKENS + token % IMAGE_TOKENS
    image = np.empty(padded.size, dtype)
    image[row * STEP_INPUTS + (piece ^ token % 8) * 8 + element] = padded
    return image
