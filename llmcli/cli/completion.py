"""What the shell offers for the value of an option or argument. Files are offered by the shell itself.

Each function takes what is typed so far and looks at names only, so the shell need not wait.
"""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from llmcli.cli import lazy
from llmcli.errors import UsageError
from llmcli.resources import BUILT_IN_MODELS, chat_folder, resource_folder

Completer = Callable[[str], list[str]]

# A word that a shell takes as it is: bash inserts what is offered without quotes.
_PLAIN_WORD = re.compile(r"[\w@%+=:,.-]+")


def complete_words(*words: str) -> Completer:
    """A completer that offers these words."""
    return lambda incomplete: _beginning(words, incomplete)


complete_device = complete_words("auto", "cpu", "cuda")


def complete_preset(incomplete: str) -> list[str]:
    """The presets that --preset takes."""
    return _beginning(lazy.presets.preset_names(), incomplete)


def complete_hub_id(incomplete: str) -> list[str]:
    """The models in the hub's cache."""
    return _beginning(lazy.hub_library.cached_repo_ids(), incomplete)


def complete_model(incomplete: str) -> list[str]:
    """Model folders at the typed path, the models in the hub's cache, the built-in ones, and the user's aliases."""
    paths = _folders_with("config.json", incomplete)
    try:
        aliases = [*lazy.settings.read_settings().aliases]
    except UsageError:
        aliases = []
    return paths + complete_hub_id(incomplete) + _beginning((*BUILT_IN_MODELS, *aliases), incomplete)


def complete_chat(incomplete: str) -> list[str]:
    """The kept chats, the latest first; one whose name needs quotes is left out."""
    names = (path.stem for path in lazy.kept_chats.kept_paths(chat_folder()))
    return _beginning(filter(_PLAIN_WORD.fullmatch, names), incomplete)


def complete_adapter(incomplete: str) -> list[str]:
    """Folders of LoRA adapters at the typed path."""
    return _folders_with("adapter_config.json", incomplete)


def complete_draft(incomplete: str) -> list[str]:
    """The ways to draft, and models that could draft."""
    return _beginning(("auto", "ngram", "off"), incomplete) + complete_model(incomplete)


def complete_subject(incomplete: str) -> list[str]:
    """As `complete_model`, and the shapes of configs/models."""
    shapes = sorted(path.stem for path in resource_folder("configs").glob("models/*.json"))
    return complete_model(incomplete) + _beginning(shapes, incomplete)


# What names a model.
MODEL_COMPLETERS = (complete_hub_id, complete_model, complete_draft, complete_subject)


def _folders_with(file_name: str, incomplete: str) -> list[str]:
    parent, name = os.path.split(incomplete)
    folders = sorted(path.parent.name for path in Path(parent).expanduser().glob(f"*/{file_name}"))
    return [os.path.join(parent, folder) for folder in _beginning(folders, name)]


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
