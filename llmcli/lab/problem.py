"""`Problem`: a computation, with its inputs, its right results, and its least cost.

Tests, `llmcli verify`, `llmcli kernels compare` and `--try` all check kernels against problems.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from inspect import signature
from typing import Any

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.spec import KernelCost

ROUNDING = 2.0**-24  # unit roundoff of float32 arithmetic
# Unit roundoff by the type in which an output is stored; bfloat16 is kept as uint16.
ROUNDOFF = {np.dtype(np.float32): ROUNDING, np.dtype(np.float16): 2.0**-11, np.dtype(np.uint16): 2.0**-8}

_EXACT = 2.0**-800  # replaces a bound of 0 where an error is divided by it

Arrays = Mapping[str, Any]  # arrays on the card by name: inputs and outputs of one problem
Solver = Callable[[Device, Arrays], None]  # solves a problem with a kernel of the engine, or of a library


@dataclass(frozen=True)
class Expected:
    """The right result: values, and how far a right answer may be from each. NaN where NaN must be.

    Shapes: values float64 of any shape; bound as values, or one number for all
    """

    values: np.ndarray
    bound: np.ndarray | float


@dataclass(frozen=True)
class Output:
    """The shape and the storage type of an output, which is full of NaN at first.

    `holds_zeros` for kernels that add to the output; `initial` names the input with its first values.
    """

    shape: tuple[int, ...]
    dtype: Any = np.float32
    holds_zeros: bool = False
    initial: str = ""


@dataclass(frozen=True)
class Problem:
    """One computation of certain sizes. `label` names what sizes do not show: a type, a form, an option.

    A kind fills in the name and the sizes of its problems.

    A study's kernel takes `inputs`, `outputs`, `scratch`, `sizes` and `scalars` by the names of its parameters;
    `scratch` is memory between the launches of a rung.
    `reference` computes the right results on demand, in float64; `cost` counts every byte once. `solvers` are kernels
    that Python launches: of the engine, of a library.
    """

    name: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    _: KW_ONLY
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, Output]
    reference: Callable[[], Mapping[str, Expected]]
    cost: KernelCost
    scalars: Mapping[str, Any] = field(default_factory=dict)
    scratch: Mapping[str, Output] = field(default_factory=dict)
    solvers: Mapping[str, Solver] = field(default_factory=dict)
    label: str = ""

    @cached_property
    def expected(self) -> Mapping[str, Expected]:
        """The right results by output, computed once."""
        return self.reference()

    @property
    def num_bytes(self) -> int:
        """Bytes that any kernel must move."""
        return self.cost.read_bytes + self.cost.written_bytes


@dataclass(frozen=True)
class ProblemKind:
    """A family of problems. The sizes are the parameters of `make`, whose result has neither name nor sizes yet."""

    name: str
    summary: str
    make: Callable[..., Problem]

    def of_sizes(self, **sizes: int) -> Problem:
        """The problem of these sizes. Raises: TypeError for others than the parameters of `make`"""
        known = signature(self.make).bind(**sizes)
        known.apply_defaults()
        return replace(self.make(**sizes), name=self.name, sizes=known.arguments)


ENGINE = "llmcli"  # the solver of the engine's own kernel


def by_engine(launcher: Callable[..., None], *names: str, **options: Any) -> dict[str, Solver]:
    """The engine's kernel as a solver: its launcher takes the arrays of these names, None where there is none."""

    def solve(device: Device, arrays: Arrays) -> None:
        launcher(device, **{name: arrays.get(name) for name in names}, **options)

    return {ENGINE: solve}


@dataclass(frozen=True)
class KernelCases:
    """The cases of one kernel of the engine, each with the solver ENGINE.

    `checks` are small and odd: what tests and `llmcli verify` run. `typical` is one call as a model makes it.
    """

    stem: str
    checks: Callable[[], Iterator[Problem]]
    typical: Callable[[], Problem]


@dataclass(frozen=True)
class Mismatch:
    """The worst element of a wrong output.

    `actual` is NaN where the kernel wrote nothing. Shapes: index as the output's
    """

    output: str
    count: int
    size: int
    index: tuple[int, ...]
    actual: float
    expected: float
    bound: float

    def __str__(self) -> str:
        place = ", ".join(map(str, self.index))
        return (
            f"{self.output}[{place}] is {self.actual:.9g}, expected {self.expected:.9g} within {self.bound:.3g}; "
            f"{self.count:,} of {self.size:,} elements are wrong"
        )


def find_mismatch(problem: Problem, results: Mapping[str, np.ndarray]) -> Mismatch | None:
    """The worst wrong element of these results, in the form that the card stored; None if all are right."""
    worst, worst_ratio = None, 0.0
    for name, expected in problem.expected.items():
        actual = stored_values(results[name])
        bound = np.broadcast_to(np.asarray(expected.bound, np.float64), expected.values.shape)
        error = _errors(actual, expected.values)
        wrong = ~(error <= bound)  # NaN is wrong, too
        if not wrong.any():
            continue
        ratio = np.where(np.isnan(error), np.inf, error / np.maximum(bound, _EXACT))
        ratio[~wrong] = 0
        index = tuple(map(int, np.unravel_index(np.argmax(ratio), ratio.shape)))
        if worst is None or ratio[index] > worst_ratio:
            worst_ratio = float(ratio[index])
            worst = Mismatch(
                name,
                int(wrong.sum()),
                wrong.size,
                index,
                float(actual[index]),
                float(expected.values[index]),
                float(bound[index]),
            )
    return worst


def largest_error(problem: Problem, results: Mapping[str, np.ndarray]) -> float:
    """The largest error of these results, as a part of its bound: at most 1 if all are right."""
    return max(
        float(np.max(_errors(stored_values(results[name]), expected.values) / np.maximum(expected.bound, _EXACT)))
        for name, expected in problem.expected.items()
    )


def _errors(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """How far each element is from the right one; 0 for the same infinity, and for NaN where NaN must be."""
    is_same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore"):  # of two infinities
        return np.where(is_same, 0.0, np.abs(actual - expected))


def stored_values(array: np.ndarray) -> np.ndarray:
    """The exact values of a stored array, as float64; uint16 holds bfloat16."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)
