"""Downloads files with huggingface_hub. Checks the hub's answers before the library uses them; errors are one line.

huggingface_hub follows redirects (20 at most), retries if the hub is busy, resumes after a broken connection, uses Xet,
locks a blob that two processes want, and moves a complete file into the cache.

It would also use an ETag and a commit as file names unchecked, follow redirects from https to http, read bodies of any
length, and let the hub choose the address of Xet's token. So every answer passes `_check_answer` first. Files are
downloaded one by one: `snapshot_download` takes blob names from the hub's list, where no check can come first, and
after Ctrl-C it waits for running downloads. Size and SHA-256 are compared here; before that, nothing limits what Xet
sends.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx2

from llmcli import __version__
from llmcli.checkpoint import folder as files
from llmcli.checkpoint.adapter import ADAPTER_WEIGHTS_NAME
from llmcli.checkpoint.hub_library import HubId, hub_settings, hub_token, repository_folder
from llmcli.checkpoint.safetensors_file import listed, printable
from llmcli.errors import (
    CheckpointError,
    TokenizerError,
    UnsupportedModelError,
    foreign_errors_explained,
    is_memory_error,
)
from llmcli.reading import CHAT_TEMPLATE, CONFIG, INDEX, TOKENIZER_MODEL, TOKENIZER_SETTINGS, SmallFile
from llmcli.resources import install_command

# Which files of a repository a model needs, no code among them; and what names from outside may look like.
#
# Checks every name that comes from outside before it becomes part of a path or an address.
#
# Names from outside are those that the hub sends (ETag, commit, file names) and the revision of a hub id. What does not
# fit its pattern is refused. The patterns are narrower than what a file system takes: no separators, no control
# characters, nothing that begins with a dot, and no ending by which the cache knows a file of its own.

_ETAG = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILE_NAME = re.compile(r"\w[\w .,()+=@~-]*")
_REVISION_PART = re.compile(r"\w[\w.,()+=@#%!-]*")
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


def checked_revision(revision: str) -> str:
    """A branch, tag or commit as the user gives it, which names a file in the cache's refs. Raises: CheckpointError."""
    parts = revision.split("/")
    is_safe = all(_REVISION_PART.fullmatch(part) and ".." not in part for part in parts)
    if not is_safe or revision.endswith(".lock") or len(revision.encode()) > _MAX_NAME_BYTES:
        raise CheckpointError(f"{printable(revision)} is not a revision; expected a branch, a tag or a commit hash")
    return revision


