"""Reads a user's own source for a kernel of the engine, and compares it with what the launcher passes. Needs no CuPy.

Refuses kernels without reference checks: no kernel runs in a model before it was compared with a reference.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from llmcli.errors import UsageError
from llmcli.kernels.sources import flatten
from llmcli.lab.engine import CASES, KERNELS
from llmcli.lab.study import Parameter, Source, kernel_parameters, own_sources
from llmcli.reading import CUDA_SOURCE

_EXAMPLE = "such as embedding=mine.cu"


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
