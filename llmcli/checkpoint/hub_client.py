"""Asks the hub over HTTP, bounds what it may answer, brings its files into the cache, and says what fails in a line.

The token goes to the hub's own scheme, host and port, and nowhere else. Redirects are followed to http and https only,
never from https to http, and ten times at most. huggingface_hub's own client is not used: it reads bodies of any
length, follows redirects to anywhere, and takes what an answer says as the name of a file.
"""

import errno
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar
from urllib.parse import quote

import httpx2

from llmcli import __version__
from llmcli.checkpoint.adapter import ADAPTER_WEIGHTS_NAME
from llmcli.checkpoint.folder import ADAPTER_CONFIG_NAME
from llmcli.checkpoint.hub_files import (
    check_content_range,
    checked_commit,
    checked_etag,
    checked_size,
    is_complete,
    redirect_target,
)
from llmcli.checkpoint.hub_id import HubId
from llmcli.checkpoint.hub_library import file_lock, hub_settings, hub_token, repository_folder
from llmcli.errors import CheckpointError
from llmcli.foreign_errors import foreign_errors_explained, is_memory_error
from llmcli.reading import parse_json

# Turns failed connections and the hub's answers into one line with the next step.

_AGAIN = "try again; partial downloads resume"
_BAD_TOKEN = "Invalid credentials in Authorization header"
_BUSY = (408, 429, 500, 502, 503, 504)
_MAX_COMMITS = 3  # named in one message
_MAX_REASON = 200  # characters of a message of the HTTP client, which may quote what it got


class HubBusyError(CheckpointError):
    """The hub answers that it cannot answer now: worth another attempt."""


@contextmanager
def hub_errors_explained(hub_id: HubId) -> Iterator[None]:
    """Turn errors of reaching the hub and of writing its cache into CheckpointError."""
    with foreign_errors_explained(f"{hub_id} cannot be downloaded", CheckpointError):
        try:
            yield
        except (OSError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            if is_memory_error(error):
                raise
            raise CheckpointError(_explain(error, hub_id)) from error


def refuse_status(response: httpx2.Response, hub_id: HubId) -> None:
    """Refuse every answer that is not the requested content, without reading its untrusted body.

    Raises: CheckpointError; HubBusyError where waiting may help.
    """
    if response.is_success:
        return
    status, code = response.status_code, response.headers.get("X-Error-Code")
    hub = hub_settings().endpoint
    page = f"{hub}/{hub_id.repo_id}"
    if code == "GatedRepo":
        raise _no_access(status, hub_id, page, "it is gated")
    if code == "RevisionNotFound":
        raise CheckpointError(
            f"{hub_id.repo_id} has no revision {hub_id.revision or 'main'}; {page}/commits/main lists them"
        )
    # Without more detail the model is private or does not exist: the hub answers both alike.
    if code == "RepoNotFound" or (status == 401 and response.headers.get("X-Error-Message") != _BAD_TOKEN):
        raise CheckpointError(
            f"{hub_id.repo_id} is neither a local folder nor a model on {hub}; check the spelling, "
            "or set HF_TOKEN or run `hf auth login` if it is private"
        )
    if status in (401, 403):
        raise _no_access(status, hub_id, page, "gated or private, or the token is not valid")
    kind = HubBusyError if status in _BUSY else CheckpointError
    phrase = httpx2.codes.get_reason_phrase(status)
    raise kind(f"{hub} answers {' '.join(f'{status} {phrase}'.split())} for {hub_id}; wait, then {_AGAIN}")


def offline_error(hub_id: HubId) -> CheckpointError:
    """The error for a download that is needed but forbidden."""
    return CheckpointError(
        f"{hub_id} is neither a local folder nor complete in the cache {hub_settings().cache}, "
        f"and HF_HUB_OFFLINE forbids downloads; {_complete_snapshots(hub_id)}unset HF_HUB_OFFLINE"
    )


def _complete_snapshots(hub_id: HubId) -> str:
    """Name the complete commits in the cache, for a revision that is not among them."""
    snapshots = sorted((repository_folder(hub_id.repo_id) / "snapshots").glob("*"))
    whole = [folder for folder in snapshots if folder.name.isalnum() and (is_complete(folder) or _has_adapter(folder))]
    ids = " or ".join(f"{hub_id.repo_id}@{folder.name}" for folder in whole[:_MAX_COMMITS])
    return f"give {ids}, which is complete there, or " if ids else ""


def _has_adapter(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME))


