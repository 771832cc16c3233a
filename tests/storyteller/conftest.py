import sys
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))


@pytest.fixture(scope="session")
def stories():
    """Stories of the training split, every shape among them."""
    from storyteller.plots import PLOTS
    from storyteller.story import tell

    random = Random("tests")
    return [tell(random, "train", plot) for plot in PLOTS for _ in range(40)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    from storyteller.tokenizer import train_tokenizer

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(path, num_documents=800)
    return path
