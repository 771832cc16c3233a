"""Random lies of a hub, seeded: nothing but our errors, nothing written outside the cache, bounded time and bytes.

`--hub-fuzz N` runs N lies instead of 120, and N / 100 kills instead of 2; add `--timeout 0`.
"""

import hashlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer, Reply
from huggingface_hub import constants

from llmcli.checkpoint.hub import list_cached_models, resolve_model
from llmcli.errors import LLMCliError

MAX_SECONDS = 5
MAX_WRITTEN_BYTES = 30_000_000  # sizes between this and the disk's are not used
FAST_CASES = 120
TIMEOUTS = ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT")

NAMES = (
    *("/home/u/.bashrc", "{home}/.bashrc", "{home}/new", ".", "..", "", "/", "../" * 12 + "{home}/x", "..\\x", "a\\b"),
    *(
        "x" * 5000,
        "x.incomplete",
        "x.lock",
        "a b",
        "é",
        "\x80",
        '"',
        'W/"',
        "0" * 40,
        "0a" * 32,
        "main",
        "refs/x",
        "a\nb: c",
    ),
)
NUMBERS = ("-1", "0", "1", "374", "680679", "680681", "8000000", "9" * 16, "9" * 20, "1" + "0" * 400, "1e9", "", "x")
LOCATIONS = (
    *("file:///etc/passwd", "ftp://127.0.0.1/x", "javascript:1", "http://[::1", "http://[::g]/", "http://127.0.0.1:x/"),
    *("http://127.0.0.1:1/", "{url}/api/models/org/tiny", "/", "", "?", "//localhost:{port}/org/tiny/resolve/x/y"),
    *("http://127.0.0.1:99999/", "http:///x", "x" * 70_000, "\x80", "http://" + "a" * 300, "../../..", "{url}/large/x"),
)
RANGES = (
    *("", "bytes 0-1/2", "bytes 0-680679/680680", "bytes 0-680679/*", "bytes */680680", "bytes 5-4/3", "x"),
    *("bytes -1-2/3", "bytes 0-" + "9" * 400 + "/1", "bytes 340340-680679/680680"),
)
HEADERS: dict[str, tuple[str, ...]] = {
    "ETag": NAMES,
    "X-Linked-Etag": NAMES,
    "X-Repo-Commit": NAMES,
    "X-Linked-Size": NUMBERS,
    "Content-Length": NUMBERS,
    "Content-Range": RANGES,
    "Location": LOCATIONS,
    "Content-Encoding": ("gzip", "br", "x"),
    "Transfer-Encoding": ("chunked", "identity", "x"),
    "Retry-After": ("0", "999999999", "-1"),
    "X-Error-Code": ("GatedRepo", "RepoNotFound", "RevisionNotFound", "EntryNotFound", "x"),
    "X-Error-Message": ("Access to this resource is disabled.", "Invalid credentials in Authorization header"),
    "Set-Cookie": ("a=b; Domain=127.0.0.1", "=;;;", "x" * 5000),
    "Connection": ("close", "keep-alive", "upgrade"),
}
STATUSES = (
    200,
    201,
    204,
    206,
    206,
    300,
    301,
    302,
    304,
    307,
    308,
    400,
    401,
    403,
    404,
    408,
    416,
    418,
    429,
    500,
    503,
    599,
    999,
)
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 10**90, 10**400, "", "x", "../../x", "\ud800"),
    *([], {}, [None], {"rfilename": "../x"}),
)


class Lies:
    """One case: which answers are changed, and how. The same seed gives the same case."""

    def __init__(self, seed: str, hub: HubServer, home: Path) -> None:
        self.draw = random.Random(seed)
        self.fill = {"home": home, "url": hub.url, "port": hub.port}
        self.told: list[str] = []
        self.changes = [self._change() for _ in range(self.draw.choice((1, 1, 1, 2, 3)))]

    def __call__(self, method: str, path: str, reply: Reply) -> None:
        for applies, change in self.changes:
            if applies(method, path):
                change(reply)

    def _change(self) -> tuple[Callable[[str, str], bool], Callable[[Reply], None]]:
        wanted = self.draw.choice(("/api/", "config.json", "tokenizer", "safetensors", "/resolve/", "/large/", ""))
        method = self.draw.choice(("HEAD", "GET", "GET", ""))
        last = self.draw.choice((1, 2, 1000))  # how often it lies
        count = itertools.count(1)
        change = self.draw.choice((self._header, self._header, self._header, self._status, self._body, self._body))()
        self.told.append(f"{method or 'all'} {wanted or 'all'}, {last} times: {change.__doc__}")
        return lambda asked, path: wanted in path and method in asked and next(count) <= last, change

    def _header(self) -> Callable[[Reply], None]:
        name = self.draw.choice([*HEADERS])
        value = self.draw.choice(HEADERS[name]).format(**self.fill)
        quoted = name in ("ETag", "X-Linked-Etag") and self.draw.random() < 0.5
        is_redirect = name == "Location" and self.draw.random() < 0.8
        is_missing = self.draw.random() < 0.15

        def change(reply: Reply) -> None:
            reply.headers.pop(name, None)
            if not is_missing:
                reply.headers[name] = f'"{value}"' if quoted else value
            if is_redirect:
                reply.status = 302

        change.__doc__ = f"{name} {'missing' if is_missing else repr(value[:80])}"
        return change

    def _status(self) -> Callable[[Reply], None]:
        status = self.draw.choice(STATUSES)

        def change(reply: Reply) -> None:
            reply.status = status

        change.__doc__ = f"status {status}"
        return change

    def _body(self) -> Callable[[Reply], None]:
        kind = self.draw.choice(("json", "json", "json", "cut", "flip", "longer", "endless", "page", "deep", "stall"))
        key, value = self.draw.choice(("sha", "siblings", "size", "weight_map", "id")), self.draw.choice(VALUES)
        position = self.draw.random()
        keeps_length = self.draw.random() < 0.3

        def change(reply: Reply) -> None:
            if kind in ("endless", "stall"):
                reply.headers.pop("Content-Length", None)
                wait = (threading.Event().wait(1) and b"" for _ in range(10))
                reply.body = itertools.repeat(b"a" * 65_536) if kind == "endless" else (part or b"a" for part in wait)
                return
            body = b"".join(reply.body)
            index = int(position * len(body))
            if kind == "json" and body.startswith(b"{"):
                body = json.dumps({**json.loads(body), key: value}).encode()
            elif kind == "json":
                body = json.dumps(value).encode()
            elif kind == "cut":
                body = body[:index]
            elif kind == "flip":
                body = body[:index] + bytes([body[index] ^ 0x40]) + body[index + 1 :] if body else b"x"
            elif kind == "longer":
                body += b"a" * 100_000
            else:
                body = b"<!DOCTYPE html><title>Sign in</title>" if kind == "page" else b"[" * 100_000
            reply.body = [body]
            if not keeps_length:
                reply.headers["Content-Length"] = str(len(body))

        change.__doc__ = f"body {kind} {key} {str(value)[:40]!r} at {position:.2f}"
        return change


