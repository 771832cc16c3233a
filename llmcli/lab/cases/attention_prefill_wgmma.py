"""Attention of a prompt's tokens over a 16-bit cache with heads of 128, on cards with wgmma: into floats and images."""

from collections.abc import Iterator

import numpy as np

from llmcli.kernels.attention_prefill import WGMMA_HEAD_DIM, WGMMA_SPEC
from llmcli.kernels.qkv import QkvLayout
from llmcli.kernels.stage_wide import UNIT_INPUTS
from llmcli.lab.cases.attention_prefill import FP16, Case, problem_of
from llmcli.lab.problem import KernelCases, Problem


def _checks() -> Iterator[Problem]:
    for dtype in (np.dtype(np.float16), np.dtype(np.uint16)):
        for start, num_tokens in ((0, 1), (3, 12), (20, 44), (30, 70), (62, 33), (100, 129)):
            yield problem_of(Case(QkvLayout(3, 3, WGMMA_HEAD_DIM), dtype, start, num_tokens), WGMMA_SPEC.stem)
        yield problem_of(Case(QkvLayout(8, 2, WGMMA_HEAD_DIM), dtype, 50, 200, window=65), WGMMA_SPEC.stem)
        yield problem_of(Case(QkvLayout(16, 16, WGMMA_HEAD_DIM), dtype, 20, 600), WGMMA_SPEC.stem)
        yield problem_of(Case(QkvLayout(6, 2, WGMMA_HEAD_DIM), dtype, 37, 90, rotates=True), WGMMA_SPEC.stem)
    for unit_inputs in UNIT_INPUTS:
        image: dict[str, int] = {"unit_inputs": unit_inputs}
        yield problem_of(Case(QkvLayout(16, 4, WGMMA_HEAD_DIM), FP16, 0, 600, rotates=True), WGMMA_SPEC.stem, **image)
        small = Case(QkvLayout(2, 1, WGMMA_HEAD_DIM), FP16, 5, 40, rotates=True)
        yield problem_of(small, WGMMA_SPEC.stem, first_token=107, **image)
        yield problem_of(Case(QkvLayout(6, 6, WGMMA_HEAD_DIM), FP16, 0, 12, rotates=True), WGMMA_SPEC.stem, **image)


def _typical() -> Problem:
    return problem_of(Case(QkvLayout(32, 8, WGMMA_HEAD_DIM), np.dtype(np.float16), 0, 512), WGMMA_SPEC.stem)


CASES = KernelCases("attention_prefill_wgmma", _checks, _typical)
