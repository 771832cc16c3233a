"""From a run to its receipt and back to the sampler, on the CPU and on a card."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from receipt.some_receipt import RECEIPT
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.engine.request import Request
from llmcli.errors import UsageError
from llmcli.receipt import describe
from llmcli.receipt.describe import describe_run, sampler_of
from llmcli.receipt.receipt import Receipt
from llmcli.runners.base import Arithmetic


def described(folder: Path, arithmetic: Arithmetic, card: int | None) -> Receipt:
    runner: Any = SimpleNamespace(
        arithmetic=arithmetic, description="Some device", limits=SimpleNamespace(max_seq_len=64)
    )
    request = Request((1, 22, 333), sampler_of(RECEIPT), (0, 2), 20, ("THE END", "\n\n"), at_start=True)
    parts = (RECEIPT.prompt, request, RECEIPT.model.files, RECEIPT.samples)
    return describe_run("org/name", open_model(folder), runner, card, *parts)


def test_a_run_on_the_cpu(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    found = described(folder, Arithmetic("float32", "int8", 2, ("torch",)), None)
    assert (found.sampling, found.stopping, found.samples) == (RECEIPT.sampling, RECEIPT.stopping, RECEIPT.samples)
    runner = found.runner
    assert (runner.device, runner.dtype, runner.kv_cache, runner.threads) == ("cpu", "float32", "int8", 2)
    assert (runner.description, runner.context) == ("Some device", 64)
    assert set(found.program) == {"llmcli", "Python", "numpy", "torch", "sentencepiece", "jinja2"}
    assert found.model.commit is None


def test_libraries_are_those_of_the_runner(tmp_path: Path) -> None:
    """Not those that happen to be imported, such as torch here."""
    folder = write_tiny_llama(tmp_path / "model")
    assert "torch" not in described(folder, Arithmetic("float32", "auto", 1, ("numpy",)), None).program


def test_a_run_on_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "find_driver", lambda: None)
    folder = write_tiny_llama(tmp_path / "model")
    found = described(folder, Arithmetic("auto", "auto", None, ("cupy",)), 1)
    assert (found.runner.device, found.runner.dtype, found.runner.threads) == ("cuda:1", "auto", None)
    assert {"NVRTC", "cuBLAS", "kernels"} <= set(found.program)
    assert "torch" not in found.program


def test_parameters_of_another_version_are_refused() -> None:
    for parameters, message in (
        ({**RECEIPT.sampling.parameters, "top_q": 1}, "top_q is unknown, expected temperature"),
        ({"temperature": 1}, "dry_allowed_length is missing"),
    ):
        sampling: Any = SimpleNamespace(parameters=parameters)
        receipt: Any = SimpleNamespace(sampling=sampling)
        with pytest.raises(UsageError, match=f"sampling.parameters.{message}"):
            sampler_of(receipt)
