"""The numpy runner: the contract of every runner, what it loads, and the storyteller as torch tells it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conformance import RunnerConformance
from quantized import SCHEMES, SIZES, export
from row_steps import GREEDY, WARM, go_on, run_prompt
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import Model, num_parameters, open_model
from llmcli.checkpoint.translation import widened
from llmcli.errors import CheckpointError
from llmcli.quantization.schemes import ExportOptions
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.runners.base import Runner
from llmcli.runners.host.load import read_weights
from llmcli.runners.host.memory import plan_memory
from llmcli.runners.numpy.load import NumpyWeights, load
from llmcli.runners.numpy.load import load as load_on_numpy
from llmcli.runners.torch.load import load as load_on_torch
from llmcli.runners.torch.weights import PackedWeight, TorchWeights
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.load import load_tokenizer


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


# The numpy runner passes the conformance suite.


class TestNumpyRunner(RunnerConformance):
    @classmethod
    def load(cls, folder: Path, *, max_seq_len: int, num_rows: int) -> Runner:
        return load(open_model(folder), max_seq_len=max_seq_len, num_rows=num_rows)


# The storyteller by numpy against the reference, the torch runner: same seed, same text.


NUM_TOKENS = 200
NARROW = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, repetition_penalty=1.1)
SAMPLERS = {"greedy": GREEDY, "warm": Sampler(WARM, seed=11), "filters": Sampler(NARROW, seed=12, num_prompt_tokens=5)}


@pytest.fixture(scope="module")
def runners() -> list[Runner]:
    model = open_model(resource_folder(STORYTELLER))
    return [load(model, max_seq_len=512) for load in (load_on_torch, load_on_numpy)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_tokens_are_those_of_torch(runners: list[Runner], name: str) -> None:
    prompt = load_tokenizer(resource_folder(STORYTELLER)).encode("Once upon a time, a dog")
    texts = []
    for runner in runners:
        row = runner.open(prompt, SAMPLERS[name])
        run_prompt(runner, row, prompt)
        texts.append(go_on(runner, row, NUM_TOKENS))
        runner.close(row)
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 40  # a text, no loop
