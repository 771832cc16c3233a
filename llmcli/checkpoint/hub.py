"""Models on the hub and in huggingface_hub's cache: found by folder or hub id, downloaded, listed, removed.

No code is ever downloaded, nor anything else that `hub_client` does not name.
"""

import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from llmcli.checkpoint import hub_client
from llmcli.checkpoint import hub_library as library
from llmcli.checkpoint.adapter import ADAPTER_WEIGHTS_NAME, LoraConfig, require_adapter_files
from llmcli.checkpoint.folder import ADAPTER_CONFIG_NAME, CONFIG_NAME, quantization_of, refuse_quantization_files
from llmcli.checkpoint.safetensors_file import listed
from llmcli.config.llama import LlamaConfig
from llmcli.errors import CheckpointError, foreign_errors_explained
from llmcli.reading import CONFIG

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, DeleteCacheStrategy, HFCacheInfo


_MAIN = "main"
_MAX_NAMED = 3  # files named in one message


def resolve_model(name: str, *, on_progress: Callable[[int, int], None], update: bool = False) -> Path:
    """The folder of a model given as a folder or as `ORG/NAME` or `ORG/NAME@REVISION`.

    A path is returned as it is, whether or not there is such a folder. A model that is complete in the cache needs no
    network, unless `update` asks for the newest commit of the revision. `on_progress(done, total)` gets bytes of
    weights, and is called only if some have to be downloaded.
    Raises: CheckpointError for all that can go wrong on the way, with the next step; UnsupportedModelError for a model
    that would be refused later, before its weights are downloaded.
    """
    return _resolve(name, find_cached, _prepare_model, on_progress, update)


def resolve_adapter(name: str, *, on_progress: Callable[[int, int], None], update: bool = False) -> Path:
    """As `resolve_model`, for a LoRA adapter: only config and weights are downloaded. Raises: as `resolve_model`"""
    return _resolve(name, find_cached_adapter, _prepare_adapter, on_progress, update)


def _resolve(
    name: str,
    find: Callable[[library.HubId], Path | None],
    prepare: Callable[[hub_client.HubClient, library.HubId, frozenset[str], Path], list[str]],
    on_progress: Callable[[int, int], None],
    update: bool,
) -> Path:
    hub_id = library.find_hub_id(name)
    if hub_id is None:
        return Path(name)
    if not update and (folder := find(hub_id)) is not None:
        return folder
    with hub_client.hub_errors_explained(hub_id):
        repository = library.repository_folder(hub_id.repo_id)
        revision = hub_client.checked_revision(hub_id.revision or _MAIN)
        with hub_client.hub_client(hub_id) as client:
            names = client.list_files()
            snapshot = repository / "snapshots" / client.commit
            try:
                weights = prepare(client, hub_id, names, snapshot)
            finally:  # also for a model that is refused: its small files are there
                if snapshot.is_dir():
                    library.write_ref(repository, revision, client.commit)
            _download(client, hub_id, weights, on_progress)
            return snapshot


def find_cached(hub_id: library.HubId) -> Path | None:
    """The folder of a model that is complete in the cache, else None.

    Raises: CheckpointError for an id that no repository has, or a cache that cannot be read.
    """
    folder = _cached_folder(hub_id, CONFIG_NAME)
    return folder if folder is not None and hub_client.is_complete(folder) else None


def find_cached_adapter(hub_id: library.HubId) -> Path | None:
    """The folder of an adapter that is complete in the cache, else None. Raises: as `find_cached`"""
    folder = _cached_folder(hub_id, ADAPTER_CONFIG_NAME)
    return folder if folder is not None and (folder / ADAPTER_WEIGHTS_NAME).is_file() else None


def _cached_folder(hub_id: library.HubId, name: str) -> Path | None:
    with hub_client.hub_errors_explained(hub_id):
        library.repository_folder(hub_id.repo_id)  # refuses odd ids
        file = library.cached_file(hub_id.repo_id, name, hub_client.checked_revision(hub_id.revision or _MAIN))
        return file and file.parent


