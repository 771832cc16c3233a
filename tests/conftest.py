"""Fixtures of all tests: the folder of real tokenizers and models beside the project, and tiny models made here."""

from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny_llama

SHARED = Path(__file__).resolve().parents[2] / "shared"

# Tiny matrices gain nothing from more threads, and waiting for a busy second core costs far more than it brings.
torch.set_num_threads(1)


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
