"""A hub that lies: whatever it answers, one line for the user, nothing written outside the cache, bounded bytes."""

import itertools
import json
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import httpx2
import pytest
from hub_server import HubServer, Reply, Repository
from huggingface_hub import constants

from llmcli.checkpoint.hub import resolve_model
from llmcli.checkpoint.hub_client import HubClient
from llmcli.checkpoint.hub_library import HubId
from llmcli.checkpoint.model import open_model
from llmcli.errors import CheckpointError
from llmcli.reading import CONFIG

WEIGHTS = "model.safetensors"
PATHS = ("/api/models/org/tiny", "config.json", WEIGHTS)
BAD_NAMES = ("{home}/.bashrc", ".", "..", "", "../../x", "a\\b", "x.incomplete", "x.lock", "a" * 5000, "a b", "é")


def pull(name: str = "org/tiny") -> Path:
    return resolve_model(name, on_progress=lambda done, total: None)


def refusal(name: str = "org/tiny") -> str:
    begin = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        pull(name)
    assert time.monotonic() - begin < 5
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


def on(hub: HubServer, wanted: str, change: Callable[[str, Reply], None]) -> None:
    """Change the answers to paths that end in `wanted`; the change gets the method."""

    def changed(method: str, path: str, reply: Reply) -> None:
        if path.endswith(wanted):
            change(method, reply)

    hub.change = changed


def set_header(hub: HubServer, wanted: str, header: str, value: str) -> None:
    on(hub, wanted, lambda method, reply: reply.headers.update({header: value}))


def written_bytes() -> int:
    return sum(path.stat().st_size for path in Path(constants.HF_HUB_CACHE).rglob("*") if not path.is_symlink())


