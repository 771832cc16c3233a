"""A user's own source in the place of an engine kernel: read, held against what the launcher passes, checked on a card.

Refuses kernels without reference checks: nothing runs in a model that was not compared with a reference before.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from llmcli.checkpoint.model import Model
from llmcli.errors import DeviceError, UsageError
from llmcli.kernels.cache import OnCompile, say_nothing
from llmcli.kernels.device import Device
from llmcli.kernels.registry import KERNELS
from llmcli.kernels.sources import flatten
from llmcli.lab.engine import CASES
from llmcli.lab.ladder import Source, own_sources
from llmcli.lab.problem import ENGINE, Arrays
from llmcli.lab.signatures import Parameter, kernel_parameters
from llmcli.lab.trial import Times, measure
from llmcli.lab.verify import describe_problem, launched_names, verify_kernel
from llmcli.reading import CUDA_SOURCE
from llmcli.runners.cuda.load import needed_kernels
from llmcli.runners.cuda.memory import plan_memory
from llmcli.runners.cuda.stored import StoredModel

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
        """How many checks it has to pass."""
        return sum(1 for _ in CASES[self.stem].checks())


@dataclass(frozen=True)
class TimesAlone:
    """A kernel outside of any model: the user's and the engine's, in turns. `problem` says its form and its sizes."""

    problem: str
    own: Times
    engine: Times


def read_own_kernels(values: Iterable[str]) -> tuple[OwnKernel, ...]:
    """The files that `NAME=FILE` name, each for the kernel NAME. Needs no card and no compiler.

    Raises: UsageError for an unknown kernel, one without checks or named twice; for a file that cannot be read, is not
            ASCII, includes what is not there, or lacks a kernel that the launcher starts
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
    Raises: UsageError for a kernel that the model does not launch; KernelCompileError, UnsupportedModelError
    """
    stored = StoredModel.of_model(model, dtype, kv_cache)
    plan = plan_memory(stored, max_seq_len=context, num_rows=num_rows, card=device.facts)
    needed = needed_kernels(model, plan, device.facts)
    for kernel in kernels:
        if kernel.stem not in needed:
            raise UsageError(f"--kernel {kernel.stem}: the model does not launch it; it launches {_listed(needed)}")
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
    """Time the user's kernel and the engine's on the kernel's typical problem.

    Raises: DeviceError
    """
    problem = CASES[kernel.stem].typical()
    solve = partial(problem.solvers[ENGINE], device)

    def solve_with_engine(arrays: Arrays) -> None:
        with device.engine_kernels():
            solve(arrays)

    times = measure(device, problem, {"own": solve, "engine": solve_with_engine})
    return TimesAlone(describe_problem(problem), times["own"], times["engine"])


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
