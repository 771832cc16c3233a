"""Checks kernels on a card against their cases: every kernel of the engine, and those of a user."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llmcli.checkpoint.model import Model
from llmcli.checkpoint.translation import Translation
from llmcli.errors import DeviceError, UsageError
from llmcli.kernels.cache import OnCompile, say_nothing
from llmcli.kernels.device import Device
from llmcli.kernels.launches import CardFacts
from llmcli.lab.engine import CASES, KERNELS
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.own_kernel import OwnKernel
from llmcli.lab.problem import ENGINE, Arrays, KernelCases, Problem
from llmcli.lab.trial import Times, judge, measure, release_memory
from llmcli.runners.cuda.load.model import needed_kernels
from llmcli.runners.cuda.plan.memory import plan_memory
from llmcli.runners.cuda.plan.stored import StoredModel


@dataclass(frozen=True)
class KernelVerdict:
    """A kernel's result: its cases, how many of them are wrong, and what is wrong with the first wrong one.

    `largest` is the largest error of all cases as a share of its bound: at most 1 if all are right, else infinite.
    """

    kernel: str
    num_cases: int
    num_wrong: int
    largest: float
    fault: str


def verify_kernels(device: Device, on_compile: OnCompile = say_nothing) -> Iterator[KernelVerdict]:
    """Run the cases of every kernel that the card can run; first compile all that the cache lacks.

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
    """Run all checks of one kernel. Raises: DeviceError for one that fails"""
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


# A user's kernels on a card: compiled, run through all checks of the kernels that they replace, timed along with these.


@dataclass(frozen=True)
class TimesAlone:
    """Times of a kernel outside of any model: the user's and the engine's, in turns. `problem`: its form and sizes."""

    problem: str
    own: Times
    engine: Times


def prepare_own_kernels(
    device: Device,
    kernels: Sequence[OwnKernel],
    model: Model,
    *,
    dtype: str,
    kv_cache: str,
    context: int,
    num_rows: int,
    on_compile: OnCompile = say_nothing,
) -> list[str]:
    """Compile what the checks and the model launch of these kernels, and what the model launches of the engine's.

    `device` was opened with their sources. The others are as for `load`. Returns the name expressions that the model
    may launch and no check does.
    Raises: UsageError for a kernel that the model does not launch; CheckpointError as `StoredModel.of_translation`;
    KernelCompileError, UnsupportedModelError
    """
    translation = Translation(model)
    stored = StoredModel.of_translation(translation, dtype, kv_cache)
    plan = plan_memory(stored, max_seq_len=context, num_rows=num_rows, card=device.facts)
    needed = needed_kernels(translation.model, plan, device.facts)
    for kernel in kernels:
        if kernel.stem not in needed:
            launched = ", ".join(sorted(needed))
            raise UsageError(f"--kernel {kernel.stem}: the model does not launch it; it launches {launched}")
    checked = {kernel.stem: launched_names(device.facts, CASES[kernel.stem]) for kernel in kernels}
    device.prepare_all({stem: names.union(needed[stem]) for stem, names in checked.items()}, on_compile)
    with device.engine_kernels():
        device.prepare_all(needed, on_compile)
    return sorted(name for stem, names in checked.items() for name in set(needed[stem]) - names)


def check_own_kernel(device: Device, kernel: OwnKernel) -> None:
    """Run all of the kernel's checks with the user's source.

    Raises: DeviceError naming the first case that is wrong, with the worst element; or if the card fails
    """
    try:
        verdict = verify_kernel(device, CASES[kernel.stem])
    except DeviceError as error:
        raise DeviceError(f"{kernel} did not come to its end: {error}") from error
    if verdict.num_wrong:
        raise DeviceError(f"{kernel} is wrong in {verdict.num_wrong} of {verdict.num_cases} cases: {verdict.fault}")


def time_own_kernel(device: Device, kernel: OwnKernel) -> TimesAlone:
    """Time the user's kernel and the engine's on the kernel's typical problem, then free its memory.

    Raises: DeviceError
    """
    problem = CASES[kernel.stem].typical()
    solve = partial(problem.solvers[ENGINE], device)

    def solve_with_engine(arrays: Arrays) -> None:
        with device.engine_kernels():
            solve(arrays)

    times = measure(device, problem, {"own": solve, "engine": solve_with_engine})
    release_memory()
    return TimesAlone(describe_problem(problem), times["own"], times["engine"])
