"""huggingface_hub's settings, token and cache. `hub_client` has its downloads."""

import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from llmcli.errors import CheckpointError

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

# Distinguishes a hub id, `ORG/NAME` or `ORG/NAME@REVISION`, from the path of a folder, without importing a library.

_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^\s@]+))?", re.ASCII)


@dataclass(frozen=True)
class HubId:
    """A model on the hub. `revision` is a branch, a tag or a commit hash; None is the main branch."""

    repo_id: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"


def find_hub_id(name: str) -> HubId | None:
    """The hub id that `name` is, or None for a path: anything that exists here or does not look like an id.

    An id has one slash, and no `.`, `/`, `~` or drive letter in front. So `models/llama` looks like one if there is no
    such folder; `models/llama.gguf` never does.
    """
    match = _HUB_ID.fullmatch(name)
    if match is None or is_gguf(name) or os.path.exists(name):  # Path.exists() raises for a name that is too long
        return None
    return HubId(match[1], match[2])


def is_gguf(name: str) -> bool:
    """Whether `name` is the path of a GGUF file, which may be missing; a folder of such a name is a folder."""
    return name.endswith(".gguf") and not os.path.isdir(name)


# Importing it fails with a traceback if an environment variable is odd, so these are checked first: numbers and
# addresses that it or the HTTP client cannot use are refused.

_TIMEOUTS = ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT")
_MAX_TIMEOUT = 1_000_000  # seconds
_MAX_PORT = 65535
_TOKEN = re.compile(r"[!-~]+")  # what a header can carry


@dataclass(frozen=True)
class HubSettings:
    """What huggingface_hub's environment variables say. Timeouts in seconds."""

    endpoint: str
    cache: Path
    is_offline: bool
    answer_timeout: float


def hub_settings() -> HubSettings:
    """The settings of this process. Raises: CheckpointError for a variable that holds no such value."""
    _check_environment()
    from huggingface_hub import constants

    return HubSettings(
        endpoint=constants.ENDPOINT,
        cache=Path(constants.HF_HUB_CACHE),
        is_offline=constants.HF_HUB_OFFLINE,
        answer_timeout=constants.HF_HUB_ETAG_TIMEOUT,
    )


def hub_token() -> str | None:
    """The user's token, from the environment or from the file of `hf auth login`; None without one.

    Raises: CheckpointError for a token that no request can carry; OSError.
    """
    _check_environment()
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import OIDCError
    from huggingface_hub.utils import logging

    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        token = get_token()
    except OIDCError as error:
        raise CheckpointError(f"cannot get the token of HF_OIDC_RESOURCE: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    if token is not None and not _TOKEN.fullmatch(token):
        raise CheckpointError(
            "the token in HF_TOKEN or of `hf auth login` has an invalid character, expected hf_ and letters and "
            "digits; copy it again from your settings on the hub"
        )
    return token


def repository_folder(repo_id: str) -> Path:
    """Where the cache keeps a repository, by its documented layout; the folder may not exist.

    Raises: CheckpointError for what is not a repository's id.
    """
    cache = hub_settings().cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
        return cache / f"models--{repo_id.replace('/', '--')}"
    except HFValidationError as error:
        raise CheckpointError(
            f"{repo_id} is neither a local folder nor a valid hub id; expected a folder or ORG/NAME"
        ) from error


def cached_repo_ids() -> list[str]:
    """The ids of the models in the cache, by the names of their folders; what these hold is not looked at.

    Raises: CheckpointError for an environment variable that holds no such value; OSError.
    """
    names = (path.name for path in hub_settings().cache.glob("models--*--*"))
    return sorted(name.removeprefix("models--").replace("--", "/", 1) for name in names)


def cached_file(repo_id: str, name: str, revision: str | None) -> Path | None:
    """A file in the cache, or None."""
    _check_environment()
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo_id, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def scan_cache(cache: Path) -> "HFCacheInfo | None":
    """What a cache holds, or None if there is none."""
    _check_environment()
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir(cache)
    except CacheNotFound:
        return None


def _check_environment() -> None:
    for name in _TIMEOUTS:
        text = os.environ.get(name)
        if text is not None and not _is_timeout(text):
            raise CheckpointError(
                f"{name} is {text!r}, expected whole seconds from 0 to {_MAX_TIMEOUT}; correct it, or unset it"
            )
    endpoint = os.environ.get("HF_ENDPOINT")
    if endpoint is not None and not _is_endpoint(endpoint):
        raise CheckpointError(
            f"HF_ENDPOINT is {endpoint!r}, expected an address such as https://huggingface.co; correct it, or unset it"
        )


def _is_timeout(text: str) -> bool:
    try:
        return 0 <= int(text) <= _MAX_TIMEOUT
    except ValueError:
        return False


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and (port is None or 1 <= port <= _MAX_PORT)
        and not parts.query
        and not parts.fragment
        and text.isascii()
        and text.isprintable()
        and " " not in text
    )


def write_ref(repository: Path, revision: str, commit: str) -> None:
    """Let a revision name a commit in the cache. Names that come here have passed the checks of `hub_client`."""
    if revision == commit:
        return
    ref = repository / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    # Next to refs/, not in it: any file in it counts as a ref, even what a killed run leaves.
    descriptor, temporary = tempfile.mkstemp(prefix=".ref-", dir=repository)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(commit)
        os.chmod(temporary, 0o644)
        os.replace(temporary, ref)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
