"""The numpy runner's memory: every weight as a float, and as many bytes as were planned."""

from pathlib import Path

import numpy as np
import pytest
import torch
from quantized import SCHEMES, SIZES, export
from tiny_models import write_tiny_llama

from llmcli.checkpoint.export_options import ExportOptions
from llmcli.checkpoint.model import Model, num_parameters, open_model
from llmcli.checkpoint.translation import widened
from llmcli.errors import CheckpointError
from llmcli.runners.host.load import read_weights
from llmcli.runners.host.memory import plan_memory
from llmcli.runners.numpy.load import NumpyWeights, load
from llmcli.runners.torch.weights import PackedWeight, TorchWeights


def by_numpy(model: Model) -> dict[str, np.ndarray]:
    return read_weights(model, NumpyWeights(), lambda read, total: None)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "model"
    return write_tiny_llama(folder, dtype=torch.bfloat16, with_tokenizer=False, attention_bias=True, **SIZES)


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_those_of_torch_bit_for_bit(name: str, original: Path, tmp_path: Path) -> None:
    model = open_model(export(original, tmp_path / "export", ExportOptions(SCHEMES[name])))
    theirs = read_weights(model, TorchWeights(torch.float32), lambda read, total: None)
    ours = by_numpy(model)
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        assert weight.dtype == np.float32
        their = theirs[key].widened(slice(None)) if isinstance(theirs[key], PackedWeight) else theirs[key]
        assert weight.tobytes() == their.numpy().tobytes(), key


@pytest.mark.parametrize("name", ["int8 groups of 128", "int4 channel, asymmetric"])
def test_as_many_bytes_as_planned(name: str, original: Path, tmp_path: Path) -> None:
    model = open_model(export(original, tmp_path / "export", ExportOptions(SCHEMES[name])))
    held = sum(weight.nbytes for weight in by_numpy(model).values())
    plan = plan_memory(widened(model), max_seq_len=100, num_rows=1, dtype="float32")
    assert plan.weight_bytes == held == 4 * num_parameters(open_model(original))


def test_progress_ends_at_all_bytes(original: Path, tmp_path: Path) -> None:
    for folder in (original, export(original, tmp_path / "export", ExportOptions(SCHEMES["int4 channel, asymmetric"]))):
        model, seen = open_model(folder), []
        load(model, max_seq_len=64, on_progress=lambda read, total, seen=seen: seen.append((read, total)))
        total = sum(info.num_bytes for info in model.tensors.tensors.values())
        assert seen == sorted(seen)
        assert seen[-1] == (total, total)


def test_a_damaged_shape_is_refused(original: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = export(original, tmp_path / "export", ExportOptions(SCHEMES["int8 channel"]))
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight_shape"][0] += 1
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="up_proj.weight_shape is .* damaged export"):
        load(open_model(folder), max_seq_len=64)
