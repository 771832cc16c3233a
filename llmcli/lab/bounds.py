"""Bounds of errors that several references share."""

from typing import Any

import numpy as np

from llmcli.lab.problem import ROUNDOFF


def sum_bound(reference: np.ndarray, magnitude: np.ndarray, num_terms: int, dtype: Any) -> np.ndarray:
    """How far a correct fp32 sum of `num_terms` products, rounded once to `dtype`, may lie from `reference`.

    `magnitude` is the sum of the products' absolute values.
    """
    return np.asarray(2 * ROUNDOFF[np.dtype(dtype)] * np.abs(reference) + np.sqrt(num_terms) * 2.0**-24 * magnitude)