def _prepare_model(
    client: hub_client.HubClient, hub_id: library.HubId, names: frozenset[str], snapshot: Path
) -> list[str]:
    """Download the small files, which show whether the rest is worth it; return the names of the weights.

    All by the commit that the list of files names, so that nothing mixes.
    """
    hub_client.refuse_repository(hub_id, names)
    _download(client, hub_id, [name for name in hub_client.SMALL_FILES if name in names])
    config, where = CONFIG.read_json_object(snapshot / CONFIG_NAME), f"{hub_id}: {CONFIG_NAME}"
    if quantization_of(config, where) is None:
        refuse_quantization_files(hub_id, names)
    LlamaConfig.from_dict(config, where)
    weights = hub_client.weight_files(names, snapshot)
    missing = [name for name in weights if name not in names]
    if missing or not weights:
        what = listed(missing, _MAX_NAMED) if missing else "model.safetensors or its index"
        raise CheckpointError(f"{hub_id} lacks {what}: its upload is incomplete; try another revision")
    return weights


def _prepare_adapter(
    client: hub_client.HubClient, hub_id: library.HubId, names: frozenset[str], snapshot: Path
) -> list[str]:
    """As `_prepare_model`."""
    require_adapter_files(hub_id, names)
    _download(client, hub_id, [ADAPTER_CONFIG_NAME])
    LoraConfig.load(snapshot / ADAPTER_CONFIG_NAME)
    return [ADAPTER_WEIGHTS_NAME]