def _explain(error: BaseException, hub_id: HubId) -> str:
    """One line for the user; the order of the cases is that of the classes, the special before the general."""
    settings = hub_settings()
    hub = settings.endpoint
    if isinstance(error, httpx2.TimeoutException):
        return f"{hub} did not answer in time for {hub_id}; check the network, then {_AGAIN}"
    if isinstance(error, httpx2.HTTPError | httpx2.InvalidURL):
        reason = str(error)[:_MAX_REASON]
        if isinstance(error, httpx2.ConnectError):  # a folder's misspelt name without a network ends here, too
            return (
                f"{hub_id} is not a local folder, and {hub} cannot be reached ({reason}); "
                f"{_complete_snapshots(hub_id)}check the spelling, or the network (or HF_ENDPOINT), then {_AGAIN}"
            )
        return f"cannot reach {hub} for {hub_id} ({reason}); check the network (or HF_ENDPOINT), then {_AGAIN}"
    assert isinstance(error, OSError)
    if error.errno == errno.ENOSPC:
        return f"the disk of {settings.cache} is full; free some space, then {_AGAIN}"
    where = error.filename or settings.cache
    return f"{hub_id} cannot be stored: {where}: {error.strerror or error}; set HF_HOME to another folder"


def _no_access(status: int, hub_id: HubId, page: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"no access to {hub_id.repo_id} ({status}, {why}): accept its licence on {page}, then set "
        "HF_TOKEN to a token of that account, or run `hf auth login`"
    )


_MAX_REDIRECTS = 10
_MAX_FAILURES = 4
_MAX_LIST_BYTES = 8 * 1024**2  # a hundred thousand files
_MAX_DRAINED_BYTES = 64 * 1024
_LINKED_ETAG, _LINKED_SIZE = "X-Linked-Etag", "X-Linked-Size"

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class FileList:
    """The names of all files of a repository at one commit; the names are as the hub sends them."""

    commit: str
    names: frozenset[str]


@dataclass(frozen=True)
class FileMetadata:
    """What the hub says of one file: its size in bytes, and the ETag that names it in the cache."""

    url: str
    size: int
    etag: str


