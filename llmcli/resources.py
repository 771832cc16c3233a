"""Where the files that are no Python live: the folders `kernels` and `configs`.

They stand at the top of the source tree and travel inside the wheel under llmcli/resources.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def resource_folder(name: str) -> Path:
    """The folder `kernels` or `configs`, from the installed package or from the source tree around it."""
    installed = _PACKAGE / "resources" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
