"""Files of a shape with random weights: written for a measurement, and removed after it unless they are kept."""

import os
import re
import shutil
from pathlib import Path
from types import TracebackType

import psutil

from llmcli.checkpoint.model import Model, open_model
from llmcli.checkpoint.random_weights import OnProgress, write_shape

# A scratch folder, or what an export or its source leaves next to it: the name holds the number of its process.
_SCRATCH_NAME = re.compile(r"\.?[\w.-]+-(?:int8|int4|awq|fp8|bf16)\.([0-9]+)(?:\.source|\.partial-[0-9a-f]+)?")


class Scratch:
    """The folder of the shape `name` in the format `form`, inside `parent`. As a context it removes what is not kept.

    `is_there` means that an earlier run has kept it: it is used as it is.
    """

    def __init__(self, name: str, form: str, parent: Path, *, keep: bool) -> None:
        kept = parent / f"{name}-{form}"
        self.is_there = kept.exists()
        self.folder = kept if keep or self.is_there else kept.with_name(f"{kept.name}.{os.getpid()}")
        self._is_kept = keep or self.is_there
        self._name, self._form = name, form

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_kept:
            shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, on_progress: OnProgress) -> None:
        """Write the weights, and remove what killed runs have left next to them.

        Raises: LLMCliError and its subclasses
        """
        _remove_abandoned(self.folder.parent)
        write_shape(self._name, self._form, self.folder, on_progress)

    def open(self) -> Model:
        """The model. Raises: CheckpointError and its subclasses."""
        return open_model(self.folder)


def _remove_abandoned(parent: Path) -> None:
    """Remove what killed runs have left: folders whose name ends in the number of no running process."""
    if not parent.is_dir():
        return
    for path in parent.iterdir():
        match = _SCRATCH_NAME.fullmatch(path.name)
        if match and path.is_dir() and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)
