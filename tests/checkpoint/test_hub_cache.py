"""The list of models in the cache, and removing them."""

import os
import time
from datetime import datetime
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import HubServer
from huggingface_hub import constants

from llmcli.checkpoint.hub import list_cached_models, plan_removal, resolve_model
from llmcli.checkpoint.hub_library import HubId
from llmcli.errors import CheckpointError


def pull(name: str) -> Path:
    return resolve_model(name, on_progress=lambda done, total: None)


@pytest.fixture
def two_revisions(hub: HubServer, tiny_llama: Path) -> tuple[Path, Path]:
    """org/tiny in the cache, main and v2, which share their weights."""
    repository = hub.add_model("org/tiny", tiny_llama)
    files = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    repository.add({**files, "tokenizer_config.json": b"{}"}, "v2")
    return pull("org/tiny"), pull("org/tiny@v2")


def test_an_empty_cache(hub: HubServer) -> None:
    found = list_cached_models()
    assert (found.cache, found.models, found.unreadable) == (Path(constants.HF_HUB_CACHE), (), ())


def test_every_revision_is_listed(hub: HubServer, two_revisions: tuple[Path, Path], tiny_llama: Path) -> None:
    hub.add_model("a/other", tiny_llama)
    huggingface_hub.hf_hub_download("a/other", "config.json")
    other, main, v2 = list_cached_models().models
    assert [(model.repo_id, model.refs) for model in (other, main, v2)] == [
        ("a/other", ("main",)),
        ("org/tiny", ("main",)),
        ("org/tiny", ("v2",)),
    ]
    assert (main.folder, v2.folder) == two_revisions
    assert (main.commit, v2.commit) == (two_revisions[0].name, two_revisions[1].name)
    assert main.size_bytes == sum(path.stat().st_size for path in tiny_llama.iterdir())
    assert abs(main.last_used - time.time()) < 600
    assert [model.is_complete for model in (other, main, v2)] == [False, True, True]
    assert {model.model_type for model in (other, main, v2)} == {"llama"}


def test_what_is_no_model_is_listed_without_type(hub: HubServer, tiny_llama: Path) -> None:
    hub.add_model("org/tiny", tiny_llama, **{"config.json": b"[", "notes.txt": b"x"})
    huggingface_hub.hf_hub_download("org/tiny", "notes.txt")
    (model,) = list_cached_models().models
    assert (model.model_type, model.is_complete, model.size_bytes) == (None, False, 1)
    huggingface_hub.hf_hub_download("org/tiny", "config.json")
    assert list_cached_models().models[0].model_type is None


def test_an_unfinished_download_counts(hub: HubServer, tiny_llama: Path) -> None:
    hub.add_model("org/tiny", tiny_llama)
    folder = pull("org/tiny")
    weights = (folder / "model.safetensors").resolve()
    (folder / "model.safetensors").unlink()
    weights.rename(weights.with_name(f"{weights.name}.0a1b2c3d.incomplete"))  # as after a kill
    (model,) = list_cached_models().models
    assert not model.is_complete
    assert model.size_bytes == sum(path.stat().st_size for path in tiny_llama.iterdir())
    removal = plan_removal(HubId("org/tiny"))
    assert removal.freed_bytes == model.size_bytes
    removal.execute()
    assert not list_cached_models().models
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))


def test_a_damaged_entry_is_named(hub: HubServer, two_revisions: tuple[Path, Path]) -> None:
    (Path(constants.HF_HUB_CACHE) / "models--org--empty").mkdir()
    found = list_cached_models()
    assert len(found.models) == 2
    assert len(found.unreadable) == 1
    assert "models--org--empty" in found.unreadable[0]


def test_removing_a_revision_leaves_what_the_other_uses(two_revisions: tuple[Path, Path]) -> None:
    main, v2 = two_revisions
    for revision in ("v2", v2.name):
        removal = plan_removal(HubId("org/tiny", revision))
        assert (removal.commits, removal.freed_bytes) == ((v2.name,), 2)
    assert v2.exists()
    removal.execute()
    assert not v2.exists()
    assert (main / "model.safetensors").stat().st_size > 600_000
    assert pull("org/tiny") == main


def test_removing_all_revisions(two_revisions: tuple[Path, Path]) -> None:
    removal = plan_removal(HubId("org/tiny"))
    assert set(removal.commits) == {path.name for path in two_revisions}
    blobs = two_revisions[0].parents[1] / "blobs"
    assert removal.freed_bytes == sum(path.stat().st_size for path in blobs.iterdir())
    removal.execute()
    assert not blobs.parent.exists()


