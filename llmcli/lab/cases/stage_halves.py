"""Rows as pairs of 16-bit numbers, bit for bit, and their norm factors: types, units with a tail, numbers of rows."""

from collections.abc import Iterator

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.stage_halves import image_bytes, stage_halves, stage_halves_cost
from llmcli.kernels.tiles import TileLayout, tile_layout
from llmcli.lab.cases.stage_digits import EPS, U, make_rows
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import halves_of, widened

TYPES = {"float16": None, "bfloat16": None, "fp8": "float32"}  # of weights, and of their scales


def problem_of(layout: TileLayout, num_rows: int, has_norm: bool = True) -> Problem:
    """The pairs of rows for a matrix of this layout."""
    num_inputs = layout.num_inputs
    x = make_rows(num_rows, num_inputs)
    norm_weight = np.random.default_rng(1).uniform(0.5, 2, num_inputs).astype(np.float32)

    def reference() -> dict[str, Expected]:
        exact = x.astype(np.float64)
        factors, bound = np.ones(num_rows), np.zeros(num_rows)
        if has_norm:
            factors = 1 / np.sqrt(np.mean(exact * exact, axis=1) + EPS)
            bound = (4 + np.sqrt(num_inputs) / 2) * U * factors
        image = halves_of(layout, x * norm_weight if has_norm else x).image(unused=0)  # as it is at first
        return {"image": Expected(image.astype(np.float64), 0.0), "factors": Expected(factors, bound)}

    def solve(device: Device, arrays: Arrays) -> None:
        stage_halves(
            device,
            layout=layout,
            x=arrays["x"][:, :num_inputs],
            image=arrays["image"],
            factors=arrays["factors"],
            norm_weight=arrays.get("norm_weight"),
            eps=EPS,
        )

    return Problem(
        "stage_halves",
        {"num_rows": num_rows, "num_inputs": num_inputs},
        inputs={"x": widened(x, 12), **({"norm_weight": norm_weight} if has_norm else {})},
        outputs={
            "image": Output((image_bytes(layout, num_rows),), np.uint8, holds_zeros=True),
            "factors": Output((num_rows,)),
        },
        reference=reference,
        cost=stage_halves_cost(layout, num_rows, has_norm=has_norm),
        solvers={ENGINE: solve},
        label=f"{layout.weight_type}{', norm' if has_norm else ''}",
    )


def _checks() -> Iterator[Problem]:
    for weight_type, scale_type in TYPES.items():
        for num_rows, num_inputs in ((9, 72), (17, 1001), (40, 2304), (64, 200), (65, 200), (128, 40), (257, 200)):
            yield problem_of(tile_layout(weight_type, 16, num_inputs, scale_type=scale_type), num_rows)
        yield problem_of(tile_layout(weight_type, 16, 600, scale_type=scale_type), 16, has_norm=False)


def _typical() -> Problem:
    return problem_of(tile_layout("bfloat16", 16, 4096), 64)


CASES = KernelCases("stage_halves", _checks, _typical)
