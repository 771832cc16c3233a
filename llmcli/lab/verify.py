"""Checks kernels on a card against their cases: every kernel of the engine, and those of a user."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from llmcli.checkpoint.model import Model
from llmcli.checkpoint.translation import Translation
from llmcli.errors import DeviceError, UsageError
from llmcli.kernels.cache import OnCompile, say_nothing
from llmcli.kernels.card_facts import CardFacts
from llmcli.kernels.device import Device
from llmcli.kernels.registry import KERNELS
from llmcli.kernels.sources import flatten
from llmcli.lab.engine import CASES
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.problem import ENGINE, Arrays, KernelCases, Problem
from llmcli.lab.study import Parameter, Source, kernel_parameters, own_sources
from llmcli.lab.trial import Times, judge, measure, release_memory
from llmcli.reading import CUDA_SOURCE
from llmcli.runners.cuda.load.model import needed_kernels
from llmcli.runners.cuda.plan.memory import plan_memory
from llmcli.runners.cuda.plan.stored import StoredModel

# Reads a user's own source for a kernel of the engine, and compares it with what the launcher passes. Needs no CuPy.
#
# Refuses kernels without reference checks: no kernel runs in a model before it was compared with a reference.

_EXAMPLE = "such as rms_norm=mine.cu"


@dataclass(frozen=True)
class OwnKernel:
    """A user's file for the kernel `stem`; `text` is its source with all includes."""

    stem: str
    path: Path
    text: str

    def __str__(self) -> str:
        return f"{self.stem} from {self.path}"

    @property
    def num_cases(self) -> int:
        """How many checks it must pass."""
        return sum(1 for _ in CASES[self.stem].checks())


def read_own_kernels(values: Iterable[str]) -> tuple[OwnKernel, ...]:
    """Read the files of `NAME=FILE`, each for the kernel NAME. Needs no card and no compiler.

    Raises: UsageError for an unknown kernel, one without checks or named twice; for a file that cannot be read, is not
            ASCII, includes a missing file, or lacks a kernel that the launcher starts
    """
    found: dict[str, OwnKernel] = {}
    for value in values:
        stem, is_there, path = value.partition("=")
        if not is_there or not path:
            raise UsageError(f"--kernel is {value!r}, expected NAME=FILE, {_EXAMPLE}")
        _check_name(stem)
        if stem in found:
            raise UsageError(f"--kernel names {stem} twice: {found[stem].path} and {path}")
        found[stem] = _read(stem, Path(os.path.expanduser(path)))
    return tuple(found.values())


def _check_name(stem: str) -> None:
    if stem not in KERNELS:
        close = get_close_matches(stem, KERNELS, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {_listed(KERNELS)}"
        raise UsageError(f"--kernel: there is no kernel {stem!r}; {hint}")
    if stem not in CASES:
        raise UsageError(
            f"--kernel {stem}: llmcli has no reference checks of this kernel, and runs no kernel unchecked; "
            f"there are checks of {_listed(CASES)}"
        )


def _read(stem: str, path: Path) -> OwnKernel:
    text = CUDA_SOURCE.read_text(path)
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.isascii() or "\0" in line:
            odd = next(character for character in line if not character.isascii() or character == "\0")
            raise UsageError(f"{path}:{number}: {odd!r} is not an ASCII character of a source; remove it")
    flattened = own_sources([Source(stem, text, path)])[stem]
    _check_entry_points(stem, path, flattened)
    return OwnKernel(stem, path, flattened)


def _check_entry_points(stem: str, path: Path, flattened: str) -> None:
    """Refuse a source whose kernels do not take what the launcher passes."""
    ours, theirs = kernel_parameters(flatten(stem)), kernel_parameters(flattened)
    for name in dict.fromkeys(variant.partition("<")[0] for variant in KERNELS[stem].variants):
        if name not in theirs:
            raise UsageError(f"{path} does not define __global__ void {name}({_declared(ours[name])})")
        expected, actual = ours[name], theirs[name]
        is_alike = len(expected) == len(actual) and all(map(Parameter.takes_as, actual, expected))
        if not is_alike:
            raise UsageError(f"{path}: {name} takes ({_declared(actual)}), expected ({_declared(expected)})")


def _declared(parameters: Sequence[Parameter]) -> str:
    return ", ".join(one.declared for one in parameters)


def _listed(stems: Iterable[str]) -> str:
    return ", ".join(sorted(stems))


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