def is_weights_name(name: object) -> bool:
    """Whether a name is that of a safetensors file next to config.json; those in subfolders are not opened."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and _FILE_NAME.fullmatch(name) is not None
        and len(name.encode()) <= _MAX_NAME_BYTES
    )


SMALL_FILES: dict[str, SmallFile] = {
    files.CONFIG_NAME: CONFIG,
    files.GENERATION_CONFIG_NAME: CONFIG,
    files.INDEX_NAME: INDEX,
    "tokenizer.json": TOKENIZER_MODEL,
    "tokenizer.model": TOKENIZER_MODEL,
    "tokenizer_config.json": TOKENIZER_SETTINGS,
    "special_tokens_map.json": TOKENIZER_SETTINGS,
    "added_tokens.json": TOKENIZER_SETTINGS,
    "chat_template.jinja": CHAT_TEMPLATE,
    # Only there when the model is of a kind that opening the folder refuses by name.
    "adapter_config.json": CONFIG,
    "quantize_config.json": CONFIG,
    "quant_config.json": CONFIG,
    "hf_quant_config.json": CONFIG,
}
_TOKENIZERS = {"tokenizer.json", "tokenizer.model"}
_OTHER_WEIGHTS = (".gguf", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".h5", ".msgpack")
_MAX_NAMED = 3  # files named in one message


def weight_files(names: Collection[str], folder: Path) -> list[str]:
    """The weight files to have among `names`; none if these hold no whole model.

    The choice is that of opening a folder: model.safetensors, else the shards of the index, else a single file of
    another name. `folder` holds the index if `names` does.
    Raises: CheckpointError if the index is damaged, or names what opening a folder refuses.
    """
    if files.WEIGHTS_NAME in names:
        return [files.WEIGHTS_NAME]
    if files.INDEX_NAME in names:
        return _shards(folder / files.INDEX_NAME)
    others = [name for name in names if is_weights_name(name) and not name.startswith("consolidated")]
    others = [name for name in others if not files.SHARD_NAME.search(name)]
    return others if len(others) == 1 else []


def _shards(index: Path) -> list[str]:
    weight_map = INDEX.read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map of tensor names to file names; its upload is incomplete")
    for name, shard in weight_map.items():
        if not is_weights_name(shard):
            raise CheckpointError(
                f"{index} places {printable(name)} in {printable(shard)}, expected the name of a .safetensors file "
                "in the same folder; try another revision"
            )
    return sorted(set(weight_map.values()))


def is_complete(folder: Path) -> bool:
    """Whether a snapshot in the cache holds config, tokenizer and all weights.

    The other small files are not required: a repository may lack them, and the cache does not say so.
    """
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir() if path.is_file()}  # a broken link is not a file
    try:
        weights = weight_files(names, folder)
    except CheckpointError:
        return False
    return files.CONFIG_NAME in names and bool(names & _TOKENIZERS) and bool(weights) and names.issuperset(weights)


def refuse_repository(hub_id: object, names: Collection[str]) -> None:
    """Refuse, by its file names alone, what would be refused once all of it is here.

    Raises: UnsupportedModelError, for no config.json or safetensors naming the weights it has instead;
    TokenizerError without a tokenizer.
    """
    files.refuse_adapter(hub_id, names)
    if files.CONFIG_NAME in names and any(name.endswith(".safetensors") for name in names):
        if not _TOKENIZERS.intersection(names):
            raise TokenizerError(f"{hub_id} has no tokenizer: neither {' nor '.join(sorted(_TOKENIZERS))}")
        return
    others = sorted(name for name in names if name.endswith(_OTHER_WEIGHTS))
    has = f", but {listed(others, _MAX_NAMED)}" if others else ""
    missing = "safetensors" if files.CONFIG_NAME in names else files.CONFIG_NAME
    raise UnsupportedModelError(
        f"{hub_id} has no {missing}{has}; expected a Hugging Face model with {files.CONFIG_NAME} and *.safetensors, "
        "look for the repository of the original model"
    )


_AGAIN = "try again; finished files are kept"
_BAD_TOKEN = "Invalid credentials in Authorization header"
_BUSY = (408, 429, 500, 502, 503, 504)
_HUB = "https://huggingface.co/"  # huggingface_hub writes HF_ENDPOINT in its place
_MAX_ANSWER_BYTES = 8 * 1024**2  # of a list of a hundred thousand files
_MAX_COMMITS = 3  # named in one message
_MAX_FILE_BYTES = 10**16
_MAX_REASON = 200  # characters of a message of the HTTP client, which may quote what it got
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class HubFile:
    """A file of a repository; `where` names it in messages. A cached one is there, if not yet in the snapshot."""

    where: str
    name: str
    size: int
    is_cached: bool


class HubBusyError(httpx2.ConnectError):
    """The hub is busy. huggingface_hub retries, as after a failed connection."""


class HubClient:
    """One commit of a model on the hub. Raises: CheckpointError; httpx2.HTTPError and OSError, from every method."""

    def __init__(self, hub_id: HubId) -> None:
        self._hub_id = hub_id
        self._settings = hub_settings()
        if self._settings.is_offline:
            raise CheckpointError(
                f"{hub_id} is neither a local folder nor complete in the cache {self._settings.cache}, "
                f"and HF_HUB_OFFLINE forbids downloads; {_complete_snapshots(hub_id)}unset HF_HUB_OFFLINE"
            )
        self._token = hub_token() or False
        self._is_content = False  # whether a body may be a file, and long
        self._etag = ""  # of the file that was asked for last
        self.commit = ""

    def list_files(self) -> frozenset[str]:
        """The names of all files of the revision that the hub id names, as the hub sends them; sets `commit`."""
        from huggingface_hub import HfApi

        with self._odd_answers_explained():
            info = HfApi(token=self._token, library_name="llmcli", library_version=__version__).model_info(
                self._hub_id.repo_id, revision=self._hub_id.revision, timeout=self._settings.answer_timeout
            )
            names = frozenset(file.rfilename for file in info.siblings or ())
        self.commit = checked_commit(info.sha, f"{self._settings.endpoint}/api/models/{self._hub_id.repo_id}")
        return frozenset(name for name in names if isinstance(name, str))

    def find_file(self, name: str) -> HubFile:
        """What the hub says of a file, or the cache if it is there."""
        found = self._ask(name, dry_run=True)
        where, size = f"{self._hub_id}: {name}", found.file_size
        if size is None or not 0 <= size <= _MAX_FILE_BYTES:
            raise CheckpointError(f"{where} comes without a size; is HF_ENDPOINT a Hugging Face hub?")
        return HubFile(where, name, size, found.is_cached)

    def download(self, file: HubFile, on_position: Callable[[int], None]) -> None:
        """Download a file into the cache; `on_position` gets the number of bytes so far.

        If another process downloads the same file, wait for it.
        Raises: CheckpointError if the content is not what size and ETag say.
        """
        if not file.is_cached:
            on_position(0)
        self._is_content, self._etag = True, ""
        try:
            path = Path(self._ask(file.name, tqdm_class=_bar_class(file, on_position)))
        finally:
            self._is_content = False
        _check_content(path, file, self._etag or path.resolve().name)
        if not file.is_cached:
            on_position(file.size)

    def _ask(self, name: str, **options: Any) -> Any:
        from huggingface_hub import hf_hub_download

        with self._odd_answers_explained():
            return hf_hub_download(
                self._hub_id.repo_id,
                name,
                revision=self.commit,
                token=self._token,
                etag_timeout=self._settings.answer_timeout,
                library_name="llmcli",
                library_version=__version__,
                **options,
            )

    @contextmanager
    def _odd_answers_explained(self) -> Iterator[None]:
        """Turn what huggingface_hub raises for an answer that no hub gives into CheckpointError."""
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            hub = self._settings.endpoint
            if "hf_xet" in str(error):
                raise CheckpointError(
                    f"{hub} sends large files of {self._hub_id} only by Xet; run `{install_command('hf_xet')}`, and "
                    "unset HF_HUB_DISABLE_XET"
                ) from error
            raise CheckpointError(
                f"{hub} does not answer as a hub ({_reason(error)}); if this network asks for a login, open {hub} "
                "in a browser, else correct HF_ENDPOINT"
            ) from error
        except RuntimeError as error:  # all that Xet says of what failed
            if is_memory_error(error):
                raise
            if "No space left" in str(error):
                raise OSError(errno.ENOSPC, str(error)) from error
            raise httpx2.TransportError(str(error)) from error

    def open_connections(self) -> httpx2.Client:
        """The HTTP client for huggingface_hub."""
        try:
            return httpx2.Client(
                headers={"Accept-Encoding": "identity"},
                follow_redirects=True,
                event_hooks={"request": [self._keep_token], "response": [self._check_answer]},
            )
        except (ValueError, ImportError, OSError, httpx2.InvalidURL) as error:  # odd settings of a proxy, or of SSL
            raise CheckpointError(
                f"the network cannot be used: {error}; check HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE"
            ) from error

    def _keep_token(self, request: httpx2.Request) -> None:
        """The token goes to the hub's own scheme, host and port, and nowhere else."""
        if _origin(request.url) != _origin(httpx2.URL(self._settings.endpoint)):
            request.headers.pop("Authorization", None)

    def _check_answer(self, response: httpx2.Response) -> None:
        """Refuse an answer before its body is read and before huggingface_hub makes a path from its headers."""
        headers, url = response.headers, str(response.url.copy_with(query=None))
        if response.has_redirect_location:
            if response.url.scheme == "https" and response.url.join(headers["Location"]).scheme != "https":
                raise CheckpointError(
                    f"{url} redirects to {printable(headers['Location'])}, which is not encrypted; expected https"
                )
        elif not response.is_success:
            _refuse_status(response, self._hub_id)
        if response.request.method == "HEAD":
            self._check_metadata(response, url)
        headers.pop("Content-Encoding", None)  # not requested; a short body may unpack to a long one
        if not (self._is_content and response.is_success):
            response.stream = _ShortBody(cast(httpx2.SyncByteStream, response.stream), url)

    def _check_metadata(self, response: httpx2.Response, url: str) -> None:
        headers = response.headers
        commit = headers.get("X-Repo-Commit")
        if commit is not None and commit != self.commit:
            raise CheckpointError(
                f"{url} answers for the commit {printable(commit)}, expected {self.commit}; is HF_ENDPOINT a "
                "Hugging Face hub?"
            )
        etag = headers.get("X-Linked-Etag")
        if etag or not response.has_redirect_location:
            self._etag = checked_etag(etag or headers.get("ETag"), url)
        else:
            headers.pop("ETag", None)  # of the redirect, not of the file
        # Xet would send the token to this address, not through our client: use plain HTTP instead.
        routes = headers.get("X-Xet-Refresh-Route"), response.links.get("xet-auth", {}).get("url")
        if any(route and not route.startswith((f"{self._settings.endpoint}/", _HUB)) for route in routes):
            headers.pop("X-Xet-Hash", None)


