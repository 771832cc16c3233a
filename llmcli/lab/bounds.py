"""Bounds of errors that several references share."""

from typing import Any

import numpy as np

from llmcli.lab.problem import ROUNDOFF

_SMALLEST_HALF = 2.0**-14  # of the normal numbers of fp16


def sum_bound(reference: np.ndarray, magnitude: np.ndarray, num_terms: int, dtype: Any) -> np.ndarray:
    """How far a correct fp32 sum of `num_terms` products, rounded once to `dtype`, may lie from `reference`.

    `magnitude` is the sum of the products' absolute values.
    """
    return np.asarray(2 * ROUNDOFF[np.dtype(dtype)] * np.abs(reference) + np.sqrt(num_terms) * 2.0**-24 * magnitude)


def truncated_sum_bound(x: np.ndarray, weights: np.ndarray, span: int) -> np.ndarray:
    """How far sums of Hopper's tensor cores may lie from x @ weights.T: factors of fp16, one chain of fp32.

    They line up 16 products and the sum so far by the largest exponent, cut each of them off at 2^-25 of it, and then
    their sum at 2^-23 of itself. So what counts is the sum on its way: behind an outlier all that follows is added to a
    large one. A product's exponent is that of its factors, and that of a subnormal factor is -14, however small it is.
    The bound takes one cut at 2^-23 of all that has been added up: signs differ, so cuts cancel. Inputs may come in any
    order within `span` of them. Source: an H200's values; tests/lab/test_lab_bounds.py has a model that gives them
    Shapes: x [num_tokens, num_inputs]; weights [num_outputs, num_inputs]; result [num_tokens, num_outputs]; all float64
    """
    so_far = np.zeros((len(x), len(weights)))
    sizes = np.zeros_like(so_far)
    for begin in range(0, x.shape[1], span):
        these, those = x[:, begin : begin + span], weights[:, begin : begin + span].T
        sizes += np.abs(so_far) + _lined_up(these) @ _lined_up(those)
        so_far += these @ those
    return np.asarray(span / 16 * 2.0**-23 * sizes)


def _lined_up(factors: np.ndarray) -> np.ndarray:
    """Magnitudes as their exponents in fp16 say: subnormal ones as the smallest normal one."""
    return np.where(factors == 0, 0.0, np.maximum(np.abs(factors), _SMALLEST_HALF))
