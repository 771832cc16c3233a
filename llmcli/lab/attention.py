"""Norm, rotary and attention in float64, and how far correct kernels may be from it.

Every bound is an error of first order, from the roundings that a kernel's header states. Magnitudes come along with the
values: what a result would be if nothing cancelled.
"""

from dataclasses import dataclass

import numpy as np

U32 = 2.0**-24
EXP2 = 2.0**-22  # relative error of the fast 2^x
# What is left of a number that is split into two 16-bit parts, and of one that is rounded to 16 bits.
# Codes (uint8) are multiplied in fp16.
F32, F16, BF16, CODES = (np.dtype(kind) for kind in (np.float32, np.float16, np.uint16, np.uint8))
SPLIT = {F32: 0.0, F16: 2.0**-22, BF16: 2.0**-16, CODES: 2.0**-22}
ROUNDED = {F32: 0.0, F16: 2.0**-11, BF16: 2.0**-8, CODES: 2.0**-11}
# Half the smallest step of fp16, the error of what is nearly zero.
FLOOR = {F32: 0.0, F16: 2.0**-25, BF16: 0.0, CODES: 2.0**-25}
# The same of a weight times the scale of its value, of which the largest weight is 2^6.
WEIGHT_FLOOR = 2.0**-31


@dataclass(frozen=True)
class Estimate:
    """Values in float64, and how far an fp32 computation of them may be."""

    value: np.ndarray
    error: np.ndarray


def exact(value: np.ndarray) -> Estimate:
    """Inputs are as given."""
    return Estimate(value.astype(np.float64), np.zeros(value.shape))


def normalize(x: Estimate, weight: np.ndarray, eps: float) -> Estimate:
    """RMS norm over the last axis. Squares and their sum, the inverse root (2 ulp), two products."""
    size = x.value.shape[-1]
    inverse = 1.0 / np.sqrt(np.square(x.value).mean(-1, keepdims=True) + np.float64(np.float32(eps)))
    value = weight.astype(np.float64) * x.value * inverse
    return Estimate(value, np.abs(value) * (np.sqrt(size) + 8) * U32)


def rotate(x: Estimate, cos_sin: np.ndarray, positions: np.ndarray) -> Estimate:
    """Half-split rotary of x [num_tokens, num_heads, head_dim]; two products and a sum an element."""
    angles = cos_sin.astype(np.float64)[positions][:, None]  # [num_tokens, 1, head_dim / 2, 2]
    cosine, sine = angles[..., 0], angles[..., 1]

    def turn(values: np.ndarray, sign: int) -> np.ndarray:
        first, second = np.split(values, 2, axis=-1)
        return np.concatenate((first * cosine - sign * second * sine, second * cosine + first * sine), axis=-1)

    cosine_size, sine_size = np.abs(cosine), np.abs(sine)
    value = turn(x.value, 1)
    cosine, sine = cosine_size, sine_size
    magnitude, carried = turn(np.abs(x.value), -1), turn(x.error, -1)
    return Estimate(value, carried + 3 * U32 * magnitude)


