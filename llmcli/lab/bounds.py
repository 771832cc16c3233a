"""Bounds of errors that several references share."""

from typing import Any

import numpy as np

from llmcli.lab.problem import ROUNDOFF


def sum_bound(reference: np.ndarray, magnitude: np.ndarray, num_terms: int, dtype: Any) -> np.ndarray:
    """How far a correct fp32 sum of `num_terms` products, rounded once to `dtype`, may lie from `reference`.

    `magnitude` is the sum of the products' absolute values.
    """
    return np.asarray(2 * ROUNDOFF[np.dtype(dtype)] * np.abs(reference) + np.sqrt(num_terms) * 2.0**-24 * magnitude)


def truncated_sum_bound(x: np.ndarray, weights: np.ndarray, span: int) -> np.ndarray:
    """How far sums of the tensor cores may lie from x @ weights.T, one chain of fp32 over all inputs.

    They truncate once for 16 products, by up to 2^-23 of what has been added up. So what counts is the sum on its way:
    behind an outlier all that follows is added to a large one. The order of inputs is free within `span` of them.
    Shapes: x [num_tokens, num_inputs]; weights [num_outputs, num_inputs]; result [num_tokens, num_outputs]; all float64
    """
    so_far = np.zeros((len(x), len(weights)))
    sizes = np.zeros_like(so_far)
    for begin in range(0, x.shape[1], span):
        these, those = x[:, begin : begin + span], weights[:, begin : begin + span].T
        sizes += np.abs(so_far) + np.abs(these) @ np.abs(those)
        so_far += these @ those
    return np.asarray(span / 16 * 2.0**-23 * sizes)
