"""Finds a model by folder or by hub id: in huggingface_hub's cache first, else downloaded into it.

No code is ever downloaded, nor anything else that `hub_files` does not name.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.utils import disable_progress_bars, logging
from rich.filesize import decimal

from llmcli.checkpoint.folder import CONFIG_NAME, refuse_quantization
from llmcli.checkpoint.hub_errors import hub_errors_explained
from llmcli.checkpoint.hub_files import SMALL_FILES, is_complete, read_json, refuse_repository, weight_files
from llmcli.checkpoint.hub_id import HubId, find_hub_id
from llmcli.checkpoint.hub_transfer import find_transfer, run_transfer
from llmcli.config.llama import LlamaConfig
from llmcli.errors import CheckpointError


def resolve_model(name: str, *, on_progress: Callable[[int, int], None], update: bool = False) -> Path:
    """The folder of a model given as a folder or as `ORG/NAME` or `ORG/NAME@REVISION`.

    A path is returned as it is, whether or not there is such a folder. A model that is complete in the cache needs no
    network, unless `update` asks for the newest commit of the revision. `on_progress(done, total)` gets bytes of
    weights, and is called only if some have to be downloaded.
    Raises: CheckpointError for all that can go wrong on the way, with the next step; UnsupportedModelError for a model
    that would be refused once it is there, before its weights are downloaded.
    """
    hub_id = find_hub_id(name)
    if hub_id is None:
        return Path(name)
    with hub_errors_explained(hub_id), _library_silenced():
        cached = None if update else _cached_snapshot(hub_id)
        return cached or _download(hub_id, on_progress)


def _cached_snapshot(hub_id: HubId) -> Path | None:
    config = try_to_load_from_cache(hub_id.repo_id, CONFIG_NAME, revision=hub_id.revision)
    if not isinstance(config, str):
        return None
    snapshot = Path(config).parent
    return snapshot if is_complete(snapshot) else None


def _download(hub_id: HubId, on_progress: Callable[[int, int], None]) -> Path:
    """Download what is missing, the small files first, since they tell whether the rest is worth it."""
    repo_id = hub_id.repo_id
    timeout = constants.HF_HUB_ETAG_TIMEOUT  # without one this call would wait for ever
    info = HfApi().model_info(repo_id, revision=hub_id.revision, timeout=timeout, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    refuse_repository(hub_id, sizes)
    small_files = [name for name in SMALL_FILES if name in sizes]
    _require_space(hub_id, sum(sizes[name] for name in small_files))
    # By the revision's name, so that the cache learns its commit; the rest by that commit, so that nothing mixes.
    snapshot = Path(hf_hub_download(repo_id, CONFIG_NAME, revision=hub_id.revision)).parent
    for name in small_files:
        hf_hub_download(repo_id, name, revision=snapshot.name)
    config, where = read_json(snapshot / CONFIG_NAME), f"{hub_id}: {CONFIG_NAME}"
    refuse_quantization(config, where)
    LlamaConfig.from_dict(config, where)

    weights = weight_files(sizes, snapshot)
    if not weights or not sizes.keys() >= set(weights):
        missing = [name for name in weights if name not in sizes] or ["model.safetensors or its index"]
        raise CheckpointError(f"{hub_id} lacks {', '.join(missing)}: its upload is incomplete; try another revision")
    _download_weights(hub_id, snapshot, {name: sizes[name] for name in weights}, on_progress)
    for name in weights:
        hf_hub_download(repo_id, name, revision=snapshot.name)  # only links what is there
    return snapshot


def _download_weights(
    hub_id: HubId, snapshot: Path, sizes: dict[str, int], on_progress: Callable[[int, int], None]
) -> None:
    missing = [name for name in sizes if not (snapshot / name).exists()]
    # The hub sends files over this size only by its own protocol, which hf_hub_download speaks.
    resumable = [name for name in missing if sizes[name] <= constants.MAX_HTTP_DOWNLOAD_SIZE]
    transfers = [find_transfer(hub_id.repo_id, name, snapshot) for name in resumable]
    num_present_bytes = sum(transfer.num_present_bytes for transfer in transfers)
    _require_space(hub_id, sum(sizes[name] for name in missing) - num_present_bytes)

    total = sum(sizes.values())
    finished = total - sum(transfer.size for transfer in transfers)

    def on_position(position: int) -> None:
        on_progress(finished + position, total)

    for transfer in transfers:
        run_transfer(transfer, on_position)
        finished += transfer.size


def _require_space(hub_id: HubId, num_bytes: int) -> None:
    cache = Path(constants.HF_HUB_CACHE).absolute()
    disk = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(disk).free
    if num_bytes > free:
        raise CheckpointError(
            f"{hub_id} needs {decimal(num_bytes)} more in {cache}, but {decimal(free)} are free; free some space "
            "(`llmcli models list`), or set HF_HOME to a folder on another disk"
        )


@contextmanager
def _library_silenced() -> Iterator[None]:
    """Keep huggingface_hub's bars and log lines off stderr; what matters in them comes back as errors."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with disable_progress_bars():
            yield
    finally:
        logging.set_verbosity(verbosity)
