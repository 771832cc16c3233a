"""How sure a mean over the tokens of a text is: 95 % intervals.

Tokens next to each other are alike, so an error that counts each one as a measurement of its own is too small. Here the
text is cut into 20 pieces, and the pieces' means tell the error of the whole: alike tokens are mostly in one piece.

Source: Schmeiser, Batch size effects in the analysis of simulation output, 1982 (20 batches); Wilson, 1927
"""

import math

import numpy as np
import numpy.typing as npt

Interval = tuple[float, float]  # from, to

NUM_PIECES = 20
_T = 2.093024054408263  # of Student's t with 19 degrees of freedom, the value that 2.5 % are above


def mean_interval(values: npt.NDArray[np.float64]) -> Interval | None:
    """Where the mean of such values lies, given those of one text in order; None if there are fewer than 20.

    Shapes: values [num_tokens]
    """
    if len(values) < NUM_PIECES or not np.isfinite(values).all():
        return None
    mean, error = float(values.mean()), _standard_error(values)
    return mean - _T * error, mean + _T * error


def share_interval(hits: npt.NDArray[np.bool_]) -> Interval | None:
    """The same for the share of true values: Wilson's interval. Tokens next to each other count for fewer tokens.

    Shapes: hits [num_tokens]
    """
    if len(hits) < NUM_PIECES:
        return None
    share, count = float(hits.mean()), float(len(hits))
    error = _standard_error(hits.astype(np.float64))
    if error**2 * count > share * (1 - share):  # more than that of tokens each for itself
        count = share * (1 - share) / error**2
    middle, weight = share + _T**2 / (2 * count), 1 + _T**2 / count
    half = _T * math.sqrt(share * (1 - share) / count + _T**2 / (4 * count**2))
    return max(0.0, (middle - half) / weight), min(1.0, (middle + half) / weight)


def _standard_error(values: npt.NDArray[np.float64]) -> float:
    """Of the mean; a piece has the weight of its length, and lengths differ by one at most."""
    pieces = np.array_split(values - values.mean(), NUM_PIECES)
    sums = np.array([piece.sum() for piece in pieces])
    return math.sqrt(float((sums**2).sum()) * NUM_PIECES / (NUM_PIECES - 1)) / len(values)
