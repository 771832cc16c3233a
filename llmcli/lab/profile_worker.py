"""The process that Nsight Compute watches: it makes launches of one kernel, and marks them.

Started by `profile.py`; not for users.
"""

import sys
from pathlib import Path

from llmcli.checkpoint.model import open_model
from llmcli.errors import LLMCliError
from llmcli.kernels.cache import say_nothing
from llmcli.kernels.device import Device
from llmcli.lab.profile import ProfileRequest
from llmcli.lab.step_times import load_to_note, note_decode, note_prompt, starts_of
from llmcli.lab.trial import run_marked
from llmcli.lab.walk import walk_model


def main() -> None:
    """Do what the first argument says, a `ProfileRequest` as JSON."""
    try:
        _run(Device.open(), ProfileRequest.from_json(sys.argv[1]))
    except LLMCliError as error:
        sys.exit(f"error: {error}")


def _run(device: Device, request: ProfileRequest) -> None:
    """Load the model, run the step once, and make the launches of the call again.

    Raises: LLMCliError and its subclasses
    """
    device.activate()
    model, lengths = open_model(Path(request.folder)), request.lengths
    walk = walk_model(model, lengths, device.facts, device.arch)[request.step]
    runner = load_to_note(device, model, lengths, on_compile=say_nothing, on_load=lambda done, total: None)
    noted = (note_decode, note_prompt)[request.step](device, runner, lengths)
    starts = starts_of(walk, noted)
    run_marked(device, [starts[place] for place in walk.calls[request.call].places], request.num_launches)
