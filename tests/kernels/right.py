"""Problems of the lab: the rules for every kernel on a card, and what is launched for a problem."""

from functools import partial
from typing import Any

from llmcli.kernels.device import Device
from llmcli.kernels.launches import Launch, check_launch
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.problem import ENGINE, Problem
from llmcli.lab.trial import judge


def assert_right(device: Device, problem: Problem) -> None:
    """Fail unless results are within their bounds and the same twice, inputs unchanged, and nothing else is written."""
    judgement = judge(device, problem, partial(problem.solvers[ENGINE], device))
    assert not judgement.fault, f"{problem.name} {problem.label} {dict(problem.sizes)}: {judgement.fault}"


def launches(problem: Problem) -> list[Launch]:
    """What the engine launches for a problem on a typical card. Raises: ValueError for a launch that no card takes"""
    notes: Any = Notes()
    problem.solvers[ENGINE](notes, phantoms_of(problem))
    for launch in notes.launches:
        check_launch(launch, notes.shared_bytes_per_block)
    return list(notes.launches)
