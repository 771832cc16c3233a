"""Brings one large file into huggingface_hub's cache, and continues where an earlier attempt stopped.

huggingface_hub itself deletes a file that was interrupted, so five gigabytes would begin anew. What this leaves behind,
`blobs/ETAG`, is what huggingface_hub writes, and it only links the file afterwards.
"""

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx2
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.utils import WeakFileLock, build_hf_headers, hf_raise_for_status, http_stream_backoff

from llmcli.errors import CheckpointError

_MAX_FAILURES = 4
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
        """How many bytes an earlier attempt has brought."""
        if self.blob.exists():
            return self.size
        return min(self.size, self.partial.stat().st_size) if self.partial.exists() else 0


def find_transfer(repo_id: str, name: str, snapshot: Path) -> Transfer:
    """Ask the hub for a file's size and ETag; `snapshot` is the folder `REPO/snapshots/COMMIT` in the cache.

    Raises: CheckpointError if the server leaves them out; what huggingface_hub raises.
    """
    url = hf_hub_url(repo_id, name, revision=snapshot.name)
    metadata = get_hf_file_metadata(url)
    if metadata.size is None or not metadata.etag:
        raise CheckpointError(f"{url} comes without a size or an ETag; is HF_ENDPOINT a Hugging Face hub?")
    return Transfer(url, metadata.size, snapshot.parents[1] / "blobs" / metadata.etag)


def run_transfer(transfer: Transfer, on_position: Callable[[int], None]) -> None:
    """Download what is missing of the file; `on_position` is called with the number of bytes there are.

    A connection that breaks is opened again, until five in a row bring nothing, which takes half a minute. Another
    process that downloads the same file is waited for.
    Raises: CheckpointError if the content is not what the ETag says; OSError and httpx2.HTTPError, after which the
    next call continues.
    """
    repository = transfer.blob.parents[1]
    lock = repository.parent / ".locks" / repository.name / f"{transfer.blob.name}.lock"
    for folder in (lock.parent, transfer.blob.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if transfer.blob.exists():
            return
        with transfer.partial.open("ab") as file:
            num_failures = 0
            while (position := file.tell()) < transfer.size:
                try:
                    _append_rest(transfer, file, on_position)
                except httpx2.TransportError:
                    num_failures = 0 if file.tell() > position else num_failures + 1
                    if num_failures > _MAX_FAILURES:
                        raise
                    time.sleep(2**num_failures)
                else:
                    if file.tell() < transfer.size:
                        raise CheckpointError(
                            f"{transfer.url} ends after {file.tell()} bytes of {transfer.size}; run the command again"
                        )
        _check_content(transfer)
        transfer.partial.replace(transfer.blob)


def _append_rest(transfer: Transfer, file: BinaryIO, on_position: Callable[[int], None]) -> None:
    # Asked for by its name on the hub each time, since the address it redirects to expires.
    headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={file.tell()}-"}
    with http_stream_backoff(
        "GET",
        transfer.url,
        headers=headers,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        retry_on_exceptions=(),  # it cannot tell a failure to connect from one in the middle of the content
    ) as response:
        hf_raise_for_status(response)
        if response.status_code != httpx2.codes.PARTIAL_CONTENT:  # the server knows no ranges and sends all of it
            file.seek(0)
            file.truncate()
        on_position(file.tell())
        for chunk in response.iter_bytes():
            file.write(chunk)
            on_position(file.tell())


def _check_content(transfer: Transfer) -> None:
    with transfer.partial.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    expected = transfer.blob.name
    if transfer.partial.stat().st_size != transfer.size or (_SHA256.fullmatch(expected) and digest != expected):
        transfer.partial.unlink()
        raise CheckpointError(f"{transfer.url} arrived damaged, its SHA-256 is {digest}; run the command again")