@pytest.mark.parametrize(
    ("name", "wanted", "header"),
    [
        (name, *place)
        for name, place in zip(BAD_NAMES, cycle([("config.json", "ETag"), (WEIGHTS, "X-Linked-Etag")]), strict=False)
    ],
)
def test_an_etag_is_not_a_path(tiny_hub: HubServer, tmp_path: Path, name: str, wanted: str, header: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    set_header(tiny_hub, wanted, header, f'"{name.format(home=home)}"')
    assert "comes with the ETag" in refusal()
    assert not list(home.iterdir())
    assert {path.name for path in tmp_path.iterdir()} <= {"home", "hf-home"}
    tiny_hub.change = None
    open_model(pull())


@pytest.mark.parametrize("commit", ["../" * 8 + "tmp/x", "/tmp/x", "0" * 40, "main", "", "0" * 5000])
def test_the_commit_of_an_answer_is_the_one_asked_for(tiny_hub: HubServer, commit: str) -> None:
    set_header(tiny_hub, "config.json", "X-Repo-Commit", commit)
    assert "config.json answers for the commit " in refusal()
    assert not Path(constants.HF_HUB_CACHE).exists()


@pytest.mark.parametrize("commit", ["../../x", "/tmp/x", "main", "", None, 3, ["0" * 40]])
def test_the_commit_of_a_list(tiny_hub: HubServer, commit: object) -> None:
    change_list(tiny_hub, {"sha": commit})
    assert "/api/models/org/tiny names the commit " in refusal()
    assert not Path(constants.HF_HUB_CACHE).exists()


def change_list(hub: HubServer, change: dict[str, object]) -> None:
    def changed(method: str, reply: Reply) -> None:
        body = json.dumps({**json.loads(b"".join(reply.body)), **change}).encode()
        reply.headers["Content-Length"], reply.body = str(len(body)), [body]

    on(hub, "/api/models/org/tiny", changed)


@pytest.mark.parametrize("siblings", [None, {}, "x", 3, [None], ["x"], [[]], [{}], [{"rfilename": 3}]])
def test_what_is_not_a_list_of_files(tiny_hub: HubServer, siblings: object) -> None:
    change_list(tiny_hub, {"siblings": siblings})
    assert "does not answer as a hub (" in (message := refusal()) or "has no config.json" in message


def test_sizes_in_a_list_are_not_asked_for(tiny_hub: HubServer) -> None:
    files = tiny_hub.repositories["org/tiny"].commits[tiny_hub.repositories["org/tiny"].refs["main"]]
    names = [*files, "../../x", "/etc/passwd", "a\0b", "a" * 5000]
    change_list(tiny_hub, {"siblings": [{"rfilename": name, "size": -(10**90)} for name in names]})
    open_model(pull())
    assert tiny_hub.requested_files() == {*files}


@pytest.mark.parametrize(
    "body",
    [
        b"<!DOCTYPE html><title>Sign in</title>",
        b"",
        b"{",
        b"\xff",
        b'{"sha": "\\ud800"}',
        b'{"size": 1' + b"0" * 400 + b"}",
        b"[" * 100_000,
        b"1" + b"0" * 5000,
        *(b"3", b"[]", b"null", b'"x"'),
    ],
)
def test_a_list_that_is_not_json(tiny_hub: HubServer, body: bytes) -> None:
    def change(method: str, reply: Reply) -> None:
        reply.headers["Content-Length"], reply.body = str(len(body)), [body]

    on(tiny_hub, "/api/models/org/tiny", change)
    assert " does not answer as a hub (" in (message := refusal()) or "names the commit" in message
    assert "if this network asks for a login" in message or "names the commit None" in message


def endless(method: str, reply: Reply) -> None:
    reply.headers.pop("Content-Length")
    reply.body = itertools.repeat(b" " * 65_536)


def test_a_list_without_end(tiny_hub: HubServer) -> None:
    on(tiny_hub, "/api/models/org/tiny", endless)
    assert refusal().endswith("/api/models/org/tiny sends over 8 MiB, too long an answer")


@pytest.mark.parametrize("wanted", [WEIGHTS, "config.json"])
def test_content_without_end(tiny_hub: HubServer, tiny_llama: Path, wanted: str) -> None:
    def change(method: str, reply: Reply) -> None:
        if method == "GET" and reply.status in (200, 206):
            endless(method, reply)

    on(tiny_hub, wanted, change)
    size = (tiny_llama / wanted).stat().st_size
    assert refusal() == f"org/tiny: {wanted} has more than the {size} bytes that the hub announced; try again later"
    assert written_bytes() <= sum(path.stat().st_size for path in tiny_llama.iterdir()) + 1000
    tiny_hub.change = None
    open_model(pull())


@pytest.mark.parametrize("size", ["-1", "1e9", "1" * 400, "x"])
def test_a_size_that_is_not_a_number(tiny_hub: HubServer, size: str) -> None:
    set_header(tiny_hub, WEIGHTS, "X-Linked-Size", size)
    assert refusal() == f"org/tiny: {WEIGHTS} comes without a size; is HF_ENDPOINT a Hugging Face hub?"


def test_another_size_than_that_of_the_content(tiny_hub: HubServer) -> None:
    set_header(tiny_hub, WEIGHTS, "X-Linked-Size", "680000")
    assert "has more than the 680000 bytes" in refusal()
    set_header(tiny_hub, WEIGHTS, "X-Linked-Size", "680681")
    assert "does not send org/tiny as it announced it (" in refusal()


def test_a_file_too_long_for_its_kind(tiny_hub: HubServer) -> None:
    def change(method: str, reply: Reply) -> None:
        if method == "HEAD":
            reply.headers["Content-Length"] = str(CONFIG.max_bytes + 1)

    on(tiny_hub, "config.json", change)
    assert refusal().endswith("config.json has 16.8 MB, over the limit of 16.8 MB for a config; try another revision")
    assert not tiny_hub.sent_bytes
    assert not Path(constants.HF_HUB_CACHE).exists()


def test_a_blob_of_another_size(tiny_hub: HubServer) -> None:
    """One ETag for all files: the first must not become the content of the others."""

    def change(method: str, path: str, reply: Reply) -> None:
        if "/resolve/" in path:
            reply.headers.pop("X-Linked-Etag", None)
            reply.headers["ETag"] = '"same"'

    tiny_hub.change = change
    assert "arrived damaged: 374 of 4269 bytes" in refusal()


LOCATIONS = ("file:///etc/passwd", "ftp://h/x", "http://[::1", "http://h:x/", "http://\x7f/")


@pytest.mark.parametrize(("location", "path"), [*zip(LOCATIONS, cycle(PATHS), strict=False)])
def test_redirects_to_what_is_not_the_web(tiny_hub: HubServer, path: str, location: str) -> None:
    def change(method: str, reply: Reply) -> None:
        reply.status, reply.headers["Location"] = 302, location

    on(tiny_hub, path, change)
    refusal()
    assert len(tiny_hub.requests) < 20


@pytest.mark.parametrize("location", ["http://cdn.net/x", "http://hub.co/a", "//h:x/", "ftp://cdn.net/x", "data:,x"])
@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_redirects_from_https(hub: HubServer, monkeypatch: pytest.MonkeyPatch, location: str, method: str) -> None:
    """What is not encrypted, others can read and change."""
    answer = httpx2.Response(302, headers={"Location": location}, request=httpx2.Request(method, "https://hub.co/a"))
    client = HubClient(HubId("org/tiny"))
    with pytest.raises((CheckpointError, httpx2.InvalidURL), match="not encrypted; expected https$|Invalid port"):
        client._check_answer(answer)
    answer.headers["Location"] = "https://cdn.net/x"
    client._check_answer(answer)


def test_redirects_on_the_hub_are_followed(tiny_hub: HubServer, tiny_llama: Path) -> None:
    """A renamed repository, under a hub that answers with the new name."""
    repository = tiny_hub.repositories["org/tiny"]
    tiny_hub.repositories["org/old"] = Repository(repository.commits, repository.refs)

    def change(method: str, path: str, reply: Reply) -> None:
        if "org/old" in path:
            reply.status, reply.body = 307, [b"moved"]
            reply.headers = {"Location": path.replace("org/old", "org/tiny"), "Content-Length": "5"}

    tiny_hub.change = change
    folder = pull("org/old")
    assert folder.parents[1].name == "models--org--old"
    assert (folder / WEIGHTS).read_bytes() == (tiny_llama / WEIGHTS).read_bytes()


@pytest.mark.parametrize("path", PATHS)
def test_the_token_stays_with_its_host(tiny_hub: HubServer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Redirected to another name of this machine, which the server answers without looking at a token."""
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    tiny_hub.repositories["org/tiny"].token = "hf_right"
    elsewhere = tiny_hub.url.replace("127.0.0.1", "localhost")

    def change(method: str, path_asked: str, reply: Reply) -> None:
        if path_asked.endswith(path) and not path_asked.startswith("/large/"):
            is_known = reply.status != 401
            reply.status, reply.body = (307 if is_known else 401), []
            reply.headers = {"Content-Length": "0"} | ({"Location": f"{elsewhere}{path_asked}"} if is_known else {})

    tiny_hub.change = change
    message = refusal()
    assert "org/tiny is neither a local folder nor a model" in message or "is missing the 'X-Repo-Commit'" in message


@pytest.mark.parametrize(
    "url", ["http://h:80/a", "http://h/", "https://hub.co/a", "http://hub.co.net/", "http://a.hub.co/"]
)
def test_the_token_goes_to_the_hub_only(hub: HubServer, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.co")
    client = HubClient(HubId("org/tiny"))
    for address, is_sent in ((url, False), ("http://hub.co/a", True), ("http://HUB.co:80/b", True)):
        request = httpx2.Request("GET", address, headers={"Authorization": "Bearer hf_right"})
        client._keep_token(request)
        assert ("Authorization" in request.headers) == is_sent


@pytest.mark.parametrize(
    ("status", "path"), [*zip([100 * n + m for n in (2, 3, 4, 5, 9) for m in (4, 18)], cycle(PATHS), strict=False)]
)
def test_odd_statuses(tiny_hub: HubServer, status: int, path: str) -> None:
    def change(method: str, reply: Reply) -> None:
        reply.status, reply.body = status, [b'{"error": [1], "errors": 3}']
        reply.headers = {"Content-Length": "27"} if status != 204 else {}

    on(tiny_hub, path, change)
    refusal()


def test_a_cache_without_links(tiny_hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    folder = pull()
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert (folder / WEIGHTS).read_bytes() == (tiny_llama / WEIGHTS).read_bytes()
    assert pull() == folder
    (folder / WEIGHTS).unlink()
    tiny_hub.is_damaged = True
    assert "arrived damaged" in refusal()