def attend(
    query: Estimate,
    keys: np.ndarray,
    values: np.ndarray,
    positions: np.ndarray,
    window: int | None,
    *,
    query_error: float,
    query_floor: float,
    weight_error: float,
    tensor_cores: bool,
    value_scales: np.ndarray | None = None,
    key_error: np.ndarray | None = None,
) -> Estimate:
    """Attention of each query over the cached tokens up to its position, its own included.

    `query_error` and `weight_error` are relative errors of a query element and of a softmax weight as they enter the
    products, `query_floor` the absolute one of a scaled query element. Sums are of rounded fp32 additions, or of
    `tensor_cores`, which truncate once for 16 products. `key_error` is how far the cached keys may be from `keys`.
    Shapes: query [num_tokens, num_attention_heads, head_dim]; keys, values [num_key_value_heads, seq_len, head_dim]
            float64, key_error the same; value_scales [num_key_value_heads, seq_len] of codes; positions [num_tokens];
            result [num_tokens, num_attention_heads * head_dim]
    """
    num_tokens, num_heads, head_dim = query.value.shape
    group_size = num_heads // keys.shape[0]
    value, error = np.empty((2, num_tokens, num_heads, head_dim))
    scale = head_dim**-0.5
    for token, position in enumerate(positions):
        first = 0 if window is None else max(0, position + 1 - window)
        for head in range(num_heads):
            k = keys[head // group_size, first : position + 1]
            v = values[head // group_size, first : position + 1]
            q, q_error = query.value[token, head], query.error[token, head]
            score = scale * (k @ q)
            magnitude = scale * (np.abs(k) @ np.abs(q))
            weight = np.exp(score - score.max())
            weight /= weight.sum()
            # Of a score: the query's own error, its rounding, products and sum, then the argument of 2^x.
            score_error = (
                scale * (np.abs(k) @ q_error)
                + (query_error + sum_error(head_dim, tensor_cores) + 4 * U32) * magnitude
                + query_floor * np.abs(k).sum(-1)
                + U32 * (2 * np.abs(score - score.max()) + np.abs(score) + 16)
            ).max()
            num_seen = position + 1 - first
            # Weights are wrong by that in the sum above and in the sum below the fraction; running maxima rescale.
            weights_error = 2 * (score_error + EXP2 * (4 + np.log2(num_seen))) + weight_error
            relative = weights_error + sum_error(num_seen, tensor_cores) + 16 * U32
            value[token, head] = weight @ v
            error[token, head] = relative * (weight @ np.abs(v)) + 1e-30
            if key_error is not None:
                # A score that is off by e moves the result by its weight * e * (its value - the result).
                moved = weight * (scale * (key_error[head // group_size, first : position + 1] @ np.abs(q)))
                error[token, head] += moved @ np.abs(v) + moved.sum() * np.abs(value[token, head])
            if value_scales is not None:
                scales = value_scales[head // group_size, first : position + 1, None]
                codes = np.abs(v) / np.where(scales == 0, 1.0, scales)
                error[token, head] += WEIGHT_FLOOR * weight.max() * codes.sum(0)
    return Estimate(value.reshape(num_tokens, -1), error.reshape(num_tokens, -1))


def carried_error(
    query: Estimate, keys: np.ndarray, values: np.ndarray, own_key: np.ndarray, own_value: np.ndarray
) -> np.ndarray:
    """How far attention of one token moves, to first order, where its query, its key and its value are off.

    `own_key` and `own_value` are how far its own key and value may be, the last of `keys` and `values`.
    Shapes: query [num_attention_heads, head_dim]; keys, values [num_key_value_heads, seq_len, head_dim] float64;
            own_key, own_value [num_key_value_heads, head_dim]; result [num_attention_heads * head_dim]
    """
    num_heads, head_dim = query.value.shape
    group_size = num_heads // keys.shape[0]
    scale = head_dim**-0.5
    error = np.empty((num_heads, head_dim))
    for head in range(num_heads):
        kv_head = head // group_size
        k, v, q = keys[kv_head], values[kv_head], query.value[head]
        weight = np.exp(scale * (k @ q - (k @ q).max()))
        weight /= weight.sum()
        change = weight[:, None] * (v - weight @ v)  # of the result by each token's score, [seq_len, head_dim]
        error[head] = scale * np.abs(change.T @ k) @ query.error[head]
        error[head] += scale * np.abs(change[-1]) * (np.abs(q) @ own_key[kv_head]) + weight[-1] * own_value[kv_head]
    return error.reshape(-1)


def sum_error(num_terms: int, tensor_cores: bool) -> float:
    """Error of a sum relative to that of its terms' magnitudes."""
    return float(np.ceil(num_terms / 16) * 2 * U32 if tensor_cores else np.sqrt(num_terms) * U32)


def cos_sin_table(max_seq_len: int, head_dim: int, theta: float = 10000.0) -> np.ndarray:
    """Angles as the runner uploads them: [max_seq_len, head_dim / 2, 2] float32."""
    inverse = (1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))).astype(np.float32)
    angles = np.arange(max_seq_len, dtype=np.float32)[:, None] * inverse
    return np.stack((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)
