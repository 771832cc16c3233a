"""Names from outside: which become part of a path or an address, and which are refused."""

import pytest

from llmcli.checkpoint.hub_files import (
    checked_commit,
    checked_etag,
    checked_revision,
    is_weights_name,
)
from llmcli.errors import CheckpointError

BAD_NAMES = (
    *("", ".", "..", "/", "a/b", "/home/u/.bashrc", "../x", "..\\x", "a\\b", "C:\\x", "C:x", ".hidden", "a\0b", "a\nb"),
    *("a\x1b[31m", "a" * 5000, "\ud800", "~", "*", "a?b", "a|b", "-a", "a\u202eb"),
)
SHA = "0a" * 32


@pytest.mark.parametrize("etag", [SHA, SHA[:40], "d41d8cd98f00b204e9800998ecf8427e-2"])
@pytest.mark.parametrize("form", ["{}", '"{}"', 'W/"{}"'])
def test_etags(etag: str, form: str) -> None:
    assert checked_etag(form.format(etag), "URL") == etag


@pytest.mark.parametrize("etag", [*BAD_NAMES, None, "x.incomplete", "x.lock", "x y", "é", "a" * 129, '"a" "b"'])
@pytest.mark.parametrize("form", ["{}", '"{}"', 'W/"{}"'])
def test_what_is_not_an_etag(etag: str | None, form: str) -> None:
    header = form.format(etag) if etag is not None else None
    with pytest.raises(CheckpointError, match="^URL comes with the ETag .*is HF_ENDPOINT a Hugging Face hub"):
        checked_etag(header, "URL")


@pytest.mark.parametrize("commit", [*BAD_NAMES, None, 3, "0" * 39, "0" * 41, "G" * 40, "A" * 40, "0" * 40 + "\n"])
def test_what_is_not_a_commit(commit: object) -> None:
    with pytest.raises(CheckpointError, match="^URL names the commit .*expected 40 hexadecimal digits"):
        checked_commit(commit, "URL")
    assert checked_commit(SHA[:40], "URL") == SHA[:40]


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/1", SHA[:40], "feature/größe", "a" * 255, "a@b"])
def test_revisions(revision: str) -> None:
    assert checked_revision(revision) == revision


@pytest.mark.parametrize(
    "revision",
    [
        *(name for name in BAD_NAMES if name != "a/b"),
        *("a/../b", "a/..", "a//b", "a/", "a..b", "x.lock", "a b", "refs/.x", "ä" * 128, "a" * 256),
    ],
)
def test_what_is_not_a_revision(revision: str) -> None:
    with pytest.raises(CheckpointError, match="is not a revision; expected a branch, a tag or a commit hash$"):
        checked_revision(revision)


@pytest.mark.parametrize("name", ["model", "model-00001-of-00002", "Ünï code (1)", "a" * 243, "_x", "a+b=c@d~e,f"])
def test_names_of_weights(name: str) -> None:
    assert is_weights_name(f"{name}.safetensors")


@pytest.mark.parametrize("name", [*BAD_NAMES, "a" * 244, "ä" * 122])
def test_what_is_not_a_name_of_weights(name: str) -> None:
    assert not is_weights_name(f"{name}.safetensors")


@pytest.mark.parametrize("name", [None, 3, [], "config.json", "x.safetensors.lock", "x.safetensors.incomplete"])
def test_other_files_are_not_weights(name: object) -> None:
    assert not is_weights_name(name)