@contextmanager
def hub_client(hub_id: HubId) -> Iterator[HubClient]:
    """Open a client. Until the block ends, its checks apply to huggingface_hub's connections, and nothing is logged."""
    client = HubClient(hub_id)
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import logging

    constants.HF_HUB_DISABLE_TELEMETRY = True  # else the hub learns which other programs are installed
    os.environ.setdefault("HF_XET_TELEMETRY_ENABLED", "false")
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    huggingface_hub.set_client_factory(client.open_connections)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield client
    finally:
        huggingface_hub.set_client_factory(partial(httpx2.Client, follow_redirects=True))
        logging.set_verbosity(verbosity)


class _ShortBody(httpx2.SyncByteStream):
    """The body of an answer that is not a file."""

    def __init__(self, stream: httpx2.SyncByteStream, url: str) -> None:
        self._stream, self._url = stream, url

    def __iter__(self) -> Iterator[bytes]:
        num_bytes = 0
        for chunk in self._stream:
            num_bytes += len(chunk)
            if num_bytes > _MAX_ANSWER_BYTES:
                raise CheckpointError(f"{self._url} sends over {_MAX_ANSWER_BYTES // 1024**2} MiB, too long an answer")
            yield chunk

    def close(self) -> None:
        self._stream.close()


def _bar_class(file: HubFile, on_position: Callable[[int], None]) -> type:
    """A class for huggingface_hub to use in place of tqdm: passes the number of bytes on, and refuses too many."""

    class Bar:
        def __init__(self, **settings: object) -> None:
            self._position = 0
            self._is_xet = "bar_format" in settings  # Xet counts itself, and prints errors raised in its thread

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def update(self, num_bytes: int) -> None:  # negative if a file starts again
            self._position += num_bytes
            if self._position > file.size and not self._is_xet:
                raise CheckpointError(
                    f"{file.where} has more than the {file.size} bytes that the hub announced; try again later"
                )
            on_position(min(self._position, file.size))

        def ignore(self, *arguments: object, **options: object) -> None:
            """Ignore Xet's rates and the bytes of its protocol."""

        close = update_transfer = set_postfix_str = set_transfer_postfix_str = ignore

    return Bar


