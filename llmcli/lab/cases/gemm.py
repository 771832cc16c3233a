"""Many tokens times a tiled matrix: their rows laid into an image, products of fp16, products of codes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from llmcli.kernels.device import Device
from llmcli.kernels.gemm_wide import gemm_wide, gemm_wide_cost, gemm_wide_swiglu
from llmcli.kernels.gemv import Epilogue
from llmcli.kernels.stage_wide import UNIT_INPUTS, image_bytes, padded_inputs, stage_wide, stage_wide_cost
from llmcli.kernels.tiles import BLOCK_SCALE, HALF_ROWS, TileLayout, tile_layout
from llmcli.kernels.wide_plan import MAX_NARROW_TOKENS, takes_wgmma
from llmcli.lab.cases.gemv import gated_as_stored, swiglu_of_tiles
from llmcli.lab.matrices import DTYPES, StoredMatrix, arrays_of, matrix_of, random_matrix, tiles_of, to_storage
from llmcli.lab.problem import ENGINE, ROUNDING, Arrays, Expected, KernelCases, Output, Problem, stored_values
from llmcli.lab.rows import (
    image_of,
    make_rows,
    powers_of_two,
    rounded_rows,
    truncated_sum_bound,
)

# stage_wide: rows in fp16 in the order of gemm_wide's products: tails, numbers of tokens, with a norm and without.

EPS = 1e-5


def stage_case(
    unit_inputs: int,
    num_tokens: int,
    num_inputs: int,
    has_norm: bool = True,
    num_parts: int = 0,
    dtype: DTypeLike = np.float32,
) -> Problem:
    """Rows of every kind, after adding some parts to them. Without a norm every bit is known.

    `unit_inputs`: of the matrix that takes them as an image, or 0 for rows of gemv. `dtype`: that of x
    """
    x = make_rows(num_tokens, num_inputs)
    x[5::6] *= np.float32(2.0**-20)
    if dtype == np.float16:
        x = np.clip(x, -60000, 60000).astype(dtype)
    rng = np.random.default_rng(num_inputs)
    given = {"norm_weight": rng.uniform(0.5, 2, num_inputs).astype(np.float32)} if has_norm else {}
    if num_parts:
        given["parts"] = rng.standard_normal((num_parts, num_tokens, num_inputs)).astype(np.float32)
    total = x.copy()
    for part in given.get("parts", ()):
        total += part

    def reference() -> dict[str, Expected]:
        exact, relative = total.astype(np.float64), 0.0
        factor = 1 / np.sqrt(np.mean(exact * exact, axis=1) + EPS) if has_norm else np.ones(num_tokens)
        if has_norm:
            exact, relative = exact * given["norm_weight"], 2 * ROUNDING
        rounded, powers = rounded_rows(exact, np.float16, relative, lifts=True)
        scales = powers.values * factor
        values, bound = rounded.values, rounded.bound
        if not has_norm:
            values, bound = values.astype(np.float16), np.zeros(values.shape)
        images = [laid_out(np.asarray(one, np.float64)) for one in (values, bound)]
        return {
            "image": Expected(images[0], images[1]),
            "row_scales": Expected(scales, has_norm * (10 + np.sqrt(num_inputs) / 2) * ROUNDING * scales),
            "x": Expected(total.astype(np.float64), 0.0),
        }

    def laid_out(values: np.ndarray) -> np.ndarray:
        if unit_inputs:
            return image_of(values, unit_inputs, np.float64)
        return np.pad(values, ((0, 0), (0, padded_inputs(num_inputs) - num_inputs)))

    def solve(device: Device, arrays: Arrays) -> None:
        stage_wide(
            device,
            x=arrays["x"],
            unit_inputs=unit_inputs,
            out=arrays["image"].view(np.uint8) if unit_inputs else arrays["image"],
            row_scales=arrays["row_scales"],
            norm_weight=arrays.get("norm_weight"),
            eps=EPS,
            parts=arrays.get("parts"),
        )

    image_shape = (
        (image_bytes(num_inputs, num_tokens) // 2,) if unit_inputs else (num_tokens, padded_inputs(num_inputs))
    )
    return Problem(
        "stage_wide",
        {"num_tokens": num_tokens, "num_inputs": num_inputs},
        inputs={"before": x, **given},
        outputs={
            "image": Output(image_shape, np.float16, holds_zeros=bool(unit_inputs)),  # of its tokens none lacks
            "row_scales": Output((num_tokens,)),
            "x": Output((num_tokens, num_inputs), dtype, initial="before"),
        },
        reference=reference,
        cost=stage_wide_cost(
            num_tokens=num_tokens,
            num_inputs=num_inputs,
            has_norm=has_norm,
            num_parts=num_parts,
            itemsize=x.itemsize,
        ),
        solvers={ENGINE: solve},
        label=f"units of {unit_inputs}{', norm' if has_norm else ''}{f', {num_parts} parts' if num_parts else ''}",
    )


def _stage_checks() -> Iterator[Problem]:
    for unit_inputs in (0, *UNIT_INPUTS):
        for num_tokens, num_inputs in ((1, 64), (9, 72), (17, 1001), (128, 40), (129, 200), (257, 132), (6, 2304)):
            yield stage_case(unit_inputs, num_tokens, num_inputs)
            yield stage_case(unit_inputs, num_tokens, num_inputs, has_norm=False)
        yield stage_case(unit_inputs, 9, 1001, num_parts=2)
        yield stage_case(unit_inputs, 33, 1100, has_norm=False, num_parts=4)
        for num_tokens, num_inputs in ((9, 72), (2, 4360)):
            yield stage_case(unit_inputs, num_tokens, num_inputs, num_parts=3)
        yield stage_case(unit_inputs, 9, 200, has_norm=False, dtype=np.float16)


STAGE_WIDE = KernelCases("stage_wide", _stage_checks, lambda: stage_case(64, 256, 4096))


# gemm_wide: many tokens in fp16 times a tiled matrix of 4 to 16 bits: formats, groups, tails, numbers of tokens,
# epilogues.

FORMATS: tuple[dict[str, Any], ...] = (
    {"weight_type": "int8", "scale_type": "bfloat16", "group_size": 128},
    {"weight_type": "int8", "scale_type": "float32"},
    {"weight_type": "int8", "scale_type": "float16", "group_size": 16, "is_symmetric": False},
    {"weight_type": "int4", "scale_type": "bfloat16", "group_size": 128},
    {"weight_type": "int4", "scale_type": "float16", "group_size": 32, "is_symmetric": False},
    {"weight_type": "int4", "scale_type": "float32", "is_symmetric": False},
    {"weight_type": "fp8", "scale_type": "float32", "group_size": 128},
    {"weight_type": "fp8", "scale_type": "bfloat16"},
    {"weight_type": "int4", "scale_type": "bfloat16", "group_size": 32},
)
HALF_FORMATS: tuple[dict[str, Any], ...] = ({"weight_type": "float16"}, {"weight_type": "bfloat16"})


def activations(num_tokens: int, num_inputs: int, seed: list[int] | None = None) -> np.ndarray:
    """Tokens of different sizes in fp16; one is zero, one has an outlier."""
    rng = np.random.default_rng(seed or [num_tokens, num_inputs])
    x = (rng.standard_normal((num_tokens, num_inputs)) * 2.0 ** rng.integers(-6, 4, (num_tokens, 1))).astype(np.float16)
    if num_tokens > 2:
        x[1] = 0
        x[2, num_inputs // 2] = 1e4
    return x


def wide_case(
    stored: StoredMatrix,
    num_tokens: int,
    epilogue: Epilogue = "store",
    has_bias: bool = False,
    down: TileLayout | None = None,
    num_parts: int = 1,
) -> Problem:
    """The product of `num_tokens` tokens. Tokens that only their image has are zeros; SwiGLU goes into `down`.

    The sums of all parts of the inputs after the first are results of their own.
    """
    layout = stored.layout
    x, scales = activations(num_tokens, layout.num_inputs), powers_of_two(num_tokens)
    rng = np.random.default_rng([num_tokens, layout.num_rows])
    given: dict[str, np.ndarray] = {}
    if has_bias:
        given["bias"] = rng.standard_normal(layout.padded_rows).astype(np.float32)
    if epilogue == "add":
        given["before"] = rng.standard_normal((num_tokens, layout.num_rows)).astype(np.float32)

    def products(part: int = 0) -> tuple[np.ndarray, np.ndarray]:
        num_spans = -(-layout.num_inputs // 128)
        inputs = slice(*(num_spans * one // num_parts * 128 for one in (part, part + 1)))
        halves = x.astype(np.float64)[:, inputs]
        weights = stored.halves[:, inputs]
        y = (halves @ weights.T) * scales[:, None]
        bound = truncated_sum_bound(halves, weights, layout.unit_inputs, stored.power) * scales[:, None]
        bound += 4 * ROUNDING * np.abs(y)
        if has_bias and part == 0:
            y = y + given["bias"].astype(np.float64)[: layout.num_rows]
            bound += 2 * ROUNDING * np.abs(y)
        return y, bound

    def reference() -> dict[str, Expected]:
        y, bound = products()
        if epilogue == "add":
            y = given["before"] + y
            bound = bound + 2 * ROUNDING * np.abs(y)
        expected = {"out": Expected(y, bound)}
        if num_parts > 1:
            rest = [products(part) for part in range(1, num_parts)]
            expected["others"] = Expected(np.stack([y for y, _ in rest]), np.stack([bound for _, bound in rest]))
        return expected

    def gated() -> dict[str, Expected]:
        assert down is not None
        stored_gated = gated_as_stored(*swiglu_of_tiles(*products(), down.num_inputs))
        images = [image_of(one, down.unit_inputs, np.float64) for one in stored_gated]
        return {"out": Expected(images[0], images[1])}

    def solve(device: Device, arrays: Arrays) -> None:
        common = {
            "matrix": matrix_of(layout, arrays, stored),
            "image": arrays["image"].view(np.uint8),
            "row_scales": arrays["row_scales"],
            "bias": arrays.get("bias"),
        }
        if down is None:
            to: Literal["add", "store"] = "add" if epilogue == "add" else "store"
            gemm_wide(device, **common, out=arrays["out"], epilogue=to, others=arrays.get("others"))
            return
        gemm_wide_swiglu(device, **common, down=down, out=arrays["out"].view(np.uint8))

    outputs = {"out": Output((num_tokens, layout.num_rows), initial="before" if epilogue == "add" else "")}
    if num_parts > 1:
        outputs["others"] = Output((num_parts - 1, num_tokens, layout.num_rows))
    if down is not None:
        outputs = {
            "out": Output((image_bytes(down.num_inputs, num_tokens) // 2,), np.float16, holds_zeros=True),
        }
    stem = "gemm_narrow" if num_tokens <= MAX_NARROW_TOKENS else "gemm_wide"
    return Problem(
        stem if takes_wgmma(layout) else "gemm_mma",
        {"num_tokens": num_tokens, "num_inputs": layout.num_inputs, "num_outputs": layout.num_rows},
        inputs={"image": image_of(x, layout.unit_inputs), "row_scales": scales, **arrays_of(tiles_of(stored)), **given},
        outputs=outputs,
        reference=reference if down is None else gated,
        cost=gemm_wide_cost(layout, num_tokens, epilogue, num_parts),
        solvers={ENGINE: solve},
        label=f"{stored.name}, {epilogue}{f', {num_parts} parts' if num_parts > 1 else ''}",
    )


def with_small_scales(stored: StoredMatrix) -> StoredMatrix:
    """The same with scales down to 2^-26, row by row: fp16 lacks some, or has products below its normal numbers."""
    return _times_powers(stored, -(np.arange(stored.layout.num_rows) % 18))


def with_model_scales(stored: StoredMatrix) -> StoredMatrix:
    """The same with the scales of models, 2^-15 to 2^-9, so that the kernels multiply some codes unchanged."""
    return _times_powers(stored, np.full(stored.layout.num_rows, -6))


def _times_powers(stored: StoredMatrix, exponents: np.ndarray) -> StoredMatrix:
    assert stored.scales is not None
    factors = np.ldexp(1.0, exponents)[:, None]
    scales = to_storage(stored_values(stored.scales) * factors, DTYPES[str(stored.scale_type)])
    return replace(stored, scales=scales)


def swiglu_case(form: dict[str, Any], num_tokens: int, num_outputs: int, num_inputs: int, down_type: str) -> Problem:
    """Gate and up of `num_outputs` outputs, for a matrix of `down_type`."""
    num_rows = 2 * HALF_ROWS * -(-num_outputs // HALF_ROWS)
    stored = random_matrix(num_inputs, num_rows=num_rows, num_inputs=num_inputs, **form)
    has_scales = down_type != "bfloat16"
    down = tile_layout(down_type, 64, num_outputs, None, "float32" if has_scales else None)
    return wide_case(stored, num_tokens, "swiglu", down=down)


def checks_of(few: int, some: int, many: int) -> Iterator[Problem]:
    """Products of these numbers of tokens in all formats: tails, parts, epilogues, small scales."""
    for form in (*FORMATS, *HALF_FORMATS):
        for num_outputs, num_inputs, num_tokens in ((35, 72, few), (300, 1000, many), (528, 264, some)):
            stored = random_matrix(num_inputs, num_rows=num_outputs, num_inputs=num_inputs, **form)
            yield wide_case(stored, num_tokens, has_bias=num_tokens == some)
        yield wide_case(stored, many, "add", has_bias=True)
        for num_parts in (2, 3):
            yield wide_case(stored, some, "add", has_bias=True, num_parts=num_parts)
        for down_type in ("int8", "int4", "bfloat16"):
            yield swiglu_case(form, few, 100, 200, down_type)
            yield swiglu_case(form, many, 300, 136, down_type)
    for form in FORMATS:
        yield wide_case(with_small_scales(random_matrix(5, num_rows=40, num_inputs=72, **form)), some)
        yield wide_case(with_model_scales(random_matrix(6, num_rows=48, num_inputs=300, **form)), many)


def _wide_checks() -> Iterator[Problem]:
    yield from checks_of(65, 97, 260)
    for num_tokens in (127, 128, 129, 256, 257):
        yield wide_case(random_matrix(2, num_rows=72, num_inputs=520, **FORMATS[0]), num_tokens)
    # More work than blocks run at once: they take one piece after the other, in blocks of 256 tokens.
    for form in (FORMATS[0], FORMATS[4], FORMATS[7]):
        yield wide_case(random_matrix(3, num_rows=17000, num_inputs=130, **form), 400)
    yield swiglu_case(FORMATS[0], 200, 8500, 72, "int8")
    yield swiglu_case(FORMATS[3], 200, 8500, 72, "int4")


GEMM_WIDE = KernelCases("gemm_wide", _wide_checks, lambda: _typical(512))


# gemm_narrow: the same for up to 64 tokens.


def _narrow_checks() -> Iterator[Problem]:
    yield from checks_of(9, 20, 64)
    for num_tokens in (1, 16, 17, 32, 64):
        yield wide_case(random_matrix(2, num_rows=72, num_inputs=520, **FORMATS[0]), num_tokens)
    # More work than blocks run at once: they take one piece after the other.
    # With 64 tokens 40,000 outputs take the least time in small blocks on 132 multiprocessors, 60,000 in large ones.
    for form, num_outputs, num_tokens in (
        (FORMATS[0], 40000, 10),
        (FORMATS[4], 40000, 40),
        (FORMATS[3], 60000, 40),
        (FORMATS[7], 60000, 64),
    ):
        yield wide_case(random_matrix(3, num_rows=num_outputs, num_inputs=130, **form), num_tokens)
    yield swiglu_case(FORMATS[0], 16, 20000, 72, "int8")
    yield swiglu_case(FORMATS[3], 60, 20000, 72, "int4")
    yield swiglu_case(FORMATS[7], 60, 30000, 72, "int8")


GEMM_NARROW = KernelCases("gemm_narrow", _narrow_checks, lambda: _typical(64))


def _typical(num_tokens: int) -> Problem:
    return wide_case(random_matrix(4, num_rows=4096, num_inputs=4096, **FORMATS[0]), num_tokens)


# gemm_mma: the same with scales of blocks; cards without wgmma multiply all matrices by it.

_BLOCKS: dict[str, Any] = {"weight_type": "fp8", "scale_type": BLOCK_SCALE, "group_size": 128}


def _mma_checks() -> Iterator[Problem]:
    for num_outputs, num_inputs, num_tokens in ((35, 72, 9), (300, 1000, 64), (528, 264, 65), (40, 300, 257)):
        stored = random_matrix(num_inputs, num_rows=num_outputs, num_inputs=num_inputs, **_BLOCKS)
        yield wide_case(stored, num_tokens, has_bias=num_tokens > 64)
        yield wide_case(stored, num_tokens, "add", num_parts=1 + (num_inputs > 256))
    for down_type in ("int8", "int4", "bfloat16"):
        yield swiglu_case(_BLOCKS, 20, 100, 200, down_type)
        yield swiglu_case(_BLOCKS, 130, 300, 136, down_type)


GEMM_MMA = KernelCases(
    "gemm_mma",
    _mma_checks,
    lambda: wide_case(random_matrix(4, num_rows=4096, num_inputs=4096, **_BLOCKS), 512),
)
