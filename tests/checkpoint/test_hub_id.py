"""Hub ids against paths."""

from pathlib import Path

import pytest

from llmcli.checkpoint.hub_id import HubId, find_hub_id


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("meta-llama/Llama-3.2-1B", HubId("meta-llama/Llama-3.2-1B")),
        ("org/name@v1.0", HubId("org/name", "v1.0")),
        ("org/name@refs/pr/1", HubId("org/name", "refs/pr/1")),
        ("org/name@" + "0a" * 20, HubId("org/name", "0a" * 20)),
    ],
)
def test_ids(name: str, expected: HubId) -> None:
    assert find_hub_id(name) == expected
    assert str(expected) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", "name", "name@main", "./name", "../name", "./org/name", "/org/name", "~/name", "~org/name", ".org/name"),
        *("org/name/", "a/b/c", "org//name", "org/.name", "org/name@", "org/name@a b", "org/name@a@b", "org/na me"),
        *(r"C:\models\llama", "C:/llama", r"org\name", "org/", "/name", "org/größe", "org/name\n"),
    ],
)
def test_paths(name: str) -> None:
    assert find_hub_id(name) is None


def test_what_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_hub_id("org/name") == HubId("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert find_hub_id("org/name") is None
    assert find_hub_id("org/name@main") == HubId("org/name", "main")
    assert find_hub_id("org/other") == HubId("org/other")
