"""Fixtures of all tests: the folder of real tokenizers and models beside the project, and tiny models made here."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_server import HubServer
from huggingface_hub import constants
from tiny_models import write_tiny_llama

SHARED = Path(__file__).resolve().parents[2] / "shared"

# Tiny matrices gain nothing from more threads, and waiting for a busy second core costs far more than it brings.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--odd-configs", type=int, default=300, help="how many odd configurations to compare")


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """A trained LLaMA of 260 thousand parameters with its author's published greedy text."""
    folder = SHARED / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip("needs the model stories260K in ../shared, which is not part of the project")
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaMA with grouped heads and a tokenizer."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub on this machine, and an empty cache at `tmp_path`; for this process and those it starts."""
    server = HubServer()
    cache = tmp_path / "hf-home" / "hub"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(cache.parent))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    # huggingface_hub has read its environment when it was imported.
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache.parent / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    yield server
    server.close()
    huggingface_hub.close_session()
