"""Cases of the engine's kernels: each kernel has some, their launches are bound, and on a card they are right."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from right import launches

from llmcli.kernels.device import Device
from llmcli.kernels.launches import is_address
from llmcli.kernels.sources import flatten
from llmcli.lab import verify
from llmcli.lab.engine import CASES, KERNELS
from llmcli.lab.matrices import to_storage
from llmcli.lab.problem import ENGINE, KernelCases, Problem, find_mismatch, largest_error
from llmcli.lab.study import kernel_parameters
from llmcli.lab.trial import judge
from llmcli.lab.walk import card_of

NUMBERS = {np.dtype(np.int32): {"int"}, np.dtype(np.float32): {"float"}, np.dtype(np.float64): {"double"}}


def test_every_kernel_has_cases() -> None:
    assert set(CASES) == KERNELS.keys()
    assert all(cases.stem == stem for stem, cases in CASES.items())


@pytest.mark.parametrize("stem", CASES)
def test_launches_are_of_that_kernel(stem: str) -> None:
    """Checks need several of its variants, unless it has but one.

    Arguments are addresses where the source has pointers, and numbers of its types.
    """
    started, declared = set(), kernel_parameters(flatten(stem))
    for problem in (*CASES[stem].checks(), CASES[stem].typical()):
        assert problem.name == stem
        assert problem.num_bytes > 0
        found = launches(problem)
        assert found
        assert {launch.stem for launch in found} == {stem}
        started |= {launch.name for launch in found}
        for launch in found:
            parameters = declared[launch.name.partition("<")[0]]
            for parameter, argument in zip(parameters, launch.arguments, strict=True):
                assert parameter.is_pointer == (argument is None or is_address(argument)), parameter
                if isinstance(argument, np.generic) and argument.dtype in NUMBERS:
                    assert parameter.type in NUMBERS[argument.dtype]
    assert len(started) > 1 or len(KERNELS[stem].variants) == 1


@pytest.mark.parametrize("stem", CASES)
def test_references_pass_themselves_and_nothing_else(stem: str, pytestconfig: pytest.Config) -> None:
    """The expected output is right once stored; an unwritten output is wrong, and so is one wrong element.

    Two of the smallest problems of each label; all of them with --all.
    """
    problems = sorted(CASES[stem].checks(), key=lambda problem: problem.cost.flops)
    if not pytestconfig.getoption("--all"):
        alike = {label: [one for one in problems if one.label == label] for label in {one.label for one in problems}}
        problems = [problem for of_label in alike.values() for problem in of_label[:2]]
    for problem in problems:
        right = {name: stored(one.values, problem.outputs[name].dtype) for name, one in problem.expected.items()}
        assert set(right) == set(problem.outputs)
        assert find_mismatch(problem, right) is None, problem
        assert largest_error(problem, right) <= 1
        untouched = {name: before(problem, name) for name in problem.outputs}
        assert find_mismatch(problem, untouched) is not None, problem
        for name, array in right.items():
            expected = problem.expected[name]
            place = np.unravel_index(np.argmax(np.isfinite(expected.values)), expected.values.shape)
            if np.isfinite(expected.values[place]):
                bound = np.broadcast_to(expected.bound, expected.values.shape)[place]
                wrong = {**right, name: array.copy()}
                value = expected.values[place]
                step = 1.0 if array.dtype.kind in "iu" and array.dtype != np.uint16 else 4 * bound + 1 + abs(value)
                wrong[name][place] = stored(value + step, array.dtype)
                mismatch = find_mismatch(problem, wrong)
                assert mismatch is not None, (problem, name)
                assert (mismatch.output, mismatch.index) == (name, place)


def stored(values: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.asarray(to_storage(np.asarray(values), dtype))


def before(problem: Problem, name: str) -> np.ndarray:
    """An output's content before any launch."""
    output = problem.outputs[name]
    if output.initial:
        return problem.inputs[output.initial]
    if output.holds_zeros:
        return np.zeros(output.shape, output.dtype)
    size = int(np.prod(output.shape)) * np.dtype(output.dtype).itemsize
    return np.full(size, 0xFF, np.uint8).view(output.dtype).reshape(output.shape)


@pytest.mark.cuda
@pytest.mark.parametrize("stem", CASES)
def test_the_kernel_is_right(device: Device, stem: str) -> None:
    for problem in CASES[stem].checks():
        judgement = judge(device, problem, partial(problem.solvers[ENGINE], device))
        assert not judgement.fault, (problem.sizes, problem.label)


class Card:
    """A card of an architecture, which prepares nothing."""

    def __init__(self, arch: str):
        self.arch, self.facts = arch, card_of(arch)
        self.prepared: set[str] = set()

    def prepare_all(self, wanted: Mapping[str, Iterable[str]], on_compile: Any) -> None:
        self.prepared = set(wanted)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_kernels_of_another_architecture_are_left_out(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def name(device: Any, cases: KernelCases) -> str:
        return cases.stem

    monkeypatch.setattr(verify, "verify_kernel", name)
    monkeypatch.setattr(verify, "launched_names", lambda card, cases: set())
    card: Any = Card(arch)
    verified = set(verify.verify_kernels(card))
    assert verified == card.prepared == {stem for stem in CASES if KERNELS[stem].runs_on(arch)}
    assert ("gemm_wide" in verified) == (arch == "sm_90")
