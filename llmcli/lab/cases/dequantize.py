"""Tiles of a stored matrix to plain rows."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.dequantize import ACTIVATION_DTYPES, dequantize, dequantize_cost
from llmcli.kernels.device import Device
from llmcli.lab.matrices import StoredMatrix, arrays_of, matrix_of, random_matrix, storage_name, tiles_of
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem, stored_values

FORMATS: list[dict[str, Any]] = [
    {"weight_type": "int8", "scale_type": "float32"},
    {"weight_type": "int8", "scale_type": "bfloat16", "group_size": 32},
    {"weight_type": "int8", "scale_type": "float16", "group_size": 8, "is_symmetric": False},
    {"weight_type": "int8", "scale_type": "float16", "is_symmetric": False},
    {"weight_type": "int4", "scale_type": "float16", "group_size": 128},
    {"weight_type": "int4", "scale_type": "float32", "group_size": 16, "is_symmetric": False},
    {"weight_type": "int4", "scale_type": "bfloat16"},
    {"weight_type": "fp8", "scale_type": "float32"},
    {"weight_type": "fp8", "scale_type": "bfloat16", "group_size": 128},
    {"weight_type": "fp8", "scale_type": "block", "group_size": 128},
    {"weight_type": "float16"},
    {"weight_type": "bfloat16"},
    {"weight_type": "float32"},
]


def case(form: dict[str, Any], num_rows: int, num_inputs: int, dtype: Any = None) -> Problem:
    """All tiles; without `dtype`, in the type of activations for such weights. Padded rows become zeros."""
    stored = random_matrix(1, num_rows=num_rows, num_inputs=num_inputs, **form)
    layout = stored.layout
    dtype = np.dtype(ACTIVATION_DTYPES[stored.weight_type] if dtype is None else dtype)

    def solve(device: Device, arrays: Arrays) -> None:
        matrix = matrix_of(layout, arrays)
        dequantize(device, matrix=matrix, first_tile=0, num_tiles=layout.num_tiles, out=arrays["out"])

    return Problem(
        "dequantize",
        {"num_rows": num_rows, "num_inputs": num_inputs},
        inputs=arrays_of(tiles_of(stored)),
        outputs={"out": Output((layout.padded_rows, num_inputs), dtype)},
        reference=lambda: {"out": _expected(stored, dtype)},
        cost=dequantize_cost(layout=layout, num_tiles=layout.num_tiles, itemsize=dtype.itemsize),
        solvers={ENGINE: solve},
        label=f"{stored.name} to {storage_name(dtype)}",
    )


def _expected(stored: StoredMatrix, dtype: np.dtype[Any]) -> Expected:
    values = stored.weights
    if stored.scales is not None:
        # Half an ulp, also below the smallest normal number; before that the rounding to float32.
        bound = (2.0**-11 + 2.0**-23) * np.abs(values) + 2.0**-25
    elif stored.weight_type == "bfloat16" and dtype == np.float16:
        # The 8 bits of bfloat16 fit into float16, but below its smallest normal number they become fewer.
        bound = np.where(np.abs(values) < 2.0**-17, 2.0**-25, 0)
    else:
        values, bound = stored_values(stored.values), np.zeros(values.shape)
    padding = ((0, stored.layout.padded_rows - len(values)), (0, 0))
    return Expected(np.pad(values, padding), np.pad(bound, padding))


def _checks() -> Iterator[Problem]:
    for form in FORMATS:
        for num_rows, num_inputs in ((35, 72), (40, 1001), (16, 7)):
            yield case(form, num_rows, num_inputs)
    yield case({"weight_type": "bfloat16"}, 40, 72, dtype=np.uint16)


CASES = KernelCases("dequantize", _checks, partial(case, FORMATS[1], 4096, 4096))
