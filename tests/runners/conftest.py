"""Models on a card, for the tests of its runner."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import SIZES, export
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.kernels.device import Device
from llmcli.quantization.schemes import ExportOptions, WeightScheme

FIXTURES = Path(__file__).resolve().parents[2] / ".fixtures"


@pytest.fixture(scope="session")
def card() -> Device:
    return Device.open(0)


@pytest.fixture
def load_on_card(card: Device) -> Callable[..., Any]:
    from llmcli.runners.cuda.load.model import load

    def call(folder: Path, **options: Any) -> Any:
        return load(open_model(folder), device=card, **{"max_seq_len": 400, **options})

    return call


@pytest.fixture(scope="session")
def int8_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8")
    source = write_tiny_llama(folder / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    return export(source, folder / "model", ExportOptions(WeightScheme(8, 128)))


@pytest.fixture
def stories(request: pytest.FixtureRequest) -> Path:
    """On a machine with a card the model may lie in the checkout itself."""
    folder = FIXTURES / "stories260K"
    return folder if folder.is_dir() else request.getfixturevalue("stories260k")
