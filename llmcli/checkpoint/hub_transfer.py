"""Brings one file into huggingface_hub's cache, and continues where an earlier attempt stopped.

huggingface_hub itself deletes a file that was interrupted, so five gigabytes would begin anew. What this leaves behind,
`blobs/ETAG`, is what huggingface_hub writes. Refused is content of another length than the hub told before.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx2

from llmcli.checkpoint.hub_client import FileMetadata, HubClient, repeat
from llmcli.checkpoint.hub_files import check_content_range
from llmcli.checkpoint.hub_library import file_lock
from llmcli.errors import CheckpointError

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
                file.truncate(0)  # what came before is not to be trusted either
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
