"""Attention of a prompt's tokens over the cache: on any card; with wgmma, 16-bit caches and heads of 128."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from llmcli.kernels import attention_prefill as kernel
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout
from llmcli.kernels.stage_wide import UNIT_INPUTS, ImageRows, image_bytes
from llmcli.lab import attention
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem
from llmcli.lab.rows import image_of

ROW, NUM_ROWS = 1, 3
FP16 = np.dtype(np.float16)


class Case:
    """Queries of `num_tokens` tokens from `start` on; the cache is NaN where none of them may look."""

    def __init__(
        self,
        layout: QkvLayout,
        dtype: np.dtype[Any],
        start: int,
        num_tokens: int,
        *,
        window: int | None = None,
        spare: int = 70,
        magnitude: float = 1.0,
        rotates: bool = False,
    ) -> None:
        generator = np.random.default_rng(start + num_tokens + layout.head_dim)
        self.layout, self.dtype, self.start, self.num_tokens, self.window = layout, dtype, start, num_tokens, window
        end = start + num_tokens
        self.qkv = np.full((num_tokens, layout.width + 16), np.nan, np.float32)
        self.qkv[:, : layout.q_size] = magnitude * generator.normal(size=(num_tokens, layout.q_size))
        shape = (NUM_ROWS, layout.num_key_value_heads, end + spare, layout.head_dim)
        self.keys, self.values = (attention.stored(generator.normal(size=shape), dtype) for _ in range(2))
        for cache in (self.keys, self.values):
            for hidden in ((slice(ROW),), (slice(ROW + 1, None),), (ROW, slice(None), slice(end, None))):
                cache.poison(hidden)
        self.table = attention.page_table(NUM_ROWS, end + spare, start)
        self.cos_sin = attention.cos_sin_table(end, layout.head_dim) if rotates else None

    def part(self, begin: int, end: int) -> "Case":
        """The tokens `begin` to `end` - 1 of this chunk as a chunk of their own."""
        part = copy.copy(self)
        part.start, part.num_tokens, part.qkv = self.start + begin, end - begin, self.qkv[begin:end]
        return part

    def expected(self, chosen: np.ndarray) -> attention.Estimate:
        """The right result for some of the tokens. Shapes: chosen [n]"""
        layout = self.layout
        query = attention.exact(self.qkv[chosen, : layout.q_size].reshape(len(chosen), -1, layout.head_dim))
        if self.cos_sin is not None:
            query = attention.rotate(query, self.cos_sin, self.start + chosen)
        seen = slice(0, self.start + self.num_tokens)
        return attention.attend(
            query,
            self.keys[ROW, :, seen].values,
            self.values[ROW, :, seen].values,
            self.start + chosen,
            self.window,
            query_error=attention.ROUNDED[self.dtype],
            query_floor=attention.FLOOR[self.dtype],
            weight_error=attention.ROUNDED[self.dtype],
            tensor_cores=self.dtype != np.float32,
            value_scales=self.values[ROW, :, seen].scales,
        )


def problem_of(case: Case, stem: str = "attention_prefill", *, unit_inputs: int = 0, first_token: int = 0) -> Problem:
    """All tokens of a case, for the kernel that the launcher chooses, `stem`.

    With `unit_inputs` they go into an image for such units, from `first_token` on. The cache is the second of two
    layers, so that codes need no alignment.
    """
    layout, last = case.layout, case.start + case.num_tokens - 1
    inputs = {
        "qkv": case.qkv,
        "pages": attention.visible_table(case.table, np.array([ROW]), np.array([last]))[ROW].copy(),
    }
    for name, cache in (("key", case.keys), ("value", case.values)):
        pages = attention.paged(cache, case.table)
        inputs[f"{name}s"] = attention.second_layer(pages.elements)
        if pages.scales is not None:
            inputs[f"{name}_scales"] = attention.second_layer(pages.scales)
    if case.cos_sin is not None:
        inputs["cos_sin"] = case.cos_sin
    num_rows, dtype = first_token + case.num_tokens, case.keys.dtype
    out = Output((case.num_tokens, layout.q_size), attention.mixed_dtype(dtype))
    if unit_inputs:
        out = Output((image_bytes(layout.q_size, num_rows) // 2,), np.float16, holds_zeros=True)

    def reference() -> dict[str, Expected]:
        expected = attention.stored_mixed(case.expected(np.arange(case.num_tokens)), out.dtype)
        if not unit_inputs:
            return {"out": Expected(expected.value, expected.error)}
        padding = np.zeros((first_token, layout.q_size))
        rows = (np.concatenate((padding, some)) for some in (expected.value, expected.error))
        value, bound = (image_of(some, unit_inputs, np.float64) for some in rows)
        return {"out": Expected(value, bound)}

    def solve(device: Device, arrays: Arrays) -> None:
        image = ImageRows(arrays["out"].view(np.uint8), first_token, unit_inputs)
        prompt = kernel.PromptInputs(
            qkv=arrays["qkv"][:, : layout.width],
            layout=layout,
            cache=attention.cache_in(arrays),
            pages=arrays["pages"],
            start=case.start,
            window=case.window,
            cos_sin=arrays.get("cos_sin"),
        )
        kernel.attention_prefill(device, prompt, image if unit_inputs else arrays["out"])

    return Problem(
        stem,
        {
            "num_tokens": case.num_tokens,
            "start": case.start,
            "num_attention_heads": layout.num_attention_heads,
            "num_key_value_heads": layout.num_key_value_heads,
            "head_dim": layout.head_dim,
        },
        inputs=inputs,
        outputs={"out": out},
        reference=reference,
        cost=kernel.attention_prefill_cost(
            case.num_tokens, case.start, layout, case.dtype.itemsize, case.window, np.dtype(out.dtype).itemsize
        ),
        solvers={ENGINE: solve},
        label=attention.cache_name(case.dtype)
        + (f", window {case.window}" if case.window else "")
        + (", rotary" if case.cos_sin is not None else "")
        + (f", image of units of {unit_inputs} from token {first_token} on" if unit_inputs else ""),
    )


def _checks() -> Iterator[Problem]:
    for dtype in attention.DTYPES:
        for head_dim in (8, 24, 64, 80, 128, 256):
            # Cards with wgmma leave the other case to its own kernel.
            if head_dim != kernel.WGMMA_HEAD_DIM or dtype.itemsize != 2:
                yield problem_of(Case(QkvLayout(2, 1, head_dim), dtype, 30, 70))
        for start, num_tokens in ((0, 1), (62, 33), (100, 129)):
            yield problem_of(Case(QkvLayout(3, 3, 64), dtype, start, num_tokens))
        yield problem_of(Case(QkvLayout(8, 2, 64), dtype, 50, 100, window=65))


ATTENTION_PREFILL = KernelCases(
    "attention_prefill", _checks, lambda: problem_of(Case(QkvLayout(32, 8, 64), FP16, 0, 512))
)


def _layout(num_attention_heads: int, num_key_value_heads: int) -> QkvLayout:
    return QkvLayout(num_attention_heads, num_key_value_heads, kernel.WGMMA_HEAD_DIM)


def _wgmma_checks() -> Iterator[Problem]:
    for dtype in (FP16, np.dtype(np.uint16)):
        for start, num_tokens in ((0, 1), (3, 12), (20, 44), (30, 70), (62, 33), (100, 129)):
            yield problem_of(Case(_layout(3, 3), dtype, start, num_tokens), kernel.WGMMA_SPEC.stem)
        yield problem_of(Case(_layout(8, 2), dtype, 50, 200, window=65), kernel.WGMMA_SPEC.stem)
        yield problem_of(Case(_layout(16, 16), dtype, 20, 600), kernel.WGMMA_SPEC.stem)
        yield problem_of(Case(_layout(6, 2), dtype, 37, 90, rotates=True), kernel.WGMMA_SPEC.stem)
    for unit_inputs in UNIT_INPUTS:
        image: dict[str, int] = {"unit_inputs": unit_inputs}
        yield problem_of(Case(_layout(16, 4), FP16, 0, 600, rotates=True), kernel.WGMMA_SPEC.stem, **image)
        small = Case(_layout(2, 1), FP16, 5, 40, rotates=True)
        yield problem_of(small, kernel.WGMMA_SPEC.stem, first_token=107, **image)
        yield problem_of(Case(_layout(6, 6), FP16, 0, 12, rotates=True), kernel.WGMMA_SPEC.stem, **image)


ATTENTION_PREFILL_WGMMA = KernelCases(
    kernel.WGMMA_SPEC.stem,
    _wgmma_checks,
    lambda: problem_of(Case(_layout(32, 8), FP16, 0, 512), kernel.WGMMA_SPEC.stem),
)