@pytest.mark.parametrize("revision", [None, "v2"])
def test_what_cannot_be_removed(
    two_revisions: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    removal = plan_removal(HubId("org/tiny", revision))
    monkeypatch.setattr(huggingface_hub.DeleteCacheStrategy, "execute", lambda strategy: None)
    with pytest.raises(CheckpointError, match="cannot be removed completely; check its permissions$"):
        removal.execute()


@pytest.mark.parametrize("hub_id", [HubId("org/none"), HubId("org/tiny", "v3"), HubId("Org/tiny")])
def test_what_is_not_there_cannot_be_removed(two_revisions: tuple[Path, Path], hub_id: HubId) -> None:
    with pytest.raises(CheckpointError, match=f"^{hub_id} is not in the cache .*`llmcli models list` shows"):
        plan_removal(hub_id)


def test_nothing_can_be_removed_from_no_cache(hub: HubServer) -> None:
    with pytest.raises(CheckpointError, match="^org/tiny is not in the cache"):
        plan_removal(HubId("org/tiny"))


def strange(folder: Path, name: str, kind: str) -> Path:
    """Put something odd into a folder."""
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes({"deep": b"[" * 100_000, "binary": b"\xff\xfe", "empty": b"", "long": b"0" * 5000}[kind])
    return path


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "device", "deep", "binary", "empty"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_strange_files_of_a_model(hub: HubServer, tiny_llama: Path, name: str, kind: str) -> None:
    hub.add_model("org/tiny", tiny_llama)
    strange(pull("org/tiny"), name, kind)
    found = list_cached_models()
    assert len(found.models) + len(found.unreadable) == 1
    if name == "config.json":
        assert all(model.model_type is None for model in found.models)
    if kind in ("pipe", "folder", "loop"):
        assert not any(model.is_complete for model in found.models)


@pytest.mark.parametrize("kind", ["pipe", "device", "binary", "long", "loop"])
def test_a_strange_ref_is_named(two_revisions: tuple[Path, Path], kind: str) -> None:
    ref = strange(two_revisions[0].parents[1] / "refs", "odd", kind)
    for use in (list_cached_models, lambda: plan_removal(HubId("org/tiny"))):
        with pytest.raises(CheckpointError, match=str(ref)):
            use()
    ref.unlink()
    assert len(list_cached_models().models) == 2


def test_a_snapshot_that_is_a_loop_of_links(two_revisions: tuple[Path, Path]) -> None:
    snapshot = strange(two_revisions[0].parent, "odd", "loop")
    with pytest.raises(CheckpointError, match=f"{snapshot}: Too many levels of symbolic links$"):
        list_cached_models()


@pytest.mark.parametrize("kind", ["pipe", "device", "binary"])
def test_strange_snapshots(two_revisions: tuple[Path, Path], kind: str) -> None:
    strange(two_revisions[0].parent, "odd", kind)
    found = list_cached_models()
    assert len(found.models) in (0, 3)
    assert not any(model.is_complete for model in found.models if model.commit == "odd")


def test_strange_names(two_revisions: tuple[Path, Path]) -> None:
    cache = Path(constants.HF_HUB_CACHE)
    for name in (b"models--a\x1b]0;x\x07--b", b"models--\xff\xfe--b", b"models--a\nb--c", b"\xff", b"models--"):
        os.makedirs(os.fsencode(cache) + b"/" + name + b"/snapshots/x")
    (cache / "link--to--itself").symlink_to(cache)
    (cache / "models--a--link").symlink_to(two_revisions[0].parents[1])
    found = list_cached_models()
    assert {"a\x1b]0;x\x07/b", "\udcff\udcfe/b", "a\nb/c", "a/link"} <= {model.repo_id for model in found.models}
    assert len(found.unreadable) == 2


@pytest.mark.parametrize("last_used", [-(2**40), 2**40])
def test_odd_times(hub: HubServer, tiny_llama: Path, last_used: int) -> None:
    hub.add_model("org/tiny", tiny_llama)
    for path in pull("org/tiny").iterdir():
        os.utime(path, (last_used, last_used))
    (model,) = list_cached_models().models
    datetime.fromtimestamp(model.last_used).isoformat()


def test_a_cache_that_may_not_be_read(two_revisions: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied", "SOMEWHERE")

    monkeypatch.setattr("llmcli.checkpoint.hub_library.scan_cache", fail)
    with pytest.raises(CheckpointError, match="^the cache .* cannot be read: SOMEWHERE: Permission denied$"):
        list_cached_models()
