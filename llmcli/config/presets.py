"""Presets: named sets of sampling parameters in TOML files, the built-in ones in `configs/`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmcli.errors import UsageError
from llmcli.resources import resource_folder


@dataclass(frozen=True)
class Preset:
    """A preset's sampling parameters as written; the sampling room checks names and values."""

    name: str
    sampling: Mapping[str, object]


def preset_names() -> list[str]:
    """The built-in presets."""
    return sorted(path.stem for path in resource_folder("configs").glob("*.toml"))


def load_preset(name: str) -> Preset:
    """Read a preset by name, or from a file: anything with a path separator or the ending .toml is a path.

    Raises: UsageError for an unknown name, an unreadable file, or a file that is not of a preset's form.
    """
    path = Path(name)
    if path.suffix != ".toml" and path.name == name:
        path = resource_folder("configs") / f"{name}.toml"
        if not path.is_file():
            known = ", ".join(preset_names())
            raise UsageError(f"preset {name!r} is unknown, expected one of: {known}, or the path of a .toml file")
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"preset {path} cannot be read: {error}") from error
    sampling = content.get("sampling")
    unknown = sorted(set(content) - {"description", "sampling"})
    if not isinstance(sampling, dict) or unknown:
        found = ", ".join(sorted(content)) or "nothing"
        raise UsageError(f"preset {path} holds {found}, expected a table [sampling] and, if wanted, a description")
    return Preset(path.stem, sampling)
