"""A hub on this machine: the part of the hub's HTTP interface that a download uses, with faults on request.

Large files are answered with a redirect to another host name, as the hub does, which must not get the token.
"""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGE_SUFFIXES = (".safetensors", ".bin", ".gguf")


@dataclass
class Repository:
    """Files by commit and name, commits by branch or tag. `token`, if set, is the only one with access."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    is_gated: bool = False

    def add(self, files: dict[str, bytes], *refs: str) -> str:
        """Add a commit, at which `refs` then point; return its hash."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[commit] = files
        self.refs.update(dict.fromkeys(refs, commit))
        return commit


@dataclass
class Reply:
    """An answer before it is sent; a body may be endless."""

    status: int
    headers: dict[str, str]
    body: Iterable[bytes]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that closes the connection is not an error."""


class HubServer:
    """Serves `repositories` under `url` and counts requests."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []  # method and path
        self.ranges: list[str | None] = []  # of large files, as requested
        self.sent_bytes: Counter[str] = Counter()  # of file content, by file name
        self.cuts: list[int] = []  # each breaks one answer with a large file off, after this many bytes
        self.is_damaged = False  # large files: one byte is wrong
        self.knows_ranges = True
        self.failing_status: int | None = None  # the answer to everything
        self.change: Callable[[str, str, Reply], None] | None = None  # of every answer, by method and path
        self.answer = threading.Event()  # nothing is answered until it is set
        self.answer.set()
        self.pause = threading.Event()  # large files stop halfway until it is set
        self.pause.set()
        self._server = _Server(("127.0.0.1", 0), self._handler_class())
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def add_model(self, repo_id: str, folder: Path, *refs: str, **extra: bytes) -> Repository:
        """Add a folder as the first commit of a repository, with branch main; `extra` are more files."""
        files = {path.name: path.read_bytes() for path in folder.iterdir()} | extra
        repository = self.repositories[repo_id] = Repository()
        repository.add(files, "main", *refs)
        return repository

    def requested_files(self) -> set[str]:
        """Names of all requested files."""
        return {path.split("/", 5)[5] for path in map(_path, self.requests) if "/resolve/" in path}

    def close(self) -> None:
        """Refuse connections from now on."""
        self.pause.set()
        self.answer.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler_class(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(_Handler):
            server_state = hub

        return Handler


def _path(request: str) -> str:
    return request.split(" ", 1)[1]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: HubServer

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server_state
        path = urlsplit(self.path).path
        hub.requests.append(f"{self.command} {path}")
        hub.answer.wait(30)
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if hub.failing_status is not None:
            return self._fail(hub.failing_status)
        if parts[0] == "large":
            return self._send_large("/".join(parts[1:3]), parts[3], "/".join(parts[4:]))
        repo_id = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        repository = hub.repositories.get(repo_id)
        if repository is None:
            return self._fail(401, "RepoNotFound")  # the hub's answer without a token
        is_allowed = repository.token is None or self.headers["Authorization"] == f"Bearer {repository.token}"
        if not is_allowed and not repository.is_gated:
            return self._fail(401, "RepoNotFound")
        revision = (parts[5] if len(parts) > 5 else "main") if parts[0] == "api" else parts[3]
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return self._fail(404, "RevisionNotFound")
        files = repository.commits[commit]
        if parts[0] == "api":  # everyone sees the list of a gated repository's files
            what = _tree(files) if parts[4:5] == ["tree"] else _description(repo_id, commit, files)
            return self._send(json.dumps(what).encode())
        if not is_allowed:
            return self._fail(403 if self.headers["Authorization"] else 401, "GatedRepo")
        name = "/".join(parts[4:])
        if name not in files:
            return self._fail(404, "EntryNotFound")
        content = files[name]
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not name.endswith(LARGE_SUFFIXES):
            headers["ETag"] = f'"{hashlib.sha1(content).hexdigest()}"'
            return self._send(content, headers=headers, name=name)
        headers |= {"X-Linked-Etag": f'"{_sha256(content)}"', "X-Linked-Size": str(len(content))}
        headers["Location"] = f"http://localhost:{hub.port}/large/{repo_id}/{commit}/{name}"
        return self._send(b"", 302, headers)

    def _send_large(self, repo_id: str, commit: str, name: str) -> None:
        hub = self.server_state
        if self.headers["Authorization"]:
            return self._fail(400)
        content = hub.repositories[repo_id].commits[commit][name]
        if hub.is_damaged:
            content = bytes([content[0] ^ 1]) + content[1:]
        begin = 0
        hub.ranges.append(self.headers["Range"])
        if hub.knows_ranges and (wanted := self.headers["Range"]):
            begin = int(wanted.removeprefix("bytes=").removesuffix("-"))
        end = len(content)
        cut = hub.cuts.pop(0) if hub.cuts else None
        headers = {"Content-Length": str(end - begin)}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{end}"
        piece = content[begin:] if cut is None else content[begin : begin + cut]
        half = len(piece) // 2 if not hub.pause.is_set() else 0
        reply = Reply(206 if begin else 200, headers, (piece[:half], piece[half:]))
        self._send_reply(reply, name)
        self.close_connection |= cut is not None

    def _send(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None, name: str = "") -> None:
        self._send_reply(Reply(status, {"Content-Length": str(len(content)), **(headers or {})}, (content,)), name)

    def _send_reply(self, reply: Reply, name: str = "") -> None:
        """Send an answer; a body with a file's name is counted, and that of a large file may pause."""
        hub = self.server_state
        if hub.change:
            hub.change(self.command, urlsplit(self.path).path, reply)
            reply.headers.setdefault("Connection", "close")  # what follows a body of another length is unknown
            self.close_connection = True
        self.send_response(reply.status)
        for header, value in reply.headers.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command != "GET":
            return
        for part in reply.body:
            if name:
                hub.sent_bytes[name] += len(part)  # before the client can look
            self.wfile.write(part)
            if name.endswith(LARGE_SUFFIXES):
                hub.pause.wait(30)

    def _fail(self, status: int, code: str = "") -> None:
        self._send(b"", status, {"X-Error-Code": code} if code else None)


def _description(repo_id: str, commit: str, files: dict[str, bytes]) -> dict[str, object]:
    siblings: list[dict[str, object]] = [
        {"rfilename": name, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
        for name, content in files.items()
    ]
    return {"id": repo_id, "sha": commit, "siblings": siblings, "tags": [], "private": False}


def _tree(files: dict[str, bytes]) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for name, content in files.items()
    ]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
