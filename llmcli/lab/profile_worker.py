"""The process that Nsight Compute watches: it makes launches of one kernel, and marks them.

Started by `profile.py`; not for users.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llmcli.checkpoint.model import open_model
from llmcli.errors import LLMCliError
from llmcli.kernels.cache import say_nothing
from llmcli.kernels.device import Device
from llmcli.lab.catalogue import make_problem
from llmcli.lab.profile import ProfileRequest, RungRequest, StepRequest, read_request
from llmcli.lab.roofline import load_to_note, note_decode, note_prompt, starts_of
from llmcli.lab.study import find_rung, load_study, solve
from llmcli.lab.trial import run_marked, upload_copies
from llmcli.lab.walk import walk_model

NUM_LAUNCHES = 5

Run = Callable[[list[Callable[[], None]]], None]


def main() -> None:
    """Do what the first argument asks for."""
    try:
        make_launches(Device.open(), read_request(sys.argv[1]))
    except LLMCliError as error:
        sys.exit(f"error: {error}")


def make_launches(device: Device, request: ProfileRequest) -> None:
    """Make the requested launches, and mark them. Raises: LLMCliError and its subclasses"""
    device.activate()
    run = partial(run_marked, device, count=NUM_LAUNCHES)
    if isinstance(request, StepRequest):
        _make_step(device, request, run)
    else:
        _make_rung(device, request, run)


def _make_step(device: Device, request: StepRequest, run: Run) -> None:
    model, lengths = open_model(Path(request.folder)), request.lengths
    walk = walk_model(model, lengths, device.facts, device.arch)[request.step]
    runner = load_to_note(device, model, lengths, on_compile=say_nothing, on_load=lambda done, total: None)
    noted = (note_decode, note_prompt)[request.step](device, runner, lengths)
    starts = starts_of(walk, noted)
    run([starts[place] for place in walk.calls[request.call].places])


def _make_rung(device: Device, request: RungRequest, run: Run) -> None:
    study, source = load_study(request.study)
    rung = find_rung(study, request.rung)
    problem = make_problem(study.problem, dict(study.sizes[-1]))
    run([partial(solve, device, rung, source, problem, arrays) for arrays in upload_copies(device, problem)])
