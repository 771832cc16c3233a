"""Up to 64 tokens in fp16 times a tiled matrix: the problems of gemm_wide for few tokens."""

from collections.abc import Iterator

from llmcli.lab.cases.gemm_wide import FORMATS, checks_of, problem_of, swiglu_problem
from llmcli.lab.matrices import random_matrix
from llmcli.lab.problem import KernelCases, Problem


def _checks() -> Iterator[Problem]:
    yield from checks_of(9, 20, 64)
    for num_tokens in (1, 16, 17, 32, 64):
        yield problem_of(random_matrix(2, num_rows=72, num_inputs=520, **FORMATS[0]), num_tokens)
    # More work than blocks run at once: they take one piece after the other.
    # With 64 tokens 40,000 outputs take the least time in small blocks on 132 multiprocessors, 60,000 in large ones.
    for form, num_outputs, num_tokens in (
        (FORMATS[0], 40000, 10),
        (FORMATS[4], 40000, 40),
        (FORMATS[3], 60000, 40),
        (FORMATS[7], 60000, 64),
    ):
        yield problem_of(random_matrix(3, num_rows=num_outputs, num_inputs=130, **form), num_tokens)
    yield swiglu_problem(FORMATS[0], 16, 20000, 72, "int8")
    yield swiglu_problem(FORMATS[3], 60, 20000, 72, "int4")
    yield swiglu_problem(FORMATS[7], 60, 30000, 72, "int8")


def _typical() -> Problem:
    return problem_of(random_matrix(4, num_rows=4096, num_inputs=4096, **FORMATS[0]), 64)


CASES = KernelCases("gemm_narrow", _checks, _typical)
