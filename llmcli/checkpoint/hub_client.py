"""Asks the hub over HTTP, and bounds what it may answer: redirects, names, sizes.

The token goes to the hub's own scheme, host and port, and nowhere else. Redirects are followed to http and https only,
never from https to http, and ten times at most. huggingface_hub's own client is not used: it reads bodies of any
length, follows redirects to anywhere, and takes what an answer says as the name of a file.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx2

from llmcli import __version__
from llmcli.checkpoint.hub_errors import HubBusyError, offline_error, refuse_status
from llmcli.checkpoint.hub_files import checked_commit, checked_etag, checked_size, redirect_target
from llmcli.checkpoint.hub_id import HubId
from llmcli.checkpoint.hub_library import hub_settings, hub_token
from llmcli.errors import CheckpointError
from llmcli.reading import parse_json

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
    """One model of the hub, asked for over connections that stay open. A context manager.

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
            # A redirect to where large files lie tells them, and no other answer.
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
    """The result of an attempt; one that fails on the way is made again.

    Given up after five failures in a row, each after which `progress` is no larger than before: half a minute.
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
    """Read a body that nobody wants, if it is short: the connection can then be used again."""
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
