"""The first half of a decoder layer for one token: norm, projections, attention over the cache, residual."""

from functools import partial

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.gemv import gemv
from llmcli.kernels.qkv import QkvLayout
from llmcli.kernels.spec import KernelCost
from llmcli.kernels.tiles import TileLayout
from llmcli.lab.attention import Estimate
from llmcli.lab.codes import Codes, matrix_of, random_codes, rms_normed
from llmcli.lab.problem import ENGINE, Arrays, Expected, Output, Problem, ProblemKind
from llmcli.lab.problems.decode_cache import HEAD_DIM, CachedTokens

_EPS = np.float32(1e-5)
_ROUNDING = 2.0**-24


def make(hidden_size: int, num_attention_heads: int, num_key_value_heads: int, position: int) -> Problem:
    """hidden += o @ mixed, mixed as decode_cache's, of qkv @ n, n = norm_weight * hidden / sqrt(mean(hidden^2) + eps).

    The weights are codes of int8, (code - 128) * scale. Heads have 128 dimensions, hidden_size is a multiple of 16.
    Shapes: hidden float32 [hidden_size], in-out, `before` at first; norm_weight float32 [hidden_size]; q_codes,
            k_codes, v_codes uint8 [heads * 128, hidden_size], and in one matrix qkv_codes; o_codes uint8 [hidden_size,
            num_attention_heads * 128]; their scales float32, one a row; qkv and o in tiles; the cache as in
            decode_cache; scratch normed, added float32 [hidden_size], qkv, mixed, and that of decode_cache
    """
    layout = QkvLayout(num_attention_heads, num_key_value_heads, HEAD_DIM)
    sizes = {
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "position": position,
    }
    generator = np.random.default_rng(list(sizes.values()))
    before = generator.standard_normal(hidden_size, dtype=np.float32)
    norm_weight = generator.uniform(0.5, 2, hidden_size).astype(np.float32)
    qkv = random_codes(generator, layout.width, hidden_size)
    o = random_codes(generator, hidden_size, layout.q_size)
    tokens = CachedTokens.random(generator, layout, position)
    parts = {
        "q": Codes(qkv.codes[: layout.k_offset], qkv.scales[: layout.k_offset]),
        "k": Codes(qkv.codes[layout.k_offset : layout.v_offset], qkv.scales[layout.k_offset : layout.v_offset]),
        "v": Codes(qkv.codes[layout.v_offset :], qkv.scales[layout.v_offset :]),
        "qkv": qkv,
        "o": o,
    }

    def reference() -> dict[str, Expected]:
        wide = before.astype(np.float64)
        after, mixed = tokens.expected(Estimate(*qkv.product(*rms_normed(before, norm_weight, _EPS))))
        added, bound = o.product(mixed.value, mixed.error)
        return {**after, "hidden": Expected(wide + added, bound + 2 * _ROUNDING * (np.abs(wide) + np.abs(added)))}

    num_weights = qkv.codes.size + o.codes.size
    weight_bytes = num_weights + 4 * (layout.width + hidden_size)
    cache = tokens.cost
    return Problem(
        "decode_attention",
        sizes,
        inputs={
            "before": before,
            "norm_weight": norm_weight,
            **{key: array for name, one in parts.items() for key, array in one.arrays(name).items()},
            **qkv.tiled("qkv"),
            **o.tiled("o"),
            **tokens.inputs(),
        },
        outputs={"hidden": Output((hidden_size,), initial="before"), **tokens.outputs()},
        scratch={
            "normed": Output((hidden_size,)),
            "added": Output((hidden_size,)),
            "qkv": Output((layout.width,)),
            "mixed": Output((layout.q_size,)),
            **tokens.scratch(),
        },
        reference=reference,
        cost=KernelCost(
            # The attention's own inputs and results, 4 bytes each, need not leave the card's registers.
            read_bytes=weight_bytes + cache.read_bytes - 4 * layout.width + 8 * hidden_size,
            written_bytes=cache.written_bytes - 4 * layout.q_size + 4 * hidden_size,
            flops=2 * num_weights + cache.flops,
            stored_bytes=weight_bytes + cache.stored_bytes,
        ),
        scalars={"eps": _EPS},
        solvers={ENGINE: partial(_solve, qkv.layout, o.layout, tokens), "attention": tokens.solve},
    )


def _solve(qkv: TileLayout, o: TileLayout, tokens: CachedTokens, device: Device, arrays: Arrays) -> None:
    """The first three launches of a layer: `Forward._few_tokens` in runners/cuda/forward.py."""
    hidden, mixed = arrays["hidden"].reshape(1, -1), arrays["mixed"].reshape(1, -1)
    gemv(
        device,
        matrix=matrix_of(qkv, arrays, "qkv"),
        x=hidden,
        out=arrays["qkv"].reshape(1, -1),
        norm_weight=arrays["norm_weight"],
        eps=float(_EPS),
    )
    tokens.solve(device, arrays)
    gemv(device, matrix=matrix_of(o, arrays, "o"), x=mixed, out=hidden, epilogue="add")


DECODE_ATTENTION = ProblemKind("decode_attention", "norm, attention and residual of a layer for one token", make)
