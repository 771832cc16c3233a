"""The activations of MLPs: GELU by tanh (arXiv 1606.08415), SiLU, and SwiGLU (arXiv 2002.05202, equation 5)."""

import math

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.spec import KernelCost
from llmcli.kernels.tiles import HALF_ROWS
from llmcli.lab.problem import ENGINE, ROUNDING, Arrays, Expected, Output, Problem, ProblemKind
from llmcli.lab.row_kernels import swiglu

_TANH_FACTOR, _CUBE = math.sqrt(2 / math.pi), 0.044715


def make_gelu(num_values: int) -> Problem:
    """out = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))). Shapes: x, out [num_values] float32"""
    x = _gates(num_values)
    return Problem(
        inputs={"x": x},
        outputs={"out": Output(x.shape)},
        reference=lambda: {"out": _gelu(x.astype(np.float64))},
        cost=KernelCost(4 * num_values, 4 * num_values, 8 * num_values),
    )


def make_bias_gelu(num_rows: int, num_columns: int) -> Problem:
    """out = y / 2 * (1 + tanh(sqrt(2 / pi) * (y + 0.044715 * y^3))), y = x + bias.

    Shapes: x, out [num_rows, num_columns]; bias [num_columns]; all float32; y and t as x, scratch
    """
    generator = np.random.default_rng([num_rows, num_columns])
    x = 2 * generator.standard_normal((num_rows, num_columns), dtype=np.float32)
    bias = generator.standard_normal(num_columns, dtype=np.float32)

    def reference() -> dict[str, Expected]:
        y = x.astype(np.float64) + bias
        values = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        # Rounding y moves the result by up to 1.13 roundings of y. 1 + tanh has an absolute error: 2 roundings of tanh
        # itself, up to 4 of its argument (9 of it, times its slope), one of the sum; half of them count, for |y|. Then
        # two products.
        return {"out": Expected(values, ROUNDING * (5 * np.abs(y) + 2 * np.abs(values)))}

    count = num_rows * num_columns
    return Problem(
        inputs={"x": x, "bias": bias},
        outputs={"out": Output(x.shape)},
        reference=reference,
        cost=KernelCost(read_bytes=4 * (count + num_columns), written_bytes=4 * count, flops=10 * count),
        scratch={"y": Output(x.shape), "t": Output(x.shape)},
    )


def make_silu(num_values: int) -> Problem:
    """out = x / (1 + exp(-x)). Shapes: x, out [num_values] float32"""
    x = _gates(num_values)
    return Problem(
        inputs={"x": x},
        outputs={"out": Output(x.shape)},
        reference=lambda: {"out": _silu_times(x.astype(np.float64), 1.0)},
        cost=KernelCost(4 * num_values, 4 * num_values, 4 * num_values),
    )


def make_swiglu(num_rows: int, num_columns: int) -> Problem:
    """out = gate / (1 + exp(-gate)) * up.

    `gate_up` holds a row of gates, then one of ups; `gate_up_tiles` holds the same in the engine's form, eight of each
    in turn. A kernel reads one of them.
    Shapes: out, activated (scratch) [num_rows, num_columns]; gate_up [num_rows, 2 * num_columns]; gate_up_tiles
    [num_rows, 16 * ceil(num_columns / 8)]; all float32
    """
    gate = _gates(num_rows, num_columns)
    up = np.random.default_rng([1, num_rows, num_columns]).standard_normal(gate.shape, np.float32)
    count = gate.size

    def solve(device: Device, arrays: Arrays) -> None:
        given = {name: arrays[name] for name in ("row_scale", "out", "out_scale")}
        swiglu(device, gate_up=arrays["gate_up_tiles"], **given)

    return Problem(
        inputs={
            "gate_up": np.concatenate([gate, up], axis=1),
            "gate_up_tiles": interleave(gate, up),
            "row_scale": np.ones(num_rows, np.float32),
        },
        outputs={"out": Output(gate.shape)},
        reference=lambda: {"out": _silu_times(gate.astype(np.float64), up.astype(np.float64))},
        cost=KernelCost(8 * count, 4 * count, 5 * count),
        scratch={"activated": Output(gate.shape), "out_scale": Output((num_rows,))},
        solvers={ENGINE: solve},
    )


def _gates(*shape: int) -> np.ndarray:
    """Numbers on both sides of the point where the exponential vanishes next to 1."""
    return np.float32(4) * np.random.default_rng(shape).standard_normal(shape, np.float32)


def _gelu(x: np.ndarray) -> Expected:
    argument = _TANH_FACTOR * (x + _CUBE * x**3)
    tanh = np.tanh(argument)
    values = x / 2 * (1 + tanh)
    # Seven roundings of the argument, passed on by tanh with its slope; tanhf (2 ulp of at most 1), the sum with 1 and
    # a product.
    by_tanh = np.abs(x / 2) * (7 * np.abs(argument) * (1 - tanh**2) + 5)
    # As x / (1 + exp(-2 * argument)) instead.
    by_exp = np.abs(values) * _logistic_roundings(2 * argument, argument_roundings=7)
    return Expected(values, ROUNDING * np.maximum(by_tanh, by_exp))


def _silu_times(gate: np.ndarray, factor: np.ndarray | float) -> Expected:
    values = gate / (1 + np.exp(-gate)) * factor
    return Expected(values, ROUNDING * _logistic_roundings(gate) * np.abs(values))


def _logistic_roundings(x: np.ndarray, argument_roundings: int = 0) -> np.ndarray:
    """Roundings of y / (1 + exp(-x)) * z by __expf (2 + 1.173 |x| ulp, an ulp is two) and __fdividef (2 ulp)."""
    of_exponential = 2 * (2 + 1.173 * np.abs(x)) + argument_roundings * np.abs(x)
    share = (1 - np.tanh(x / 2)) / 2  # of the exponential in its sum with 1
    return np.asarray(of_exponential * share + 7)


def interleave(gate: np.ndarray, up: np.ndarray, padding: float = 0.0) -> np.ndarray:
    """Eight columns of gate, eight of up, and so on, as tiles have them; `padding` fills the last tile."""
    num_rows, num_columns = gate.shape
    padded = -(-num_columns // HALF_ROWS) * HALF_ROWS
    halves = np.full((2, num_rows, padded), padding, np.float32)
    halves[0, :, :num_columns], halves[1, :, :num_columns] = gate, up
    return halves.reshape(2, num_rows, -1, HALF_ROWS).transpose(1, 2, 0, 3).reshape(num_rows, 2 * padded)


KINDS = (
    ProblemKind("gelu", "GELU by tanh of single values", make_gelu),
    ProblemKind("bias_gelu", "GELU of rows after a bias", make_bias_gelu),
    ProblemKind("silu", "SiLU of single values", make_silu),
    ProblemKind("swiglu", "silu(gate) * up of rows", make_swiglu),
)
