"""A tokenizer for schedulers without a model; a server of the storyteller, and OpenAI's own client for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server import ServerProcess, running_server
from tiny_models import write_byte_tokenizer

from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.load import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
