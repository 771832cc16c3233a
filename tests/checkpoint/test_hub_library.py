"""Odd values of the environment variables that huggingface_hub and the HTTP client read: one line each, no request."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_server import HubServer
from huggingface_hub import constants

from llmcli.checkpoint.hub import list_cached_models, plan_removal, resolve_model
from llmcli.checkpoint.hub_id import HubId
from llmcli.checkpoint.hub_library import hub_settings
from llmcli.errors import CheckpointError


def pull() -> object:
    return resolve_model("org/tiny", on_progress=lambda done, total: None)


USES: list[Callable[[], object]] = [pull, list_cached_models, lambda: plan_removal(HubId("org/tiny")), hub_settings]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"])
@pytest.mark.parametrize("value", ["abc", "", "-1", "1.5", "inf", "1" * 400, "9" * 5000, "1000001"])
def test_timeouts(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, use: Callable[[], object], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match=f"^{name} is '{value}', expected whole seconds from 0 to 1000000; "):
        use()
    assert not hub.requests


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "value",
    [
        *("", "huggingface.co", "ftp://huggingface.co", "file:///etc/passwd", "https://", "https:///x", "https://[::1"),
        *("https://h:abc", "https://h:99999", "https://h:0", "https://h é", "https://h?x=1", "https://h#x", "http://é"),
        *("https://h\n", "https://[::g]:x"),
    ],
)
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
