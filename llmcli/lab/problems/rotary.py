"""Rotary embedding in the three forms that models have: they differ in which numbers of a head make a pair."""

from functools import partial

import numpy as np

from llmcli.kernels.qkv import QkvLayout
from llmcli.kernels.spec import KernelCost
from llmcli.lab.problem import ROUNDING, Expected, Output, Problem, ProblemKind

_MAX_SEQ_LEN = 4096
_THETA = 10_000.0


def make(form: str, num_tokens: int, num_attention_heads: int, num_key_value_heads: int, head_dim: int) -> Problem:
    """Rotate queries and keys in place; the values after them do not change.

    A pair (a, b) becomes (a cos - b sin, b cos + a sin), with the angle position * frequency. Forms: "half" has pairs
    (j, j + head_dim / 2), "adjacent" (2j, 2j + 1); "two_parts" has the form half in each half of a head, with positions
    of its own. The angle is the float32 product, as in the tables of models.
    Shapes: data float32 [num_tokens, stride], in-out, `before` at first; positions int32 [num_tokens], of two_parts
            [2, num_tokens]; cosines, sines float32 [4096, pairs] and cos_sin [4096, pairs, 2], pairs of a head or part;
            frequencies float32 [pairs]
    """
    generator = np.random.default_rng([num_tokens, num_attention_heads, num_key_value_heads, head_dim])
    layout = QkvLayout(num_attention_heads, num_key_value_heads, head_dim)
    num_heads = num_attention_heads + num_key_value_heads
    num_rotated = num_tokens * num_heads * head_dim
    before = generator.standard_normal((num_tokens, layout.width), dtype=np.float32)
    num_parts = 2 if form == "two_parts" else 1
    positions = generator.integers(0, _MAX_SEQ_LEN, (num_parts, num_tokens), dtype=np.int32)
    rotated_size = head_dim // num_parts
    exponents = np.arange(0, rotated_size, 2) / rotated_size
    frequencies = (_THETA**-exponents).astype(np.float32)
    angles = (np.arange(_MAX_SEQ_LEN, dtype=np.float32)[:, np.newaxis] * frequencies).astype(np.float64)
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def reference() -> dict[str, Expected]:
        values, bound = before.astype(np.float64), np.zeros(before.shape)
        heads = values[:, : num_heads * head_dim].reshape(num_tokens, num_heads, head_dim)
        bounds = bound[:, : num_heads * head_dim].reshape(heads.shape)
        for part, one in enumerate(positions):
            first, second = _pairs(form, head_dim, part)
            a, b = heads[..., first], heads[..., second]  # copies
            cosine, sine = np.cos(angles[one])[:, np.newaxis], np.sin(angles[one])[:, np.newaxis]
            heads[..., first], heads[..., second] = a * cosine - b * sine, b * cosine + a * sine
            # Sine and cosine have 2 ulp, like sincosf; a product, a sum, and all terms of second order.
            bounds[..., first] = bounds[..., second] = 5 * ROUNDING * (np.abs(a) + np.abs(b))
        return {"data": Expected(values, bound)}

    return Problem(
        inputs={
            "before": before,
            "positions": positions if num_parts == 2 else positions[0],
            "cosines": cosines,
            "sines": sines,
            "cos_sin": np.stack((cosines, sines), axis=-1),
            "frequencies": frequencies,
        },
        outputs={"data": Output(before.shape, initial="before")},
        reference=reference,
        cost=KernelCost(4 * num_rotated, 4 * num_rotated, 3 * num_rotated),
        scalars={"stride": layout.width},
    )


def _pairs(form: str, head_dim: int, part: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and the second numbers of the pairs of a head, or of a part of it."""
    if form == "adjacent":
        return np.arange(0, head_dim, 2), np.arange(1, head_dim, 2)
    size = head_dim // (2 if form == "two_parts" else 1)
    first = part * size + np.arange(size // 2)
    return first, first + size // 2


KINDS = (
    ProblemKind("rotary_half", "rotary embedding, pairs half a head apart", partial(make, "half")),
    ProblemKind("rotary_adjacent", "rotary embedding, pairs side by side", partial(make, "adjacent")),
    ProblemKind("rotary_two_parts", "rotary embedding in each half of a head", partial(make, "two_parts")),
)