def _download(
    client: hub_client.HubClient,
    hub_id: library.HubId,
    names: list[str],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Download what the cache lacks of some files; `on_progress` as in `resolve_model`.

    Raises: CheckpointError for a small file that is too long, or if the disk has not enough space.
    """
    files = [client.find_file(name) for name in names]
    for file in files:
        kind = hub_client.SMALL_FILES.get(file.name)
        if kind is not None and file.size > kind.max_bytes:
            raise CheckpointError(
                f"{file.where} has {decimal(file.size)}, over the limit of {decimal(kind.max_bytes)} for {kind.what}; "
                "try another revision"
            )
    total = sum(file.size for file in files)
    done = sum(file.size for file in files if file.is_cached)
    _require_space(hub_id, total - done)

    def move_on(position: int) -> None:
        on_progress(done + position, total)

    for file in files:
        client.download(file, move_on)
        if not file.is_cached:
            done += file.size


def _require_space(hub_id: library.HubId, num_bytes: int) -> None:
    cache = library.hub_settings().cache.absolute()
    disk = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(disk).free
    if num_bytes > free:
        raise CheckpointError(
            f"{hub_id} needs {decimal(num_bytes)} more; {cache} has {decimal(free)} free; remove models "
            "(`llmcli models list` shows them), or set HF_HOME to a folder on another disk"
        )


# Lists and removes the models in huggingface_hub's cache, by any tool.

_LAST_SECOND = 253_402_214_400  # of the year 9999, less a day for the time zone
_MAX_REF_BYTES = 4096


@dataclass(frozen=True)
class CachedModel:
    """One revision of a model in the cache.

    Units: `last_used` seconds since 1970, by the file system, of all revisions together; `size_bytes` counts a file
    that two revisions share in both, and the parts of unfinished files.
    """

    repo_id: str
    commit: str
    refs: tuple[str, ...]  # the branches and tags requested by name
    size_bytes: int
    last_used: float
    is_complete: bool
    model_type: str | None  # None without a readable config.json
    folder: Path


@dataclass(frozen=True)
class CachedModels:
    """What the cache holds; `unreadable` says what is wrong with each damaged folder."""

    cache: Path
    models: tuple[CachedModel, ...]
    unreadable: tuple[str, ...]


@dataclass(frozen=True)
class Removal:
    """Revisions that are about to be removed; nothing happens before `execute`."""

    commits: tuple[str, ...]
    freed_bytes: int
    _strategy: "DeleteCacheStrategy"

    def execute(self) -> None:
        """Remove them. Files that a remaining revision uses stay.

        Raises: CheckpointError if a folder cannot be removed; huggingface_hub only logs that.
        """
        with foreign_errors_explained(f"{hub_cache_folder()} cannot be changed", CheckpointError):
            self._strategy.execute()
        for folder in (*self._strategy.repos, *self._strategy.snapshots):
            if folder.exists():
                raise CheckpointError(f"{folder} cannot be removed completely; check its permissions")


def hub_cache_folder() -> Path:
    """Where huggingface_hub keeps models, by its environment variables; the folder may not exist yet."""
    return library.hub_settings().cache


def list_cached_models() -> CachedModels:
    """Every revision of every model in the cache, by id."""
    cache = _scan()
    if cache is None:
        return CachedModels(hub_cache_folder(), (), ())
    with foreign_errors_explained(f"the cache {hub_cache_folder()} cannot be read", CheckpointError):
        models = [
            _describe(repo, revision, _unfinished_bytes(cache, repo))
            for repo in cache.repos
            if repo.repo_type == "model"
            for revision in repo.revisions
        ]
    models.sort(key=lambda model: (model.repo_id.lower(), model.refs, model.commit))
    return CachedModels(hub_cache_folder(), tuple(models), tuple(map(str, cache.warnings)))


def plan_removal(hub_id: library.HubId) -> Removal:
    """Find what removing a model, or the one revision that `hub_id` names, would remove.

    Raises: CheckpointError if the cache does not hold it.
    """
    cache = _scan()
    repos = [repo for repo in cache.repos if repo.repo_type == "model"] if cache else []
    for repo in repos:
        if cache and repo.repo_id == hub_id.repo_id:
            chosen = [item for item in repo.revisions if hub_id.revision in (None, item.commit_hash, *item.refs)]
            if chosen:
                strategy = cache.delete_revisions(*(item.commit_hash for item in chosen))
                unfinished = _unfinished_bytes(cache, repo) if repo.repo_path in strategy.repos else 0
                commits = tuple(item.commit_hash for item in chosen)
                return Removal(commits, strategy.expected_freed_size + unfinished, strategy)
    raise CheckpointError(f"{hub_id} is not in the cache {hub_cache_folder()}; `llmcli models list` shows what is")


def _scan() -> "HFCacheInfo | None":
    cache = hub_cache_folder()
    with foreign_errors_explained(f"the cache {cache} cannot be read", CheckpointError):
        if not cache.exists():
            return None
        if not cache.is_dir():
            raise CheckpointError(f"the cache {cache} is not a folder; set HF_HOME to another one")
        for ref in cache.glob("*/refs/**/*"):
            _check_ref(ref)
        return library.scan_cache(cache)


def _check_ref(ref: Path) -> None:
    """Refuse a file on which the scan would wait, or that it could not read as text."""
    mode = ref.stat().st_mode
    if stat.S_ISDIR(mode):
        return
    if not stat.S_ISREG(mode) or ref.stat().st_size > _MAX_REF_BYTES or not ref.read_bytes().isascii():
        raise CheckpointError(f"{ref} is not the name of a commit, as every file in refs must be; remove it")


def _describe(repo: "CachedRepoInfo", revision: "CachedRevisionInfo", unfinished_bytes: int) -> CachedModel:
    complete = hub_client.is_complete(revision.snapshot_path)
    try:
        model_type = CONFIG.read_json_object(revision.snapshot_path / CONFIG_NAME).get("model_type")
    except CheckpointError:
        model_type = None
    return CachedModel(
        repo_id=repo.repo_id,
        commit=revision.commit_hash,
        refs=tuple(sorted(revision.refs)),
        size_bytes=revision.size_on_disk + (0 if complete else unfinished_bytes),
        last_used=min(max(repo.last_accessed, 0), _LAST_SECOND),
        is_complete=complete,
        model_type=model_type if isinstance(model_type, str) else None,
        folder=revision.snapshot_path,
    )


def _unfinished_bytes(cache: "HFCacheInfo", repo: "CachedRepoInfo") -> int:
    return sum(file.size_on_disk for file in cache.incomplete_files if repo.repo_path in file.file_path.parents)
