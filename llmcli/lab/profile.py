"""Which launch of a model's step is profiled, and the process that makes it for Nsight Compute.

The process loads the model, runs the step once, notes what was launched, and makes the launches of one call again. Each
layer has its own weights, as in `step_times`.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llmcli.errors import UsageError
from llmcli.lab.counters import Counters
from llmcli.lab.nsight import count
from llmcli.lab.walk import Call, Lengths, Walk

NUM_LAUNCHES = 5
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
# CuPy is imported, by the second import, after the first has found it a folder.
_BOOTSTRAP = (
    f"import sys; sys.path.insert(0, {_PACKAGE_PARENT!r}); "
    "from llmcli.kernels.device import find_problem; find_problem(); "
    "from llmcli.lab.profile_worker import main; main()"
)


@dataclass(frozen=True)
class ProfileRequest:
    """What the process is told: launches of call `call` of step `step` of a walk over the model in `folder`.

    `step` is 0 for a step of decoding and 1 for a prompt.
    """

    folder: str
    lengths: Lengths
    step: int
    call: int
    num_launches: int = NUM_LAUNCHES

    @classmethod
    def from_json(cls, text: str) -> "ProfileRequest":
        """The inverse of `to_json`."""
        values = json.loads(text)
        return cls(**{**values, "lengths": Lengths(**values["lengths"])})

    def to_json(self) -> str:
        """For the command line of the process; ASCII only."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Chosen:
    """A call of one of a model's steps, and its places: the step among the walks, the call in its step."""

    step: int
    index: int
    walk: Walk
    call: Call


def choose_call(walks: Sequence[Walk], stem: str, matrix: str | None) -> Chosen:
    """The call of a kernel whose launches move most bytes, or of those that read the weights of layer `matrix`.

    Raises: UsageError for a kernel or a layer that is not there, naming those that are
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
            known = f"it reads {', '.join(names)}" if names else "it reads no weights of linear layers"
            raise UsageError(f"{stem} does not read the weights of {matrix!r}; {known}")
        calls = [one for one in calls if matrix in one.call.matrix.split()]
    return max(calls, key=lambda one: one.call.num_bytes * len(one.call.places))


def profile(ncu: Path, request: ProfileRequest, arch: str) -> Counters:
    """What Nsight Compute counts of the launches of a call.

    Raises: DeviceError
    """
    return count(ncu, [sys.executable, "-P", "-c", _BOOTSTRAP, request.to_json()], arch)
