"""Presets: named sets of sampling parameters in TOML files, built-in ones in `configs/` and the user's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmcli.errors import UsageError
from llmcli.reading import PRESET
from llmcli.resources import resource_folder, user_presets_folder


@dataclass(frozen=True)
class Preset:
    """A preset as written; the sampling room checks names and values of its parameters."""

    name: str
    path: Path
    description: str
    sampling: Mapping[str, object]


def list_presets() -> list[Preset]:
    """Every preset that can be named, by name; one of the user's hides a built-in one of the same name.

    Raises: UsageError for a file that is not of a preset's form.
    """
    return [_read_preset(path) for _, path in sorted(_preset_paths().items())]


def load_preset(name: str) -> Preset:
    """Read a preset by name, or from a file: anything with a path separator or the ending .toml is a path.

    Raises: UsageError for an unknown name, an unreadable file, or a file that is not of a preset's form.
    """
    if name.endswith(".toml") or Path(name).name != name:
        return _read_preset(Path(name))
    paths = _preset_paths()
    if name not in paths:
        known = ", ".join(sorted(paths))
        raise UsageError(f"preset {name!r} is unknown, expected one of: {known}, or the path of a .toml file")
    return _read_preset(paths[name])


def preset_names() -> list[str]:
    """The names of all presets, without a look into their files."""
    return sorted(_preset_paths())


def _preset_paths() -> dict[str, Path]:
    folders = (resource_folder("configs"), user_presets_folder())
    return {path.stem: path for folder in folders for path in folder.glob("*.toml")}


def _read_preset(path: Path) -> Preset:
    content = PRESET.read_toml(path)
    sampling, description = content.get("sampling"), content.get("description", "")
    unknown = set(content) - {"description", "sampling"}
    if not isinstance(sampling, dict) or not isinstance(description, str) or unknown:
        found = ", ".join(sorted(content)) or "nothing"
        raise UsageError(f"preset {path} holds {found}, expected a table [sampling] and, if wanted, a description")
    if strange := [name for name, value in sampling.items() if not _is_plain(value)]:
        raise UsageError(f"preset {path}: {strange[0]} is a date or a time, expected a number")
    return Preset(path.stem, path, description, sampling)


def _is_plain(value: object) -> bool:
    """Whether a value of TOML is one of JSON as well."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, str | int | float)
