"""Rows as two 8-bit digits each, bit for bit, and their norm factors: forms, spans with a tail, numbers of rows."""

from collections.abc import Iterator

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.stage_digits import image_bytes, stage_digits, stage_digits_cost
from llmcli.kernels.tiles import TileLayout, tile_layout
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import digits_of, far_from_halves, widened

EPS = 1e-5
U = 2.0**-24


def make_rows(num_rows: int, num_inputs: int, seed: int = 0) -> np.ndarray:
    """Rows of many sizes: one is zero, one constant, one has an outlier, and every other row ends in zeros."""
    rng = np.random.default_rng([seed, num_rows, num_inputs])
    x = rng.standard_normal((num_rows, num_inputs)).astype(np.float32)
    x *= 2.0 ** rng.integers(-40, 40, (num_rows, 1))
    x[1], x[2], x[3, num_inputs // 2] = 0, 0.3, 1e4
    x[4::2, -num_inputs // 3 :] = 0
    return x


def problem_of(layout: TileLayout, num_rows: int, has_norm: bool = True) -> Problem:
    """The digits of rows for a matrix of this layout."""
    num_inputs = layout.num_inputs
    x = make_rows(num_rows, num_inputs)
    norm_weight = np.random.default_rng(1).uniform(0.5, 2, num_inputs).astype(np.float32)
    # The kernel's quotient may differ in its last bits. Integers that this could change are not compared.
    x[~far_from_halves(layout, x * norm_weight if has_norm else x)] = 0

    def reference() -> dict[str, Expected]:
        digits = digits_of(layout, x * norm_weight if has_norm else x)
        exact = x.astype(np.float64)
        factors, bound = np.ones(num_rows), np.zeros(num_rows)
        if has_norm:
            factors = 1 / np.sqrt(np.mean(exact * exact, axis=1) + EPS)
            bound = (4 + np.sqrt(num_inputs) / 2) * U * factors
        image = digits.image(unused=0)  # as it is at first
        return {"image": Expected(image.astype(np.float64), 0.0), "factors": Expected(factors, bound)}

    def solve(device: Device, arrays: Arrays) -> None:
        stage_digits(
            device,
            layout=layout,
            x=arrays["x"][:, :num_inputs],
            image=arrays["image"],
            factors=arrays["factors"],
            norm_weight=arrays.get("norm_weight"),
            eps=EPS,
        )

    zero_points = "" if layout.is_symmetric else ", zero points"
    return Problem(
        "stage_digits",
        {"num_rows": num_rows, "num_inputs": num_inputs},
        inputs={"x": widened(x, 12), **({"norm_weight": norm_weight} if has_norm else {})},
        outputs={
            "image": Output((image_bytes(layout, num_rows),), np.uint8, holds_zeros=True),
            "factors": Output((num_rows,)),
        },
        reference=reference,
        cost=stage_digits_cost(layout, num_rows, has_norm=has_norm),
        solvers={ENGINE: solve},
        label=f"{layout.weight_type}{zero_points}{', norm' if has_norm else ''}",
    )


def _layout(weight_type: str, num_inputs: int, is_symmetric: bool = True) -> TileLayout:
    return tile_layout(weight_type, 16, num_inputs, 128, "bfloat16", is_symmetric)


def _checks() -> Iterator[Problem]:
    for weight_type in ("int8", "int4"):
        for is_symmetric in (True, False):
            for num_rows, num_inputs in ((9, 72), (17, 1001), (40, 2304)):
                yield problem_of(_layout(weight_type, num_inputs, is_symmetric), num_rows)
        yield problem_of(_layout(weight_type, 600), 16, has_norm=False)
    for num_rows in (32, 33, 64, 65, 257):
        yield problem_of(_layout("int8", 200), num_rows)


def _typical() -> Problem:
    return problem_of(_layout("int8", 4096), 64)


CASES = KernelCases("stage_digits", _checks, _typical)
