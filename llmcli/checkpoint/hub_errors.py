"""Turns what fails on the way to the hub, and what the hub answers, into one line with the next step."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from llmcli.checkpoint.adapter import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from llmcli.checkpoint.hub_files import is_complete
from llmcli.checkpoint.hub_id import HubId
from llmcli.checkpoint.hub_library import hub_settings, repository_folder
from llmcli.errors import CheckpointError
from llmcli.foreign_errors import foreign_errors_explained, is_memory_error

_AGAIN = "try again; partial downloads resume"
_BAD_TOKEN = "Invalid credentials in Authorization header"
_BUSY = (408, 429, 500, 502, 503, 504)
_MAX_COMMITS = 3  # named in one message
_MAX_REASON = 200  # characters of a message of the HTTP client, which may quote what it got


class HubBusyError(CheckpointError):
    """The hub answers that it cannot answer now: worth another attempt."""


@contextmanager
def hub_errors_explained(hub_id: HubId) -> Iterator[None]:
    """Raise CheckpointError in place of what fails on the way to the hub and into its cache."""
    with foreign_errors_explained(f"{hub_id} cannot be downloaded", CheckpointError):
        try:
            yield
        except (OSError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            if is_memory_error(error):
                raise
            raise CheckpointError(_explain(error, hub_id)) from error


def refuse_status(response: httpx2.Response, hub_id: HubId) -> None:
    """Refuse every answer that is not the content asked for; the body, which anyone may have written, is not read.

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
    # A hub that says no more means a private model, or none, for which it has the same answer.
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
    """What there is to say where a download is needed and forbidden."""
    return CheckpointError(
        f"{hub_id} is neither a local folder nor complete in the cache {hub_settings().cache}, "
        f"and HF_HUB_OFFLINE forbids downloads; {_complete_snapshots(hub_id)}unset HF_HUB_OFFLINE"
    )


def _complete_snapshots(hub_id: HubId) -> str:
    """Names the commits that are complete in the cache, where none is known as the revision that is asked for."""
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
        if isinstance(error, httpx2.ConnectError):  # what a folder's misspelt name comes to without a network
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
