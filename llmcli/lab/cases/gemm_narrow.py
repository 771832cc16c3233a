"""Up to 64 tokens in fp16 times a tiled matrix: the problems of gemm_wide for few tokens."""

from collections.abc import Iterator

from llmcli.lab.cases.gemm_wide import FORMATS, HALF_FORMATS, problem_of, swiglu_problem, with_small_scales
from llmcli.lab.matrices import random_matrix
from llmcli.lab.problem import KernelCases, Problem


def _checks() -> Iterator[Problem]:
    for form in FORMATS:
        for num_outputs, num_inputs, num_tokens in ((35, 72, 9), (300, 1000, 20), (528, 264, 33)):
            stored = random_matrix(num_inputs, num_rows=num_outputs, num_inputs=num_inputs, **form)
            yield problem_of(stored, num_tokens, has_bias=num_tokens == 33)
        for num_parts in (2, 3):
            yield problem_of(stored, 50, "add", has_bias=True, num_parts=num_parts)
        for down_type in ("int8", "int4"):
            yield swiglu_problem(form, 12, 100, 200, down_type)
            yield swiglu_problem(form, 64, 300, 136, down_type)
        yield problem_of(with_small_scales(random_matrix(5, num_rows=40, num_inputs=72, **form)), 20)
    for form in HALF_FORMATS:
        for num_outputs, num_inputs, num_tokens in ((35, 128, 9), (300, 640, 40)):
            stored = random_matrix(num_inputs, num_rows=num_outputs, num_inputs=num_inputs, **form)
            yield problem_of(stored, num_tokens, "add", has_bias=num_tokens == 40, num_parts=1 + num_inputs // 640)
        for down_type in ("int8", "bfloat16"):
            yield swiglu_problem(form, 30, 100, 256, down_type)
    for num_tokens in (1, 16, 17, 32, 64):
        yield problem_of(random_matrix(2, num_rows=72, num_inputs=520, **FORMATS[0]), num_tokens)
    # More work than blocks run at once: they take one piece after the other.
    for form, num_tokens in ((FORMATS[0], 10), (FORMATS[4], 40), (FORMATS[7], 64)):
        yield problem_of(random_matrix(3, num_rows=40000, num_inputs=130, **form), num_tokens)
    yield swiglu_problem(FORMATS[0], 16, 20000, 72, "int8")
    yield swiglu_problem(FORMATS[3], 60, 20000, 72, "int4")


def _typical() -> Problem:
    return problem_of(random_matrix(4, num_rows=4096, num_inputs=4096, **FORMATS[0]), 64)


CASES = KernelCases("gemm_narrow", _checks, _typical)