class HubClient:
    """One model of the hub, over connections that stay open. A context manager.

    Raises: CheckpointError for answers that are not a hub's; httpx2.HTTPError and OSError, from every method.
    """

    def __init__(self, hub_id: HubId) -> None:
        self._hub_id = hub_id
        self._settings = hub_settings()
        if self._settings.is_offline:
            raise offline_error(hub_id)
        self._token = hub_token()
        try:
            self._client = httpx2.Client(headers={"User-Agent": f"llmcli/{__version__}", "Accept-Encoding": "identity"})
        except (ValueError, ImportError, OSError, httpx2.InvalidURL) as error:  # odd settings of a proxy, or of SSL
            raise CheckpointError(
                f"the network cannot be used: {error}; check HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE"
            ) from error
        self._origin = _origin(httpx2.URL(self._settings.endpoint))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    def list_files(self) -> FileList:
        """The files of the revision that the hub id names."""
        url = f"{self._settings.endpoint}/api/models/{self._hub_id.repo_id}"
        if self._hub_id.revision is not None:
            url += f"/revision/{quote(self._hub_id.revision, safe='')}"
        content = bytearray()
        with self._open("GET", url, self._settings.answer_timeout) as response:
            for chunk in response.iter_raw():
                content += chunk
                if len(content) > _MAX_LIST_BYTES:
                    raise CheckpointError(
                        f"{url} sends over {_MAX_LIST_BYTES // 1024**2} MiB, too long for a list of files"
                    )
        try:
            description = parse_json(bytes(content))
        except ValueError as error:
            raise CheckpointError(
                f"{url} does not answer with a list of files in JSON ({error}); if this network asks for a login, "
                f"open {self._settings.endpoint} in a browser, else correct HF_ENDPOINT"
            ) from error
        return _read_list(description, url)

    def find_file(self, commit: str, name: str) -> FileMetadata:
        """Size and ETag of a file."""
        url = f"{self._settings.endpoint}/{self._hub_id.repo_id}/resolve/{commit}/{quote(name)}"

        def ask() -> FileMetadata:
            # Only a redirect to where large files lie gives them.
            with self._open("HEAD", url, self._settings.answer_timeout, is_last=_tells_size) as response:
                headers = response.headers
                _drain(response)
            if checked_commit(headers.get("X-Repo-Commit"), url) != commit:
                raise CheckpointError(
                    f"{url} answers for the commit {headers['X-Repo-Commit']}, expected {commit}; "
                    "is HF_ENDPOINT a Hugging Face hub?"
                )
            return FileMetadata(
                url,
                checked_size(headers.get(_LINKED_SIZE) or headers.get("Content-Length"), url),
                checked_etag(headers.get(_LINKED_ETAG) or headers.get("ETag"), url),
            )

        return repeat(ask, lambda: 0)

    @contextmanager
    def open_file(self, url: str, position: int) -> Iterator[httpx2.Response]:
        """The content of a file from a position on. Asked for by its name each time, since redirects expire."""
        headers = {"Range": f"bytes={position}-"}
        with self._open("GET", url, self._settings.content_timeout, headers) as response:
            yield response

    @contextmanager
    def _open(
        self,
        method: str,
        url: str,
        timeout: float,
        headers: dict[str, str] | None = None,
        is_last: Callable[[httpx2.Response], bool] = lambda response: False,
    ) -> Iterator[httpx2.Response]:
        """The answer at the end of the redirects, or the first for which `is_last`."""
        target = httpx2.URL(url)
        for _ in range(_MAX_REDIRECTS + 1):
            token = {"Authorization": f"Bearer {self._token}"} if self._is_hub(target) and self._token else {}
            with self._client.stream(method, target, headers={**(headers or {}), **token}, timeout=timeout) as response:
                if response.has_redirect_location and not is_last(response):
                    target = redirect_target(response)
                    _drain(response)
                    continue
                if not response.has_redirect_location:
                    refuse_status(response, self._hub_id)
                yield response
                return
        raise CheckpointError(f"{url} redirects more than {_MAX_REDIRECTS} times; try again later")

    def _is_hub(self, url: httpx2.URL) -> bool:
        return _origin(url) == self._origin


def repeat(attempt: Callable[[], _Result], progress: Callable[[], int]) -> _Result:
    """Make an attempt, and again if the connection fails; return its result.

    Gives up after five failures in a row without progress: half a minute.
    """
    num_failures = 0
    while True:
        before = progress()
        try:
            return attempt()
        except (httpx2.TransportError, HubBusyError):
            num_failures = 0 if progress() > before else num_failures + 1
            if num_failures > _MAX_FAILURES:
                raise
            time.sleep(2**num_failures)


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host.lower(), url.port  # None is the scheme's own port


def _drain(response: httpx2.Response) -> None:
    """Read an unused body if it is short, so that the connection can be reused."""
    num_bytes = 0
    for chunk in response.iter_raw():
        num_bytes += len(chunk)
        if num_bytes > _MAX_DRAINED_BYTES:
            return


def _tells_size(response: httpx2.Response) -> bool:
    return bool(response.headers.get(_LINKED_ETAG) and response.headers.get(_LINKED_SIZE))


