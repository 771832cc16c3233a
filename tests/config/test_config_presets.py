"""Built-in presets are valid, and files of another form are refused."""

import os
from pathlib import Path

import pytest

from llmcli.config.presets import list_presets, load_preset
from llmcli.errors import UsageError
from llmcli.sampling.params import resolve


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("name", ["story", "precise"])
def test_built_in_presets_are_valid(name: str) -> None:
    preset = load_preset(name)
    assert preset.description
    resolved = resolve({}, preset.sampling, preset.name, {})
    assert f"preset {name}" in resolved.sources.values()


def test_the_users_presets_are_found_and_hide_built_in_ones(home: Path) -> None:
    (home / "presets").mkdir(parents=True)
    (home / "presets" / "story.toml").write_text('description = "mine"\n[sampling]\ntop_k = 3\n')
    (home / "presets" / "wild.toml").write_text("[sampling]\ntemperature = 2.0\n")
    assert [preset.name for preset in list_presets()] == ["precise", "story", "wild"]
    assert load_preset("story").sampling == {"top_k": 3}
    assert load_preset("wild").path == home / "presets" / "wild.toml"


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
        ("description = 3\n[sampling]", "holds description, sampling, expected"),
        ("[sampling", "is not valid TOML"),
        ("[sampling]\ntop_k = 2020-01-01", "top_k is a date or a time"),
        ("[sampling]\nx = [{y = 07:32:00}]", "x is a date or a time"),
        ("[sampling]\ntop_k = " + "9" * 101, "an integer has more than 100 digits"),
        ("[sampling]\ntop_k = " + "9" * 5000, "is not valid TOML"),
        ("[sampling]\nx = " + "[" * 5000 + "]" * 5000, "is not valid TOML"),
        ("[sampling]\nx = " + "[" * 70 + "]" * 70, "nested more than 64 levels deep"),
        ('description = "' + "x" * 2**20 + '"\n[sampling]', "is longer than 1 MiB"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        load_preset(str(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_pipe_is_refused_and_not_waited_for(home: Path) -> None:
    (home / "presets").mkdir(parents=True)
    os.mkfifo(home / "presets" / "pipe.toml")
    for read in (list_presets, lambda: load_preset("pipe")):
        with pytest.raises(UsageError, match="pipe.toml is not a regular file, expected a preset"):
            read()


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'description = "caf\xe9"\n[sampling]')
    with pytest.raises(UsageError, match="latin.toml is not UTF-8 text"):
        load_preset(str(tmp_path / "latin.toml"))


def test_an_unknown_preset_says_what_exists() -> None:
    with pytest.raises(UsageError, match="preset 'stories' is unknown, expected one of: precise, story"):
        load_preset("stories")
    with pytest.raises(UsageError, match="none.toml cannot be read"):
        load_preset("folder/none.toml")
