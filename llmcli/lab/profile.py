"""What can be profiled: launches of a model's step, or a rung of a study; and the process that makes them for ncu.

For a step the process loads the model, runs the step once, notes its launches, and repeats the launches of one call:
each layer has its own weights, as in `roofline`. A rung runs on rotating copies of its arrays, as in `trial`.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llmcli.errors import UsageError
from llmcli.kernels.cache import KernelCache
from llmcli.kernels.launches import CardFacts, Launch
from llmcli.lab.catalogue import make_problem
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.nsight import Counters, count
from llmcli.lab.problem import Problem
from llmcli.lab.study import Study, find_rung, load_study, solve
from llmcli.lab.walk import Call, Lengths, Walk, use_of
from llmcli.patterns import child_program

LIBRARY = "cublas"  # what a rung without kernels of ours launches
# CuPy is imported later, with the worker: `find_problem` first gives it a folder.
_BOOTSTRAP = child_program(
    "llmcli.lab.profile_worker", before="from llmcli.kernels.device import find_problem; find_problem(); "
)


@dataclass(frozen=True)
class StepRequest:
    """Asks for launches of call `call` of step `step` of the walk over the model in `folder`.

    `step` is 0 for a step of decoding and 1 for a prompt.
    """

    folder: str
    lengths: Lengths
    step: int
    call: int


@dataclass(frozen=True)
class RungRequest:
    """Asks for launches of a rung at the study's last sizes."""

    study: str
    rung: str


ProfileRequest = StepRequest | RungRequest


@dataclass(frozen=True)
class Chosen:
    """A call of one of a model's steps, and its places: the step among the walks, the call in its step."""

    step: int
    index: int
    walk: Walk
    call: Call


def choose_call(walks: Sequence[Walk], stem: str, matrix: str | None) -> Chosen:
    """The call of a kernel whose launches move most bytes, or of those that read the weights of layer `matrix`.

    Raises: UsageError for an unknown kernel or layer, naming the known ones
    """
    calls = [
        Chosen(step, index, walk, call)
        for step, walk in enumerate(walks)
        for index, call in enumerate(walk.calls)
        if call.launch.stem == stem
    ]
    if not calls:
        launched = sorted({name for walk in walks for name, _ in walk.labels})
        raise UsageError(f"the model does not launch {stem}; it launches {', '.join(launched)}")
    if matrix is not None:
        names = dict.fromkeys(name for one in calls for name in one.call.matrix.split())
        if matrix not in names:
            known = f"it reads those of {', '.join(names)}" if names else "it reads those of no linear layer"
            raise UsageError(f"{stem} does not read the weights of {matrix!r}; {known}")
        calls = [one for one in calls if matrix in one.call.matrix.split()]
    return max(calls, key=lambda one: one.call.num_bytes * len(one.call.places))


def rung_call(name: str, rung_name: str, card: CardFacts, arch: str) -> tuple[Study, Problem, Call]:
    """The study, its problem of the last sizes, and the launch of a rung.

    Raises: UsageError for an unknown study or rung, or a rung of several launches; KernelCompileError
    """
    study, source = load_study(name)
    rung = find_rung(study, rung_name)
    problem = make_problem(study.problem, dict(study.sizes[-1]))
    notes = Notes(card)
    solve(notes, rung, source, problem, phantoms_of(problem))
    if len(notes.launches) > 1:
        raise UsageError(
            f"{name}/{rung_name} launches {len(notes.launches)} kernels, and a profile shows one; choose another rung"
        )
    if not notes.launches:
        return study, problem, Call(Launch(LIBRARY, "", (), 0, ()), "", problem.cost, (0,), None)
    (launch,) = notes.launches
    compiled = KernelCache().get_all([(launch.stem, launch.name)], arch)
    use = use_of(launch, compiled[launch.stem, launch.name], arch)
    return study, problem, Call(launch, "", problem.cost, (0,), use)


def profile(ncu: Path, request: ProfileRequest, arch: str) -> Counters:
    """Profile the requested launches with Nsight Compute. Raises: DeviceError"""
    return count(ncu, [sys.executable, "-P", "-c", _BOOTSTRAP, request_json(request)], arch)


def request_json(request: ProfileRequest) -> str:
    """A request for the command line of the process; ASCII only."""
    return json.dumps(asdict(request))


def read_request(text: str) -> ProfileRequest:
    """The inverse of `request_json`."""
    values = json.loads(text)
    if "lengths" in values:
        return StepRequest(**{**values, "lengths": Lengths(**values["lengths"])})
    return RungRequest(**values)
