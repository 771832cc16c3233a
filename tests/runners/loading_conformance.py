"""The models that every runner refuses; a part of `RunnerConformance`."""

from abc import ABC, abstractmethod
from pathlib import Path

import pytest
from tiny_models import write_tiny_llama

from llmcli.errors import CheckpointError, LLMCliError
from llmcli.runners.base import Runner


class LoadingConformance(ABC):
    """Subclasses define `load` and the fixture `folder`."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, *, max_seq_len: int, num_rows: int) -> Runner:
        """The runner under test, with a model folder loaded."""

    def test_nan_weights_are_refused_by_name(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False)
        tensors = load_file(folder / "model.safetensors")
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name][3, 5] = float("nan")
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{name} in model.safetensors holds NaN or infinity"):
            self.load(folder, max_seq_len=64, num_rows=1)

    def test_a_model_that_does_not_fit_is_refused_before_it_is_read(self, folder: Path) -> None:
        with pytest.raises(LLMCliError, match="needs .* is available: use --context"):
            self.load(folder, max_seq_len=2**34, num_rows=1)
