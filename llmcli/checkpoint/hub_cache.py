"""Lists and removes the models in huggingface_hub's cache, whichever tool downloaded them."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.checkpoint.folder import CONFIG_NAME
from llmcli.checkpoint.hub_files import is_complete
from llmcli.checkpoint.hub_id import HubId
from llmcli.checkpoint.hub_library import hub_settings, scan_cache
from llmcli.errors import CheckpointError
from llmcli.foreign_errors import foreign_errors_explained
from llmcli.reading import CONFIG

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, DeleteCacheStrategy, HFCacheInfo

_LAST_SECOND = 253_402_214_400  # of the year 9999, less a day for the time zone
_MAX_REF_BYTES = 4096


@dataclass(frozen=True)
class CachedModel:
    """One revision of a model in the cache.

    Units: `last_used` seconds since 1970, by the file system, of all revisions together; `size_bytes` counts a file
    that two revisions share in both, and what is there of unfinished files.
    """

    repo_id: str
    commit: str
    refs: tuple[str, ...]  # the branches and tags that were asked for by name
    size_bytes: int
    last_used: float
    is_complete: bool
    model_type: str | None  # None without a readable config.json
    folder: Path


@dataclass(frozen=True)
class CachedModels:
    """What the cache holds; `unreadable` says for each folder that is not as it should be what is wrong with it."""

    cache: Path
    models: tuple[CachedModel, ...]
    unreadable: tuple[str, ...]


@dataclass(frozen=True)
class Removal:
    """Revisions that are about to be removed; nothing happens before `execute`."""

    commits: tuple[str, ...]
    freed_bytes: int
    _strategy: DeleteCacheStrategy

    def execute(self) -> None:
        """Remove them. Files that a remaining revision uses stay.

        Raises: CheckpointError if a folder cannot be removed, of which huggingface_hub only writes a log line.
        """
        with foreign_errors_explained(f"{hub_cache_folder()} cannot be changed", CheckpointError):
            self._strategy.execute()
        for folder in (*self._strategy.repos, *self._strategy.snapshots):
            if folder.exists():
                raise CheckpointError(f"{folder} cannot be removed completely; check its permissions")


def hub_cache_folder() -> Path:
    """Where huggingface_hub keeps models, by its environment variables; the folder may not exist yet."""
    return hub_settings().cache


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


def plan_removal(hub_id: HubId) -> Removal:
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


def _scan() -> HFCacheInfo | None:
    cache = hub_cache_folder()
    with foreign_errors_explained(f"the cache {cache} cannot be read", CheckpointError):
        if not cache.exists():
            return None
        if not cache.is_dir():
            raise CheckpointError(f"the cache {cache} is not a folder; set HF_HOME to another one")
        for ref in cache.glob("*/refs/**/*"):
            _check_ref(ref)
        return scan_cache(cache)


def _check_ref(ref: Path) -> None:
    """Refuse what the scan would wait for, or could not take for text."""
    mode = ref.stat().st_mode
    if stat.S_ISDIR(mode):
        return
    if not stat.S_ISREG(mode) or ref.stat().st_size > _MAX_REF_BYTES or not ref.read_bytes().isascii():
        raise CheckpointError(f"{ref} is not the name of a commit, as every file in refs must be; remove it")


def _describe(repo: CachedRepoInfo, revision: CachedRevisionInfo, unfinished_bytes: int) -> CachedModel:
    complete = is_complete(revision.snapshot_path)
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


def _unfinished_bytes(cache: HFCacheInfo, repo: CachedRepoInfo) -> int:
    return sum(file.size_on_disk for file in cache.incomplete_files if repo.repo_path in file.file_path.parents)
