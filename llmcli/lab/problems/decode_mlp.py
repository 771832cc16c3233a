"""The second half of a decoder layer for one token: norm, gate, up, SwiGLU, down, residual."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.gemv import gemv
from llmcli.kernels.spec import KernelCost
from llmcli.kernels.tiles import HALF_ROWS, TiledMatrix, TileLayout, tile_layout
from llmcli.lab.problem import ENGINE, Arrays, Expected, Output, Problem, ProblemKind
from llmcli.lab.problems.gemv_codes import by_tile, input_error, sum_error
from llmcli.lab.tiling import tiles_of

_EPS = np.float32(1e-5)
_ROUNDING = 2.0**-24
_ZERO_CODE = 128
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
    gate = _random_codes(generator, intermediate_size, hidden_size)
    up = _random_codes(generator, intermediate_size, hidden_size)
    down = _random_codes(generator, hidden_size, intermediate_size)
    gate_up = _Codes(_by_halves(gate.codes, up.codes), _by_halves(gate.scales, up.scales))

    def reference() -> dict[str, Expected]:
        wide = before.astype(np.float64)
        normed = norm_weight * wide / np.sqrt(np.mean(wide**2) + np.float64(_EPS))
        # Half of the error of the sum of squares, then as rms_norm.
        normed_bound = (np.sqrt(hidden_size) / 2 + 8) * _ROUNDING * np.abs(normed)
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
            **gate.arrays("gate"),
            **up.arrays("up"),
            **down.arrays("down"),
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


@dataclass(frozen=True)
class _Codes:
    """A matrix of codes. Shapes: codes uint8 [num_rows, num_inputs]; scales float32 [num_rows]"""

    codes: np.ndarray
    scales: np.ndarray

    @property
    def layout(self) -> TileLayout:
        return tile_layout("int8", *self.codes.shape, None, "float32")

    @property
    def weights(self) -> np.ndarray:
        return np.asarray((self.codes.astype(np.float32) - _ZERO_CODE) * self.scales[:, np.newaxis])

    def product(self, x: np.ndarray, x_bound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The product with x and its bound, where x itself may be off by x_bound."""
        weights = self.weights.astype(np.float64)
        sizes = np.abs(weights)
        rounded = (np.sqrt(x.size) + 8) * _ROUNDING * (sizes @ np.abs(x))
        return weights @ x, rounded + sum_error(sizes, input_error(x, self.layout) + x_bound)

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        return {name: self.weights.astype(np.float16), f"{name}_codes": self.codes, f"{name}_scales": self.scales}

    def tiled(self, name: str) -> dict[str, np.ndarray]:
        layout = self.layout
        return {f"{name}_tiles": tiles_of(layout, self.codes), f"{name}_tile_scales": by_tile(layout, self.scales)}


def _random_codes(generator: np.random.Generator, num_rows: int, num_inputs: int) -> _Codes:
    """Codes of all sizes, whose products with numbers of size 1 have about that size."""
    codes = generator.integers(1, 256, (num_rows, num_inputs), dtype=np.uint8)
    exponent = -round(float(np.log2(74 * np.sqrt(num_inputs))))
    scales = np.ldexp(np.float32(1), generator.integers(exponent - 1, exponent + 1, num_rows))
    return _Codes(codes, scales.astype(np.float32))


def _by_halves(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Rows of both in turn, as many as half a tile holds."""
    pairs = [array.reshape(-1, 1, HALF_ROWS, *array.shape[1:]) for array in (gate, up)]
    return np.ascontiguousarray(np.concatenate(pairs, axis=1).reshape(-1, *gate.shape[1:]))


def _solve(gate_up: TileLayout, down: TileLayout, device: Device, arrays: Arrays) -> None:
    """The two products that a layer ends with: `Forward._few_tokens` in runners/cuda/forward.py."""
    hidden, gated = arrays["hidden"].reshape(1, -1), arrays["gated"].reshape(1, -1)
    matrix = TiledMatrix(gate_up, arrays["gate_up_tiles"], arrays["gate_up_tile_scales"], None)
    norm_weight, eps = arrays["norm_weight"], float(_EPS)
    gemv(device, matrix=matrix, x=hidden, out=gated, norm_weight=norm_weight, eps=eps, epilogue="swiglu")
    matrix = TiledMatrix(down, arrays["down_tiles"], arrays["down_tile_scales"], None)
    gemv(device, matrix=matrix, x=gated, out=hidden, epilogue="add")


DECODE_MLP = ProblemKind("decode_mlp", "norm, SwiGLU and residual of a layer for one token", make)
