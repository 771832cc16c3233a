"""Weight matrices: codes made from floats, and tensors laid into tiles."""

from collections.abc import Callable, Iterator

import numpy as np

from llmcli.kernels import repack
from llmcli.kernels.device import Device
from llmcli.kernels.quantize_rows import LONG_GROUP, CodeForm, quantize_rows, quantize_rows_cost
from llmcli.lab.matrices import StoredMatrix, arrays_of, matrix_of, random_matrix, tiles_of
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem, stored_values
from llmcli.quantization import rounding
from llmcli.quantization.rounding import STORED_AS, narrow, pack_rows
from llmcli.quantization.schemes import WeightScheme, packed_size

# repack: the tensors of one stored matrix into tiles.


def repack_case(stored: StoredMatrix) -> Problem:
    """Weights, scales and zero points of a matrix with tiles of its own: every bit is known, also of padding."""
    layout = stored.layout
    segment = repack.Segment(layout.num_rows)
    inputs = {"source": stored.source}
    if stored.scales is not None:
        inputs["source_scales"] = stored.scales
    if stored.zero_points is not None:
        inputs["source_zero_points"] = stored.packed_zero_points
    tiles = arrays_of(tiles_of(stored))

    def reference() -> dict[str, Expected]:
        found = np.zeros(2)
        if stored.scales is not None:
            sizes = np.abs(stored_values(stored.scales))
            is_outside = ((sizes < 2.0**-17) | (sizes > 65504)) & (sizes > 0)
            found[0] = repack.NOT_HALF * (stored.scale_type != "float16" and bool(is_outside.any()))
            found[1] = sizes.max().astype(np.float32).view(np.int32)
        flags = {"flags": Expected(found, 0.0)}
        return {name: Expected(_bits(array).astype(np.float64), 0.0) for name, array in tiles.items()} | flags

    def solve(device: Device, arrays: Arrays) -> None:
        typed = {name: arrays[name].view(array.dtype) for name, array in tiles.items()}
        matrix = matrix_of(layout, typed)
        flags, group_size = arrays["flags"], stored.group_size
        source, source_type = arrays["source"], stored.weight_type
        repack.repack(device, source=source, source_type=source_type, segment=segment, matrix=matrix, flags=flags)
        if "source_scales" in arrays:
            scales = arrays["source_scales"]
            repack.repack_scales(
                device, source=scales, group_size=group_size, segment=segment, matrix=matrix, flags=flags
            )
            if stored.widening == "lifted":
                repack.lift_scales(device, matrix=matrix_of(layout, typed, stored))
        if "source_zero_points" in arrays:
            zeros = arrays["source_zero_points"]
            repack.repack_zero_points(device, source=zeros, group_size=group_size, segment=segment, matrix=matrix)

    outputs = {name: Output(array.shape, _bits(array).dtype) for name, array in tiles.items()}
    return Problem(
        "repack",
        {"num_rows": layout.num_rows, "num_inputs": layout.num_inputs},
        inputs=inputs,
        outputs={**outputs, "flags": Output((2,), np.int32, holds_zeros=True)},
        reference=reference,
        cost=repack.repack_cost(source_type=stored.weight_type, segment=segment, layout=layout),
        solvers={ENGINE: solve},
        label=stored.name,
    )


def _bits(array: np.ndarray) -> np.ndarray:
    """The bits of an array's elements as signed numbers: uint16 would be read as bfloat16, where two may be equal."""
    return array if array.dtype == np.uint8 else array.view(f"i{array.dtype.itemsize}")


def _repack_checks() -> Iterator[Problem]:
    for weight_type in ("int8", "int4", "fp8", "float16", "bfloat16", "float32"):
        for num_rows, num_inputs in ((1, 40), (35, 72), (33, 1001), (17, 7)):
            yield repack_case(random_matrix(1, weight_type, num_rows, num_inputs))
    for scale_type in ("float32", "float16", "bfloat16"):
        for is_symmetric in (True, False):
            yield repack_case(random_matrix(3, "int8", 45, 1000, 96, scale_type, is_symmetric))
            yield repack_case(random_matrix(3, "int4", 45, 1000, 64, scale_type, is_symmetric))
    yield repack_case(random_matrix(5, "fp8", 45, 1000, 128, "block"))
    for weight_type in ("int8", "int4"):
        yield repack_case(random_matrix(4, weight_type, 20, 300, None, "float16", is_symmetric=False))


REPACK = KernelCases(
    "repack", _repack_checks, lambda: repack_case(random_matrix(1, "int8", 1024, 4096, 128, "bfloat16"))
)


# quantize_rows: float weights to codes, scales and zero points. The reference is the CPU's quantizing; the card must
# give its bits.
#
# A scale is the smallest that keeps weights in range, rounded up, and codes are rounded half to even: one answer is
# right. Only sums of squares may differ, by the order of summing in float64.

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


def quantize_case(make: Make, shape: tuple[int, int], scheme: WeightScheme, dtype: str, scale_dtype: str) -> Problem:
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
        reference=lambda: _quantized(stored, dtype, scheme, scale_dtype),
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


def _quantized(stored: np.ndarray, dtype: str, scheme: WeightScheme, scale_dtype: str) -> dict[str, Expected]:
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


def _quantize_checks() -> Iterator[Problem]:
    shapes = ((1, 1, None), (5, 96, 32), (4, 12, 3), (2, 3 * (LONG_GROUP + 2), LONG_GROUP + 2), (3, 2049, None))
    for num_rows, num_inputs, group_size in shapes:
        for num_bits, is_symmetric in ((8, True), (4, True), (4, False), (8, False)):
            scheme = WeightScheme(num_bits, group_size, is_symmetric)
            for dtype in STORED_AS:
                yield quantize_case(ordinary, (num_rows, num_inputs), scheme, dtype, dtype)
            yield quantize_case(on_the_grid, (num_rows, num_inputs), scheme, "F16", "F32")


QUANTIZE_ROWS = KernelCases(
    "quantize_rows",
    _quantize_checks,
    lambda: quantize_case(ordinary, (1024, 4096), WeightScheme(8, 128), "BF16", "BF16"),
)
