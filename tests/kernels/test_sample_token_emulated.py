"""sample_token on the CPU, thread by thread: cases of the lab except the largest vocabularies.

Each vocabulary has one seed of the lab, and chains of drafts a small one; `--all` takes all of them.
"""

from collections.abc import Iterable, Iterator

import pytest
from emulated import COMPILER, EmulatedDevice, can_emulate, solve

from llmcli.lab.engine import CASES
from llmcli.lab.problem import Problem, find_mismatch

pytestmark = pytest.mark.skipif(not can_emulate(), reason=f"no {COMPILER} that knows _Float16 and ucontext.h")

PROBLEMS = sorted(
    (one for one in CASES["sample_token"].checks() if one.sizes["vocab_size"] <= 2500),
    key=lambda one: one.sizes["num_lanes"],
)
CHAINS = sorted((one for one in PROBLEMS if not one.label), key=lambda one: one.sizes["vocab_size"])
SOME = [one for one in PROBLEMS if one.label and one.num_bytes < 10**6] + CHAINS[::4]  # one seed of each vocabulary


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    return EmulatedDevice(tmp_path_factory.mktemp("emulated"))


def mismatches(emulated: EmulatedDevice, problems: Iterable[Problem]) -> Iterator[str]:
    for problem in problems:
        mismatch = find_mismatch(problem, solve(emulated, problem))
        if mismatch is not None:
            yield f"{problem.label} {dict(problem.sizes)}: {mismatch}"


@pytest.mark.parametrize("problems", [SOME, pytest.param(PROBLEMS, marks=pytest.mark.long)], ids=["some", "all"])
def test_every_case_is_the_hosts(emulated, problems):
    emulated.compile_for(problems)
    assert list(mismatches(emulated, problems)) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        # a NaN that a greedy row's quick pass misses
        ("if (unusual != unusual) {", "if (false) {"),
        # the thread looks again at tokens that are not its own
        ("problems |= problems_of(logits[id + i])", "problems |= problems_of(logits[id / 4 + i])"),
        ("score == 0 ? 0.0 : __ddiv_rn(score, temperature)", "score"),
    ],
)
def test_faults_are_found(emulated, right, wrong):
    def change(text: str) -> str:
        assert right in text
        return text.replace(right, wrong)

    emulated.compile_for(SOME, change)
    assert next(mismatches(emulated, SOME), None) is not None
