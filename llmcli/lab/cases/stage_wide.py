"""Rows in fp16 in the order of gemm_wide's products: tails, numbers of tokens, with a norm and without."""

from collections.abc import Iterator

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.stage_wide import UNIT_INPUTS, image_bytes, stage_wide, stage_wide_cost
from llmcli.lab.matrices import EPSILON
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import image_of, make_rows, rounded_rows

EPS = 1e-5


def problem_of(
    unit_inputs: int, num_tokens: int, num_inputs: int, has_norm: bool = True, num_parts: int = 0
) -> Problem:
    """Rows of every kind, after adding some parts to them. Without a norm every bit is known."""
    x = make_rows(num_tokens, num_inputs)
    rng = np.random.default_rng(num_inputs)
    given = {"norm_weight": rng.uniform(0.5, 2, num_inputs).astype(np.float32)} if has_norm else {}
    if num_parts:
        given["parts"] = rng.standard_normal((num_parts, num_tokens, num_inputs)).astype(np.float32)
    total = x.copy()
    for part in given.get("parts", ()):
        total += part

    def reference() -> dict[str, Expected]:
        exact, relative = total.astype(np.float64), 0.0
        if has_norm:
            exact = exact * given["norm_weight"] / np.sqrt(np.mean(exact * exact, axis=1, keepdims=True) + EPS)
            relative = (10 + np.sqrt(num_inputs) / 2) * EPSILON
        rounded, scales = rounded_rows(exact, np.float16, relative)
        values, bound = rounded.values, rounded.bound
        if not has_norm:
            values, bound = values.astype(np.float16), np.zeros(values.shape)
        images = [image_of(one, unit_inputs, np.float64) for one in (values, np.asarray(bound))]
        return {
            "image": Expected(images[0], images[1]),
            "row_scales": scales,
            "largest": Expected(np.zeros(num_tokens), 0.0),
            "x": Expected(total.astype(np.float64), 0.0),
        }

    def solve(device: Device, arrays: Arrays) -> None:
        stage_wide(
            device,
            x=arrays["x"],
            unit_inputs=unit_inputs,
            image=arrays["image"].view(np.uint8),
            row_scales=arrays["row_scales"],
            norm_weight=arrays.get("norm_weight"),
            eps=EPS,
            largest=arrays["largest"].view(np.uint32),
            parts=arrays.get("parts"),
        )

    return Problem(
        "stage_wide",
        {"num_tokens": num_tokens, "num_inputs": num_inputs},
        inputs={"before": x, **given},
        outputs={
            "image": Output((image_bytes(num_inputs, num_tokens) // 2,), np.float16, holds_zeros=True),
            "row_scales": Output((num_tokens,)),
            "largest": Output((num_tokens,)),
            "x": Output((num_tokens, num_inputs), initial="before"),
        },
        reference=reference,
        cost=stage_wide_cost(num_tokens=num_tokens, num_inputs=num_inputs, has_norm=has_norm, num_parts=num_parts),
        solvers={ENGINE: solve},
        label=f"units of {unit_inputs}{', norm' if has_norm else ''}{f', {num_parts} parts' if num_parts else ''}",
    )


def _checks() -> Iterator[Problem]:
    for unit_inputs in UNIT_INPUTS:
        for num_tokens, num_inputs in ((1, 64), (9, 72), (17, 1001), (128, 40), (129, 200), (257, 132), (6, 2304)):
            yield problem_of(unit_inputs, num_tokens, num_inputs)
            yield problem_of(unit_inputs, num_tokens, num_inputs, has_norm=False)
        yield problem_of(unit_inputs, 9, 1001, num_parts=2)
        yield problem_of(unit_inputs, 33, 1100, has_norm=False, num_parts=4)


def _typical() -> Problem:
    return problem_of(64, 256, 4096)


CASES = KernelCases("stage_wide", _checks, _typical)
