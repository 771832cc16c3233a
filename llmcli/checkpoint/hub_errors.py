"""Turns what huggingface_hub and its HTTP client raise into one line with the next step."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from llmcli.checkpoint.hub_id import HubId
from llmcli.errors import CheckpointError


@contextmanager
def hub_errors_explained(hub_id: HubId) -> Iterator[None]:
    """Raise CheckpointError in place of what fails on the way to the hub and into its cache."""
    try:
        yield
    except (OSError, httpx2.HTTPError, httpx2.InvalidURL, HFValidationError) as error:
        raise CheckpointError(_explain(error, hub_id)) from error


def _explain(error: BaseException, hub_id: HubId) -> str:
    """One line for the user; the order of the cases is that of the classes, the special before the general."""
    hub = constants.ENDPOINT
    page = f"{hub}/{hub_id.repo_id}"
    continues = "run the command again, the download continues where it stopped"
    # What a request failed with, where huggingface_hub then looked in the cache in vain.
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return _explain(error.__cause__, hub_id)
    if isinstance(error, GatedRepoError):
        return _access(error, hub_id, page, "it is gated")
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{hub_id.repo_id} is neither a local folder nor a model on {hub}; check the spelling, "
            "or set HF_TOKEN or run `hf auth login` if it is private"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{hub_id.repo_id} has no revision {hub_id.revision}; {page}/commits/main lists them"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return _access(error, hub_id, page, "gated or private, or the token is not valid")
        return f"{hub} answers {status} {error.response.reason_phrase} for {hub_id}; try again later: {continues}"
    if isinstance(error, OfflineModeIsEnabled):
        return (
            f"{hub_id} is not complete in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids a download; "
            "unset HF_HUB_OFFLINE"
        )
    if isinstance(error, HFValidationError):
        return f"{hub_id} is neither a local folder nor a possible hub id; expected a folder or ORG/NAME"
    if isinstance(error, httpx2.TimeoutException):
        return f"{hub} did not answer in time for {hub_id}; check the network, then {continues}"
    if isinstance(error, httpx2.HTTPError | httpx2.InvalidURL):
        return f"{hub} cannot be reached for {hub_id} ({error}); check the network (or HF_ENDPOINT), then {continues}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk of {constants.HF_HUB_CACHE} is full; free some space, then {continues}"
    if isinstance(error, OSError) and error.strerror:
        where = error.filename or constants.HF_HUB_CACHE
        return f"{hub_id} cannot be stored: {where}: {error.strerror}; HF_HOME can name another folder"
    return f"{hub_id} cannot be downloaded from {hub}: {error}"


def _access(error: HfHubHTTPError, hub_id: HubId, page: str, why: str) -> str:
    return (
        f"no access to {hub_id.repo_id} ({error.response.status_code}, {why}): accept its licence on {page}, then set "
        "HF_TOKEN to a token of that account, or run `hf auth login`"
    )
