"""A hub with one model, for the tests of downloads."""

from pathlib import Path

import pytest
from hub_server import HubServer
from plain_checkpoints import write_json


@pytest.fixture
def tiny_hub(hub: HubServer, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """A hub with one model, org/tiny; retries do not wait."""
    hub.add_model("org/tiny", tiny_llama)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config and no weights yet."""
    made = tmp_path / "model"
    made.mkdir()
    write_json(made / "config.json", {"model_type": "llama"})
    return made
