"""Hub ids, names of files, and what huggingface_hub itself does."""

import os
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
from hub_server import HubServer
from huggingface_hub import constants

from llmcli.checkpoint.hub import list_cached_models, plan_removal, resolve_model
from llmcli.checkpoint.hub_client import (
    checked_commit,
    checked_etag,
    checked_revision,
    is_weights_name,
)
from llmcli.checkpoint.hub_library import HubId, find_hub_id, hub_settings
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


# Hub ids against paths.


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


# Odd values of the environment variables that huggingface_hub and the HTTP client read: one line each, no request.


def pull() -> object:
    return resolve_model("org/tiny", on_progress=lambda done, total: None)


USES: list[Callable[[], object]] = [pull, list_cached_models, lambda: plan_removal(HubId("org/tiny")), hub_settings]


NAMES = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")
VALUES = ("abc", "", "-1", "1.5", "inf", "1" * 400, "9" * 5000, "1000001")


@pytest.mark.parametrize(("value", "name", "use"), [*zip(VALUES, cycle(NAMES), cycle(USES), strict=False)])
def test_timeouts(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, use: Callable[[], object], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match=f"^{name} is '{value}', expected whole seconds from 0 to 1000000; "):
        use()
    assert not hub.requests


ENDPOINTS = (
    *("", "huggingface.co", "ftp://huggingface.co", "file:///etc/passwd", "https://", "https:///x", "https://[::1"),
    *("https://h:abc", "https://h:99999", "https://h:0", "https://h é", "https://h?x=1", "https://h#x", "http://é"),
    *("https://h\n", "https://[::g]:x"),
)


@pytest.mark.parametrize(("value", "use"), [*zip(ENDPOINTS, cycle(USES), strict=False)])
def test_endpoints(hub: HubServer, monkeypatch: pytest.MonkeyPatch, use: Callable[[], object], value: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", value)
    with pytest.raises(CheckpointError, match="^HF_ENDPOINT is '.*', expected an address such as https://huggingface"):
        use()
    assert not hub.requests


@pytest.mark.parametrize("value", ["https://huggingface.co", "http://h:8080/path/", "http://[::1]:80", "http://h/"])
def test_endpoints_that_are_fine(hub: HubServer, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", value)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "7")
    assert hub_settings().cache == Path(constants.HF_HUB_CACHE)


@pytest.mark.parametrize("token", ["hé", "a b", "\x7f", "日本"])
def test_tokens_that_no_request_can_carry(hub: HubServer, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(CheckpointError, match="^the token in HF_TOKEN or of `hf auth login` has an invalid character"):
        pull()
    assert not hub.requests


def test_a_token_file_that_is_not_text(hub: HubServer) -> None:
    path = Path(constants.HF_TOKEN_PATH)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="^org/tiny cannot be downloaded: text that is not valid Unicode"):
        pull()
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"cannot be stored: {path}: Is a directory"):
        pull()


@pytest.mark.parametrize(
    ("name", "value"),
    [("HTTP_PROXY", "foo://x"), ("ALL_PROXY", "socks5://h:1"), ("HTTPS_PROXY", "http://[::"), ("SSL_CERT_FILE", "/no")],
)
def test_settings_of_the_network(hub: HubServer, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match="^the network cannot be used: .*; check HTTP_PROXY, HTTPS_PROXY"):
        pull()


def test_a_trusted_publisher_without_an_id(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_OIDC_ID_TOKEN", "ACTIONS_ID_TOKEN_REQUEST_URL", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_OIDC_RESOURCE", "org/tiny")
    with pytest.raises(CheckpointError, match="^cannot get the token of HF_OIDC_RESOURCE: "):
        pull()


def test_a_cache_in_a_file(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HF_HOME names a file."""
    home = tmp_path / "file"
    home.write_text("")
    for name, path in (("HF_HUB_CACHE", home / "hub"), ("HF_TOKEN_PATH", home / "token")):
        monkeypatch.setattr(constants, name, str(path))
    with pytest.raises(CheckpointError, match=f"cannot be stored: {home}/token: Not a directory; set HF_HOME to"):
        pull()
    assert not list_cached_models().models
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home))
    with pytest.raises(CheckpointError, match=f"^the cache {home} is not a folder; set HF_HOME to another one$"):
        list_cached_models()


def test_a_working_folder_that_is_gone(
    hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add_model("org/tiny", tiny_llama)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "relative/hub")
    with pytest.raises(CheckpointError, match="^org/tiny cannot be stored: .*: No such file or directory"):
        pull()
    assert not list_cached_models().models
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    pull()
    os.chdir(tmp_path)


def test_a_name_longer_than_any_file(hub: HubServer) -> None:
    with pytest.raises(CheckpointError, match="is neither a local folder nor a valid hub id"):
        resolve_model(f"{'a' * 5000}/b", on_progress=lambda done, total: None)
