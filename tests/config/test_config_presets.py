"""Built-in presets are valid, and files of another form are refused."""

from pathlib import Path

import pytest

from llmcli.config.presets import load_preset, preset_names
from llmcli.errors import UsageError
from llmcli.sampling.params import resolve


@pytest.mark.parametrize("name", preset_names())
def test_built_in_presets_are_valid(name: str) -> None:
    preset = load_preset(name)
    resolved = resolve({}, preset.sampling, preset.name, {})
    assert f"preset {name}" in resolved.sources.values()


def test_story_and_precise_are_built_in() -> None:
    assert {"story", "precise"} <= set(preset_names())


def test_a_file_is_a_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[sampling]\ntemperature = 0.1\n")
    preset = load_preset(str(tmp_path / "mine.toml"))
    assert preset.name == "mine"
    assert preset.sampling == {"temperature": 0.1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("temperature = 0.1", r"holds temperature, expected a table \[sampling\]"),
        ("", r"holds nothing, expected a table \[sampling\]"),
        ("sampling = 3", r"expected a table \[sampling\]"),
        ("[sampling", "cannot be read"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        load_preset(str(path))


def test_an_unknown_preset_says_what_exists() -> None:
    with pytest.raises(UsageError, match="preset 'stories' is unknown, expected one of: precise, story"):
        load_preset("stories")
    with pytest.raises(UsageError, match="none.toml cannot be read"):
        load_preset("folder/none.toml")
