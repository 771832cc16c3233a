"""Checks every name that comes from outside before it becomes part of a path or an address.

Names of outside are those that the hub sends (ETag, commit, size, file names, redirects) and the revision of a hub id.
What does not fit its pattern is refused. The patterns are narrower than what a file system takes: no separators, no
control characters, nothing that begins with a dot, and no ending by which the cache knows a file of its own.
"""

import re

import httpx2

from llmcli.checkpoint.safetensors_file import printable
from llmcli.errors import CheckpointError

_ETAG = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SIZE = re.compile(r"[0-9]{1,16}")
_FILE_NAME = re.compile(r"\w[\w .,()+=@~-]*")
_REVISION_PART = re.compile(r"\w[\w.,()+=@#%!-]*")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,16})-([0-9]{1,16})/([0-9]{1,16}|\*)")
_MAX_NAME_BYTES = 255
_NOT_A_HUB = "is HF_ENDPOINT a Hugging Face hub?"


def checked_etag(header: str | None, url: str) -> str:
    """The ETag of a file as huggingface_hub names its blob: without the mark of a weak one, and without quotes.

    Raises: CheckpointError.
    """
    etag = (header or "").lstrip("W/").strip('"')
    if not _ETAG.fullmatch(etag):
        raise CheckpointError(
            f"{url} comes with the ETag {printable(header)}, expected up to 128 letters, digits, - and _; {_NOT_A_HUB}"
        )
    return etag


def checked_commit(value: object, where: str) -> str:
    """A commit's hash. Raises: CheckpointError."""
    if not isinstance(value, str) or not _COMMIT.fullmatch(value):
        raise CheckpointError(
            f"{where} names the commit {printable(value)}, expected 40 hexadecimal digits; {_NOT_A_HUB}"
        )
    return value


def checked_size(header: str | None, url: str) -> int:
    """The size of a file in bytes. Raises: CheckpointError."""
    if header is None or not _SIZE.fullmatch(header):
        raise CheckpointError(f"{url} comes with the size {printable(header)}, expected a number; {_NOT_A_HUB}")
    return int(header)


def check_content_range(header: str | None, position: int, size: int, url: str) -> None:
    """Refuse a part of a file that does not begin at `position`, or is of a file of another size.

    Raises: CheckpointError.
    """
    match = _CONTENT_RANGE.fullmatch(header or "")
    if match is None or int(match[1]) != position or match[3] not in ("*", str(size)):
        raise CheckpointError(
            f"{url} sends the part {printable(header)}, expected one from byte {position} of {size}; try again later"
        )


def checked_revision(revision: str) -> str:
    """A branch, tag or commit as the user gives it, which names a file in the cache's refs.

    Raises: CheckpointError.
    """
    parts = revision.split("/")
    is_safe = all(_REVISION_PART.fullmatch(part) and ".." not in part for part in parts)
    if not is_safe or revision.endswith(".lock") or len(revision.encode()) > _MAX_NAME_BYTES:
        raise CheckpointError(f"{printable(revision)} is not a revision; expected a branch, a tag or a commit hash")
    return revision


def is_weights_name(name: object) -> bool:
    """Whether a name is that of a safetensors file beside config.json; those in subfolders are not opened."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and _FILE_NAME.fullmatch(name) is not None
        and len(name.encode()) <= _MAX_NAME_BYTES
    )


def redirect_target(response: httpx2.Response) -> httpx2.URL:
    """Where an answer redirects to.

    Raises: CheckpointError for anything but http and https, and for leaving https, by which everyone on the way could
    read along and send something else.
    """
    location = response.headers["Location"]
    try:
        target = response.url.join(location)
    except httpx2.InvalidURL as error:
        raise _bad_redirect(response, location, str(error)) from error
    if target.scheme not in ("http", "https") or not target.host:
        raise _bad_redirect(response, location, "not a web address")
    if response.url.scheme == "https" and target.scheme != "https":
        raise _bad_redirect(response, location, "not encrypted")
    return target


def _bad_redirect(response: httpx2.Response, location: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{response.url.copy_with(query=None)} redirects to {printable(location)} ({reason}), expected https; "
        f"{_NOT_A_HUB}"
    )