def _check_content(path: Path, file: HubFile, etag: str) -> None:
    """Refuse and remove a file that is not what the hub announced; else remove partial files of killed downloads."""
    blob = path.resolve()
    size, digest = blob.stat().st_size, etag
    if _SHA256.fullmatch(etag) and not file.is_cached:
        with blob.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    if (size, digest) != (file.size, etag):
        path.unlink()
        blob.unlink(missing_ok=True)
        raise CheckpointError(
            f"{file.where} arrived damaged: {size} of {file.size} bytes, SHA-256 {digest}; run the command again"
        )
    for left in (path.parents[2] / "blobs").glob(f"{blob.name}.*incomplete"):
        left.unlink(missing_ok=True)


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host.lower(), url.port  # None is the scheme's own port


@contextmanager
def hub_errors_explained(hub_id: HubId) -> Iterator[None]:
    """Turn errors of reaching the hub and of writing its cache into CheckpointError."""
    with foreign_errors_explained(f"{hub_id} cannot be downloaded", CheckpointError):
        try:
            yield
        except (OSError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            if is_memory_error(error):
                raise
            is_wrapped = isinstance(error, FileNotFoundError) and error.errno is None  # LocalEntryNotFoundError
            raise CheckpointError(_explain((is_wrapped and error.__cause__) or error, hub_id)) from error


def _explain(error: BaseException, hub_id: HubId) -> str:
    """One line for the user; the order of the cases is that of the classes, the special before the general."""
    settings = hub_settings()
    hub = settings.endpoint
    if isinstance(error, HubBusyError):
        return str(error)
    if isinstance(error, httpx2.TimeoutException):
        return f"{hub} did not answer in time for {hub_id}; check the network, then {_AGAIN}"
    if isinstance(error, httpx2.ConnectError):  # a folder's misspelt name without a network ends here, too
        return (
            f"{hub_id} is not a local folder, and {hub} cannot be reached ({_reason(error)}); "
            f"{_complete_snapshots(hub_id)}check the spelling, or the network (or HF_ENDPOINT), then {_AGAIN}"
        )
    if isinstance(error, httpx2.HTTPError | httpx2.InvalidURL):
        return f"cannot reach {hub} for {hub_id} ({_reason(error)}); check the network (or HF_ENDPOINT), then {_AGAIN}"
    assert isinstance(error, OSError)
    if error.errno == errno.ENOSPC:
        return f"the disk of {settings.cache} is full; free some space, then {_AGAIN}"
    if error.errno is None:  # raised by huggingface_hub for an answer or content that does not fit
        return f"{hub} does not send {hub_id} as it announced it ({_reason(error)}); {_AGAIN}"
    where = error.filename or settings.cache
    return f"{hub_id} cannot be stored: {where}: {error.strerror or error}; set HF_HOME to another folder"


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_REASON]


