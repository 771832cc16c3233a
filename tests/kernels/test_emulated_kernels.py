"""Kernels run thread by thread on the CPU, on machines without a card, against the lab's float64."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated import AMPERE, COMPILER, EmulatedDevice, can_emulate, solve, translate
from right import launches

from llmcli.lab.engine import CASES
from llmcli.lab.problem import Problem, find_mismatch

pytestmark = pytest.mark.skipif(not can_emulate(), reason=f"no {COMPILER} that knows _Float16 and ucontext.h")

MOST_BYTES, MOST_FLOPS, MOST_CASES = 300_000, 5_000_000, 24


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    return EmulatedDevice(tmp_path_factory.mktemp("emulated"))


def some_cases(stem: str) -> list[Problem]:
    """Small cases of the variants of two of them: compiling takes most of the time."""
    small = [one for one in CASES[stem].checks() if one.num_bytes <= MOST_BYTES and one.cost.flops <= MOST_FLOPS]
    variants = variants_of(small[len(small) // 3]) | variants_of(small[-1])
    found = [one for one in small if variants_of(one) <= variants]
    return found[:: -(-len(found) // MOST_CASES)]


def variants_of(problem: Problem) -> set[str]:
    return {launch.name for launch in launches(problem)}


def mismatches(emulated: EmulatedDevice, problems: list[Problem]) -> Iterator[str]:
    """With copies that land at once, and with copies that land late; threads run in a random order."""
    for problem in problems:
        for emulated.is_late in (False, True):
            mismatch = find_mismatch(problem, solve(emulated, problem))
            if mismatch is not None:
                yield f"{problem.label} {dict(problem.sizes)}, late {emulated.is_late}: {mismatch}"


# sample_token, which copies nothing asynchronously, has a file of its own.
@pytest.mark.parametrize("stem", sorted(CASES.keys() - {"sample_token"}))
def test_results_are_within_their_bounds(stem: str, emulated: EmulatedDevice) -> None:
    problems = some_cases(stem)
    emulated.compile_for(problems)
    assert not list(mismatches(emulated, problems))


def test_a_norm_has_the_squares_of_all_warps(emulated: EmulatedDevice) -> None:
    """One row: no warp writes outputs before all have added their squares."""
    problems = [
        problem
        for stem in ("gemv", "gemv_float")
        for problem in CASES[stem].checks()
        if problem.sizes["num_rows"] == 1 and problem.label in ("bfloat16 store norm", "float32 store norm")
    ]
    emulated.compile_for(problems)
    for emulated.seed in (5, 4, 3, 2, 1):  # orders of threads
        assert not list(mismatches(emulated, problems))


def test_gemv_of_cards_without_clusters(tmp_path: Path) -> None:
    """There one block takes all inputs of a tile, and a card has less shared memory."""
    device = EmulatedDevice(tmp_path, AMPERE)
    problems = [
        problem
        for problem in CASES["gemv"].checks()
        if problem.label in ("bfloat16 store norm", "int8, bfloat16, groups of 128 swiglu")
    ]
    assert {problem.sizes["num_rows"] for problem in problems} == {1, 3, 8}
    device.compile_for(problems)
    for device.seed in (1, 2, 3):
        assert not list(mismatches(device, problems))


@pytest.mark.parametrize(
    ("stem", "right", "wrong"),
    [
        ("attention_rows", "if (turn >= 2) barrier_wait(&shared.merged", "if (false) barrier_wait(&shared.merged"),
        ("attention_rows", "fmaf(weight1, value1,", "fmaf(weight0, value1,"),  # of a row of two splits
        ("studies/rows/softmax", "__syncthreads();", ""),  # partial results that are missing yet
        ("stage_wide", "quad * 4 + 2, num_steps", "quad * 4 + 1, num_steps"),  # inputs of another lane
        ("stage_wide", "if (!exists(step)) continue;", ""),  # sums past the last input
        ("gemm_wide", "barrier_wait(filled, parity);", ""),  # a stage that has not arrived
        ("gemm_wide", "wgmma_wait<0>();", ""),  # products that are not done
    ],
)
def test_faults_of_a_kernel_are_found(stem: str, right: str, wrong: str, emulated: EmulatedDevice) -> None:
    problems = some_cases(stem)

    def change(text: str) -> str:
        assert right in text
        return text.replace(right, wrong)

    emulated.compile_for(problems, change)
    assert list(mismatches(emulated, problems))


def test_a_deadlock_ends_with_a_message(emulated: EmulatedDevice) -> None:
    """A thread that exits while the others wait."""
    problems = some_cases("stage_wide")[:1]
    right, wrong = "__syncthreads();", "if (threadIdx.x > 0) __syncthreads();"
    emulated.compile_for(problems, lambda text: text.replace(right, wrong))
    with pytest.raises(RuntimeError, match="stage_wide: nobody goes on: a deadlock"):
        list(mismatches(emulated, problems))


def test_instructions_that_are_not_emulated_are_named() -> None:
    with pytest.raises(ValueError, match="the emulator does not know: bar.red.popc.u32"):
        translate('__global__ void kernel(int* out) { asm volatile("bar.red.popc.u32 %0, 0;" : "=r"(*out)); }')
