"""A tokenizer for schedulers without a model."""

from pathlib import Path

import pytest
from tiny_models import write_byte_tokenizer

from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.load import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return load_tokenizer(folder)
