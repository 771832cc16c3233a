"""The number of threads: all, as many as asked for, and one for a small model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.runners.base import Arithmetic
from llmcli.runners.torch import load as torch_load
from llmcli.runners.torch.load import load


@pytest.fixture(autouse=True)
def three_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(torch_load, "_ALL_THREADS", 3)
    yield
    torch.set_num_threads(before)


def test_a_small_model_has_one_thread_and_a_large_one_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(write_tiny_llama(tmp_path / "model", with_tokenizer=False))
    assert load(model, max_seq_len=100).description == "CPU, float32, 1 thread"
    monkeypatch.setattr(torch_load, "_LEAST_BYTES_OF_THREADS", 1000)
    runner = load(model, max_seq_len=100, dtype="bfloat16", kv_cache="int8")
    assert runner.description == "CPU, bfloat16, KV cache int8, 3 threads"  # also after a small one
    assert runner.arithmetic == Arithmetic("bfloat16", "int8", 3, ("torch",))
    assert torch.get_num_threads() == 3


def test_a_number_that_is_asked_for_holds(tmp_path: Path) -> None:
    model = open_model(write_tiny_llama(tmp_path / "model", with_tokenizer=False))
    runner = load(model, max_seq_len=100, num_threads=2)
    assert torch.get_num_threads() == 2
    assert runner.arithmetic == Arithmetic("float32", "auto", 2, ("torch",))
