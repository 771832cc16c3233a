"""The tensors of one stored matrix into tiles."""

from collections.abc import Iterator

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.repack import Segment, repack, repack_cost, repack_scales, repack_zero_points
from llmcli.lab.matrices import StoredMatrix, arrays_of, matrix_of, random_matrix, tiles_of
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem


def problem_of(stored: StoredMatrix) -> Problem:
    """Weights, scales and zero points of a matrix with tiles of its own: every bit is known, also of padding."""
    layout = stored.layout
    segment = Segment(layout.num_rows)
    inputs = {"source": stored.source}
    if stored.scales is not None:
        inputs["source_scales"] = stored.scales
    if stored.zero_points is not None:
        inputs["source_zero_points"] = stored.packed_zero_points
    tiles = arrays_of(tiles_of(stored))

    def reference() -> dict[str, Expected]:
        flags = {"flags": Expected(np.zeros(1), 0.0)}
        return {name: Expected(_bits(array).astype(np.float64), 0.0) for name, array in tiles.items()} | flags

    def solve(device: Device, arrays: Arrays) -> None:
        typed = {name: arrays[name].view(array.dtype) for name, array in tiles.items()}
        matrix = matrix_of(layout, typed)
        flags, group_size = arrays["flags"], stored.group_size
        source, source_type = arrays["source"], stored.weight_type
        repack(device, source=source, source_type=source_type, segment=segment, matrix=matrix, flags=flags)
        if "source_scales" in arrays:
            scales = arrays["source_scales"]
            repack_scales(device, source=scales, group_size=group_size, segment=segment, matrix=matrix, flags=flags)
        if "source_zero_points" in arrays:
            zeros = arrays["source_zero_points"]
            repack_zero_points(device, source=zeros, group_size=group_size, segment=segment, matrix=matrix)

    outputs = {name: Output(array.shape, _bits(array).dtype) for name, array in tiles.items()}
    return Problem(
        "repack",
        {"num_rows": layout.num_rows, "num_inputs": layout.num_inputs},
        inputs=inputs,
        outputs={**outputs, "flags": Output((1,), np.int32, holds_zeros=True)},
        reference=reference,
        cost=repack_cost(source_type=stored.weight_type, segment=segment, layout=layout),
        solvers={ENGINE: solve},
        label=stored.name,
    )


def _bits(array: np.ndarray) -> np.ndarray:
    """The bits of an array's elements as signed numbers: uint16 would be read as bfloat16, where two may be equal."""
    return array if array.dtype == np.uint8 else array.view(f"i{array.dtype.itemsize}")


def _checks() -> Iterator[Problem]:
    for weight_type in ("int8", "int4", "fp8", "float16", "bfloat16", "float32"):
        for num_rows, num_inputs in ((1, 40), (35, 72), (33, 1001), (17, 7)):
            yield problem_of(random_matrix(1, weight_type, num_rows, num_inputs))
    for scale_type in ("float32", "float16", "bfloat16"):
        for is_symmetric in (True, False):
            yield problem_of(random_matrix(3, "int8", 45, 1000, 96, scale_type, is_symmetric))
            yield problem_of(random_matrix(3, "int4", 45, 1000, 64, scale_type, is_symmetric))
    yield problem_of(random_matrix(5, "fp8", 45, 1000, 128, "block"))
    for weight_type in ("int8", "int4"):
        yield problem_of(random_matrix(4, weight_type, 20, 300, None, "float16", is_symmetric=False))


def _typical() -> Problem:
    return problem_of(random_matrix(1, "int8", 1024, 4096, 128, "bfloat16"))


CASES = KernelCases("repack", _checks, _typical)
