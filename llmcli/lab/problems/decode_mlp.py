"""The second half of a decoder layer for one token: norm, gate, up, SwiGLU, down, residual."""

from functools import partial

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.gemv import gemv
from llmcli.kernels.spec import KernelCost
from llmcli.kernels.tiles import HALF_ROWS, TileLayout
from llmcli.lab.codes import Codes, matrix_of, random_codes, rms_normed
from llmcli.lab.problem import ENGINE, Arrays, Expected, Output, Problem, ProblemKind

_EPS = np.float32(1e-5)
_ROUNDING = 2.0**-24
_STEEPEST = 1.1  # of silu


def make(hidden_size: int, intermediate_size: int) -> Problem:
    """hidden += down @ (silu(gate @ n) * (up @ n)), n = norm_weight * hidden / sqrt(mean(hidden^2) + eps).

    The weights are codes of int8, (code - 128) * scale, with powers of two as scales. So the same weights are exact as
    halves, and one reference serves kernels for both; the least bytes are those of the codes. Both sizes are multiples
    of 16.
    Shapes: hidden float32 [hidden_size], in-out, `before` at first; norm_weight float32 [hidden_size]; gate, up float16
            and gate_codes, up_codes uint8 [intermediate_size, hidden_size], down float16 and down_codes uint8
            [hidden_size, intermediate_size]; gate_scales, up_scales, down_scales float32, one a row; the same weights
            in tiles, those of gate_up with 8 rows of each; scratch normed, added float32 [hidden_size], gate_out,
            up_out, gated float32 [intermediate_size]
    """
    generator = np.random.default_rng([hidden_size, intermediate_size])
    before = generator.standard_normal(hidden_size, dtype=np.float32)
    norm_weight = generator.uniform(0.5, 2, hidden_size).astype(np.float32)
    gate = random_codes(generator, intermediate_size, hidden_size)
    up = random_codes(generator, intermediate_size, hidden_size)
    down = random_codes(generator, hidden_size, intermediate_size)
    matrices = {"gate": gate, "up": up, "down": down}
    gate_up = Codes(_by_halves(gate.codes, up.codes), _by_halves(gate.scales, up.scales))

    def reference() -> dict[str, Expected]:
        wide = before.astype(np.float64)
        normed, normed_bound = rms_normed(before, norm_weight, _EPS)
        gates, gates_bound = gate.product(normed, normed_bound)
        ups, ups_bound = up.product(normed, normed_bound)
        silu = gates / (1 + np.exp(-gates))
        # An exponential of 2 ulp, a sum, a quotient, and the product: 8 roundings at the most.
        silu_bound = _STEEPEST * gates_bound + 8 * _ROUNDING * np.abs(silu)
        gated_bound = np.abs(ups) * silu_bound + (np.abs(silu) + silu_bound) * ups_bound
        added, bound = down.product(silu * ups, gated_bound)
        return {"hidden": Expected(wide + added, bound + 2 * _ROUNDING * (np.abs(wide) + np.abs(added)))}

    num_weights = 3 * hidden_size * intermediate_size
    num_scales = 2 * intermediate_size + hidden_size
    return Problem(
        "decode_mlp",
        {"hidden_size": hidden_size, "intermediate_size": intermediate_size},
        inputs={
            "before": before,
            "norm_weight": norm_weight,
            **{name: one.weights.astype(np.float16) for name, one in matrices.items()},
            **{key: array for name, one in matrices.items() for key, array in one.arrays(name).items()},
            **gate_up.tiled("gate_up"),
            **down.tiled("down"),
        },
        outputs={"hidden": Output((hidden_size,), initial="before")},
        scratch={
            **{name: Output((hidden_size,)) for name in ("normed", "added")},
            **{name: Output((intermediate_size,)) for name in ("gate_out", "up_out", "gated")},
        },
        reference=reference,
        cost=KernelCost(
            read_bytes=num_weights + 4 * num_scales + 8 * hidden_size,
            written_bytes=4 * hidden_size,
            flops=2 * num_weights,
            stored_bytes=num_weights + 4 * num_scales,
        ),
        scalars={"eps": _EPS},
        solvers={ENGINE: partial(_solve, gate_up.layout, down.layout)},
    )


def _by_halves(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Rows of both in turn, half a tile of each."""
    pairs = [array.reshape(-1, 1, HALF_ROWS, *array.shape[1:]) for array in (gate, up)]
    return np.ascontiguousarray(np.concatenate(pairs, axis=1).reshape(-1, *gate.shape[1:]))


def _solve(gate_up: TileLayout, down: TileLayout, device: Device, arrays: Arrays) -> None:
    """The last two products of a layer: `Forward._few_tokens` in runners/cuda/forward.py."""
    hidden, gated = arrays["hidden"].reshape(1, -1), arrays["gated"].reshape(1, -1)
    matrix = matrix_of(gate_up, arrays, "gate_up")
    norm_weight, eps = arrays["norm_weight"], float(_EPS)
    gemv(device, matrix=matrix, x=hidden, out=gated, norm_weight=norm_weight, eps=eps, epilogue="swiglu")
    matrix = matrix_of(down, arrays, "down")
    gemv(device, matrix=matrix, x=gated, out=hidden, epilogue="add")


DECODE_MLP = ProblemKind("decode_mlp", "norm, SwiGLU and residual of a layer for one token", make)