@pytest.fixture
def num_cases(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--hub-fuzz")) or FAST_CASES


def outside(sandbox: Path, cache: Path) -> dict[str, object]:
    """Everything in the sandbox but the cache's content."""
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in sandbox.rglob("*")
        if cache not in path.parents
    }


def test_random_lies(
    hub: HubServer, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cases: int
) -> None:
    home = tmp_path / "home"
    for name in (".bashrc", ".ssh/authorized_keys", "work/config.json"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("mine")
    cache = home / ".cache" / "hub"
    cache.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SSL_CERT_DIR", str(home))  # reading all certificates is half the time of a case
    monkeypatch.chdir(home / "work")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    for name in TIMEOUTS:
        monkeypatch.setattr(constants, name, 0.15)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.add_model("org/tiny", tiny_llama)
    true = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    before = outside(tmp_path, cache)
    num_refused = 0
    for index in range(num_cases):
        lies = Lies(f"hub {index}", hub, home)
        hub.change = lies
        begin = time.monotonic()
        folder = None
        try:
            folder = resolve_model("org/tiny", on_progress=lambda done, total: None)
        except LLMCliError as error:
            message = str(error)
        except BaseException as error:
            raise AssertionError(f"case {index}: {lies.told}") from error
        if folder is None:
            num_refused += 1
            assert "\n" not in message, lies.told
            assert len(message) < 2000, lies.told
        else:
            weights = folder / "model.safetensors"
            named = re.fullmatch("[0-9a-f]{64}", weights.resolve().name)
            assert not named or hashlib.sha256(weights.read_bytes()).hexdigest() == named[0], lies.told
            assert {path.name for path in folder.iterdir()} == {*true}, lies.told
        assert time.monotonic() - begin < MAX_SECONDS, lies.told
        list_cached_models()
        assert outside(tmp_path, cache) == before, lies.told
        files = [path for path in cache.rglob("*") if path.is_file()]
        assert all(cache in path.resolve().parents for path in files), lies.told
        assert sum(path.stat().st_size for path in files if not path.is_symlink()) < MAX_WRITTEN_BYTES, lies.told
        if index % 3 == 0:  # what a lie leaves stays for the next two cases
            shutil.rmtree(cache)
            cache.mkdir()
    # The truth, after all lies, without what they left.
    for name in TIMEOUTS:
        monkeypatch.setattr(constants, name, 10)
    shutil.rmtree(cache)
    cache.mkdir()
    hub.change = None
    folder = resolve_model("org/tiny", on_progress=lambda done, total: None)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == true
    assert num_cases // 3 < num_refused < num_cases  # lies that matter, and lies that do not


def test_kills(hub: HubServer, tiny_llama: Path, num_cases: int) -> None:
    """Killed at any moment, a download is complete and right at the next call, which removes what the kill left."""
    draw = random.Random(1)
    hub.add_model("org/tiny", tiny_llama)
    true = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    command = [sys.executable, "-m", "llmcli", "pull", "org/tiny"]
    seconds = _seconds(command, hub)
    num_kept = 0
    num_kills = max(2, num_cases // 100)
    for _ in range(num_kills):
        shutil.rmtree(constants.HF_HUB_CACHE, ignore_errors=True)
        hub.pause.set()
        if draw.random() < 0.5:  # in the middle of the weights, or anywhere
            hub.pause.clear()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            time.sleep(draw.uniform(0.3, 1.1) * seconds)
            process.kill()
        hub.pause.set()
        num_kept += any(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))
        list_cached_models()
        again = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert again.returncode == 0, again.stderr
        folder = Path(again.stdout.removesuffix("\n"))
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == true
        assert not any(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))
        assert not list_cached_models().unreadable
    print(f"{num_kept} of {num_kills} kills left an unfinished file")


def _seconds(command: list[str], hub: HubServer) -> float:
    begin = time.monotonic()
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    return time.monotonic() - begin