def _refuse_status(response: httpx2.Response, hub_id: HubId) -> None:
    """Refuse an answer that is not the requested content, without reading its untrusted body.

    Raises: CheckpointError; HubBusyError where waiting may help.
    """
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
    if status in (401, 403) and _origin(response.url) == _origin(httpx2.URL(hub)):
        raise _no_access(status, hub_id, page, "gated or private, or the token is not valid")
    phrase = httpx2.codes.get_reason_phrase(status)
    text = f"{hub} answers {' '.join(f'{status} {phrase}'.split())} for {hub_id}; wait, then {_AGAIN}"
    raise HubBusyError(text) if status in _BUSY else CheckpointError(text)


def _no_access(status: int, hub_id: HubId, page: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"no access to {hub_id.repo_id} ({status}, {why}): accept its licence on {page}, then set "
        "HF_TOKEN to a token of that account, or run `hf auth login`"
    )


def _complete_snapshots(hub_id: HubId) -> str:
    """Name the complete commits in the cache, for a revision that is not among them."""
    snapshots = sorted((repository_folder(hub_id.repo_id) / "snapshots").glob("*"))
    whole = [folder for folder in snapshots if folder.name.isalnum() and (is_complete(folder) or _has_adapter(folder))]
    ids = " or ".join(f"{hub_id.repo_id}@{folder.name}" for folder in whole[:_MAX_COMMITS])
    return f"give {ids}, which is complete there, or " if ids else ""


def _has_adapter(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (files.ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME))
