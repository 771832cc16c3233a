"""Every kernel of the engine on a card, against its cases."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from llmcli.kernels.cache import OnCompile, say_nothing
from llmcli.kernels.card_facts import CardFacts
from llmcli.kernels.device import Device
from llmcli.kernels.registry import KERNELS
from llmcli.lab.engine import CASES
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.problem import ENGINE, KernelCases, Problem
from llmcli.lab.trial import judge


@dataclass(frozen=True)
class KernelVerdict:
    """How a kernel did: its cases, how many of them are wrong, and what is wrong with the first of these.

    `largest` is the largest error of all cases as a part of its bound: at most 1 if all are right, else infinite.
    """

    kernel: str
    num_cases: int
    num_wrong: int
    largest: float
    fault: str


def verify_kernels(device: Device, on_compile: OnCompile = say_nothing) -> Iterator[KernelVerdict]:
    """Run the cases of every kernel that the card can run; what the cache lacks of all of them is compiled first.

    `on_compile` as in `Device.prepare_all`.

    Raises: DeviceError for one that fails, KernelCompileError
    """
    runnable = {stem: cases for stem, cases in CASES.items() if KERNELS[stem].runs_on(device.arch)}
    device.prepare_all({stem: launched_names(device.facts, cases) for stem, cases in runnable.items()}, on_compile)
    for cases in runnable.values():
        yield verify_kernel(device, cases)


def launched_names(card: CardFacts, cases: KernelCases) -> set[str]:
    """The name expressions that a kernel's checks launch on such a card."""
    names = set()
    for problem in cases.checks():
        notes: Any = Notes(card)
        problem.solvers[ENGINE](notes, phantoms_of(problem))
        names |= {launch.name for launch in notes.launches}
    return names


def verify_kernel(device: Device, cases: KernelCases) -> KernelVerdict:
    """Run all checks of one kernel.

    Raises: DeviceError for one that fails
    """
    largest, faults = [], []
    for problem in cases.checks():
        judgement = judge(device, problem, partial(problem.solvers[ENGINE], device))
        largest.append(judgement.largest)
        if judgement.fault:
            faults.append(f"{describe_problem(problem)}: {judgement.fault}")
    return KernelVerdict(cases.stem, len(largest), len(faults), max(largest), faults[0] if faults else "")


def describe_problem(problem: Problem) -> str:
    """Its form and its sizes."""
    sizes = ", ".join(f"{name} {size:,}" for name, size in problem.sizes.items())
    return f"{problem.label}, {sizes}" if problem.label else sizes
