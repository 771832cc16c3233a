"""The list of models in the cache, and removing them."""

import time
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import HubServer
from huggingface_hub import constants

from llmcli.checkpoint.hub import resolve_model
from llmcli.checkpoint.hub_cache import list_cached_models, plan_removal
from llmcli.checkpoint.hub_id import HubId
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


def test_an_unfinished_download_counts(hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.add_model("org/tiny", tiny_llama)
    hub.cuts = [300_000, *[0] * 5]
    with pytest.raises(CheckpointError):
        pull("org/tiny")
    (model,) = list_cached_models().models
    assert not model.is_complete
    assert model.size_bytes == 300_000 + sum(
        path.stat().st_size for path in tiny_llama.iterdir() if path.name != "model.safetensors"
    )
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
