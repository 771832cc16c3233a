"""Problems of the lab on a card: the rules for every kernel."""

from functools import partial

from llmcli.kernels.device import Device
from llmcli.lab.problem import ENGINE, Problem
from llmcli.lab.trial import judge


def assert_right(device: Device, problem: Problem) -> None:
    """Fail unless results are within their bounds and the same twice, inputs unchanged, and nothing else is written."""
    judgement = judge(device, problem, partial(problem.solvers[ENGINE], device))
    assert not judgement.fault, f"{problem.name} {problem.label} {dict(problem.sizes)}: {judgement.fault}"
