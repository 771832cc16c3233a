"""Float weights to codes, scales and zero points. The reference is the CPU's quantizing; the card must give its bits.

A scale is the smallest that keeps weights in range, rounded up, and codes are rounded half to even: one answer is
right. Only sums of squares may differ, by the order of summing in float64.
"""

from collections.abc import Callable, Iterator

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.quantize_rows import LONG_GROUP, CodeForm, quantize_rows, quantize_rows_cost
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem
from llmcli.quantization import rounding
from llmcli.quantization.floats import STORED_AS, narrow
from llmcli.quantization.packing import pack_rows
from llmcli.quantization.schemes import WeightScheme, packed_size

SCALE_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EXPONENTS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
_SQUARES = 1e-12  # relative: float64, a few thousand terms
Make = Callable[[tuple[int, int], str], np.ndarray]


def ordinary(shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Normal weights of several sizes, with outliers, zeros, rows of zeros and of one sign."""
    generator = np.random.default_rng(7)
    weights = generator.standard_normal(shape) * generator.choice([1e-7, 0.02, 300.0], (shape[0], 1))
    weights[generator.random(shape) < 0.01] *= 50
    weights[generator.random(shape) < 0.1] = 0
    if shape[0] > 2:
        weights[1] = 0
        weights[2] = np.abs(weights[2])
    weights = weights.astype(np.float16 if dtype == "F16" else np.float32).astype(np.float32)
    bits = weights.view(np.uint32)
    return (bits >> 16).astype(np.uint16) if dtype == "BF16" else narrow(weights, dtype)


def any_bits(shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Any finite bit patterns, subnormal ones in some rows only."""
    generator = np.random.default_rng(8)
    itemsize = np.dtype(STORED_AS[dtype]).itemsize
    bits = generator.integers(0, 2 ** (8 * itemsize), shape, np.uint32)
    mask = np.uint32(_EXPONENTS[dtype])
    bits[(bits & mask) == mask] = 0
    bits[::3] &= ~mask
    return bits.astype({2: np.uint16, 4: np.uint32}[itemsize]).view(STORED_AS[dtype])


def on_the_grid(shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Whole and half steps of a scale: ties, and sums that are exact."""
    generator = np.random.default_rng(9)
    return narrow((generator.integers(-255, 256, shape) / 2).astype(np.float32), dtype)


def form_of(scheme: WeightScheme) -> CodeForm:
    """A scheme in the kernel's form."""
    return CodeForm(scheme.num_bits, scheme.code_range[0], scheme.offset, *rounding.steps_of_range(scheme))


def case(make: Make, shape: tuple[int, int], scheme: WeightScheme, dtype: str, scale_dtype: str) -> Problem:
    """Rows of weights in `dtype` to codes; every weight finite, and none too large for its scale."""
    stored = make(shape, dtype)
    (num_rows, num_inputs), num_groups = shape, scheme.num_groups(shape[1])
    outputs = {
        "packed": Output((num_rows, packed_size(num_inputs, scheme.num_bits)), np.uint32),
        "scales": Output((num_rows, num_groups)),
        "squares": Output((num_rows, 2), np.float64),
        "num_saturated": Output((num_rows,), np.int32),
    }
    if not scheme.is_symmetric:
        outputs["zero_points"] = Output((num_rows, num_groups), np.uint8)

    def solve(device: Device, arrays: Arrays) -> None:
        given = {"zero_points": None, **{name: arrays[name] for name in outputs}}
        weights, form = arrays["weights"], form_of(scheme)
        quantize_rows(device, weights=weights, form=form, scale_type=SCALE_TYPES[scale_dtype], **given)

    return Problem(
        "quantize_rows",
        {"num_rows": num_rows, "num_inputs": num_inputs, "num_groups": num_groups},
        inputs={"weights": stored},
        outputs=outputs,
        reference=lambda: _expected(stored, dtype, scheme, scale_dtype),
        cost=quantize_rows_cost(
            num_rows=num_rows,
            num_inputs=num_inputs,
            num_groups=num_groups,
            num_bits=scheme.num_bits,
            is_symmetric=scheme.is_symmetric,
            itemsize=stored.dtype.itemsize,
        ),
        solvers={ENGINE: solve},
        label=f"{dtype} to int{scheme.num_bits}, {'' if scheme.is_symmetric else 'zero points, '}scales {scale_dtype}",
    )


def _expected(stored: np.ndarray, dtype: str, scheme: WeightScheme, scale_dtype: str) -> dict[str, Expected]:
    whole = rounding.quantize_rows(stored, dtype, scheme, scale_dtype)
    rows = [rounding.quantize_rows(stored[row : row + 1], dtype, scheme, scale_dtype) for row in range(len(stored))]
    if whole is None:
        raise ValueError("these weights cannot be quantized")
    errors = [row.errors for row in rows if row is not None]
    sums = ([one.error_squares[0] for one in errors], [one.weight_squares[0] for one in errors])
    squares = np.array(sums, np.float64).T
    expected = {
        "packed": Expected(pack_rows(whole.codes, scheme.num_bits).view(np.uint32).astype(np.float64), 0.0),
        "scales": Expected(whole.scales.astype(np.float64), 0.0),
        "squares": Expected(squares, _SQUARES * np.abs(squares)),
        "num_saturated": Expected(np.array([one.num_saturated for one in errors], np.float64), 0.0),
    }
    if whole.zero_points is not None:
        expected["zero_points"] = Expected(whole.zero_points.astype(np.float64), 0.0)
    return expected


def _checks() -> Iterator[Problem]:
    shapes = ((1, 1, None), (5, 96, 32), (4, 12, 3), (2, 3 * (LONG_GROUP + 2), LONG_GROUP + 2), (3, 2049, None))
    for num_rows, num_inputs, group_size in shapes:
        for num_bits, is_symmetric in ((8, True), (4, True), (4, False), (8, False)):
            scheme = WeightScheme(num_bits, group_size, is_symmetric)
            for dtype in STORED_AS:
                yield case(ordinary, (num_rows, num_inputs), scheme, dtype, dtype)
            yield case(on_the_grid, (num_rows, num_inputs), scheme, "F16", "F32")


def _typical() -> Problem:
    return case(ordinary, (1024, 4096), WeightScheme(8, 128), "BF16", "BF16")


CASES = KernelCases("quantize_rows", _checks, _typical)
