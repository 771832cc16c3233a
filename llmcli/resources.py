"""The places of files that are not Python code: those shipped with the program, and the user's own.

`kernels` and `configs` are at the top of the source tree, and in the wheel under llmcli/resources, where the built-in
model always is. The environment variable LLMCLI_HOME moves all of the user's files into one folder.
"""

import os
from pathlib import Path

import platformdirs

_PACKAGE = Path(__file__).resolve().parent

# The built-in model, and the same in 16 bits for quantize, diff and eval: folders, and names on the command line.
STORYTELLER = "storyteller"
STORYTELLER_BF16 = "storyteller-bf16"
BUILT_IN_MODELS = (STORYTELLER, STORYTELLER_BF16)


def built_in_model(name: str) -> Path | None:
    """The folder of a built-in model; None if this program has no model of this name."""
    if name not in BUILT_IN_MODELS:
        return None
    folder = resource_folder(name)
    return folder if folder.is_dir() else None


def resource_folder(name: str) -> Path:
    """The folder `kernels`, `configs` or of a built-in model, from the package or from the source tree around it."""
    installed = _PACKAGE / "resources" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def user_presets_folder() -> Path:
    """The folder of the user's presets; it need not exist."""
    return _user_home(platformdirs.user_config_path("llmcli")) / "presets"


def chat_folder() -> Path:
    """The folder where `llmcli chat` keeps the last conversation and the user's input; it need not exist."""
    return _user_home(platformdirs.user_state_path("llmcli")) / "chat"


def kernel_cache_folder() -> Path:
    """The folder of compiled kernels; it need not exist, and may be deleted at any time."""
    return _user_home(platformdirs.user_cache_path("llmcli")) / "kernels"


def token_cache_folder() -> Path:
    """The folder of the bytes of tokenizers' tokens; it need not exist, and may be deleted at any time."""
    return _user_home(platformdirs.user_cache_path("llmcli")) / "tokens"


def bench_folder() -> Path:
    """The folder where `llmcli bench` writes random models; it need not exist, and may be deleted at any time."""
    return _user_home(platformdirs.user_cache_path("llmcli")) / "bench"


def _user_home(default: Path) -> Path:
    home = os.environ.get("LLMCLI_HOME")
    return Path(home) if home else default