def _read_list(description: Any, url: str) -> FileList:
    fields = description if isinstance(description, dict) else {}
    siblings = fields.get("siblings")
    entries = siblings if isinstance(siblings, list) else [None]
    names = [entry.get("rfilename") if isinstance(entry, dict) else None for entry in entries]
    texts = [name for name in names if isinstance(name, str)]
    if len(texts) != len(names):
        raise CheckpointError(
            f"{url} answers with JSON that is not a list of files; is HF_ENDPOINT a Hugging Face hub?"
        )
    return FileList(checked_commit(fields.get("sha"), url), frozenset(texts))


# Brings one file into huggingface_hub's cache, and continues where an earlier attempt stopped.
#
# huggingface_hub itself deletes a file that was interrupted, so five gigabytes would begin anew. This writes
# `blobs/ETAG` as huggingface_hub does. Content of another length than the hub announced is refused.

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Transfer:
    """A file of the hub and its place in the cache, which the ETag names: the SHA-256 of a large file's content."""

    url: str
    size: int
    blob: Path

    @property
    def partial(self) -> Path:
        """Where the bytes are while some are missing."""
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    @property
    def num_present_bytes(self) -> int:
        """Bytes that an earlier attempt has downloaded."""
        if self.blob.exists():
            return self.size
        return min(self.size, self.partial.stat().st_size) if self.partial.exists() else 0


def plan_transfer(repository: Path, metadata: FileMetadata) -> Transfer:
    """The transfer of a file into its repository's folder in the cache."""
    return Transfer(metadata.url, metadata.size, repository / "blobs" / metadata.etag)


def run_transfer(client: HubClient, transfer: Transfer, on_position: Callable[[int], None]) -> None:
    """Download what is missing of the file; `on_position` is called with the number of bytes there are.

    A connection that breaks is opened again. Another process that downloads the same file is waited for.
    Raises: CheckpointError if the content is not what size and ETag say; OSError and httpx2.HTTPError, after which the
    next call continues.
    """
    repository = transfer.blob.parents[1]
    lock = repository.parent / ".locks" / repository.name / f"{transfer.blob.name}.lock"
    for folder in (lock.parent, transfer.blob.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with file_lock(lock):
        if transfer.blob.exists():
            _check_present(transfer)
            return
        with transfer.partial.open("ab") as file:
            if file.tell() < transfer.size:
                repeat(lambda: _append_rest(client, transfer, file, on_position), file.tell)
        _check_content(transfer)
        transfer.partial.replace(transfer.blob)


def _append_rest(client: HubClient, transfer: Transfer, file: BinaryIO, on_position: Callable[[int], None]) -> None:
    with client.open_file(transfer.url, file.tell()) as response:
        if response.status_code == httpx2.codes.PARTIAL_CONTENT:
            check_content_range(response.headers.get("Content-Range"), file.tell(), transfer.size, transfer.url)
        else:  # the server knows no ranges and sends all of it
            file.seek(0)
            file.truncate()
        on_position(file.tell())
        for chunk in response.iter_raw():
            if file.tell() + len(chunk) > transfer.size:
                file.truncate(0)  # earlier bytes cannot be trusted either
                raise CheckpointError(
                    f"{transfer.url} sends more than the {transfer.size} bytes that the hub announced; try again later"
                )
            file.write(chunk)
            on_position(file.tell())
    if file.tell() < transfer.size:
        raise CheckpointError(
            f"{transfer.url} ends after {file.tell()} bytes of {transfer.size}; run the command again"
        )


def _check_present(transfer: Transfer) -> None:
    size = transfer.blob.stat().st_size
    if size != transfer.size:
        raise CheckpointError(
            f"{transfer.blob} has {size} bytes, but the hub's file {transfer.size}; remove the model "
            "(`llmcli models rm`) and download it again"
        )


def _check_content(transfer: Transfer) -> None:
    with transfer.partial.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    expected = transfer.blob.name
    if transfer.partial.stat().st_size != transfer.size or (_SHA256.fullmatch(expected) and digest != expected):
        transfer.partial.unlink()
        raise CheckpointError(f"{transfer.url} arrived damaged, its SHA-256 is {digest}; run the command again")
