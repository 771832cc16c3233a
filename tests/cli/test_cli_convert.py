"""`llmcli convert`: its output and refusals, and that the result generates its source's text."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from foreign_models import write_awq, write_fp8, write_gptq
from results import Result
from tiny_models import write_tiny_llama

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 320}

Llmcli = Callable[..., Result]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("convert") / "model", dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def gptq(plain: Path) -> Path:
    return write_gptq(plain, plain.parent / "gptq")


def test_the_same_text(llmcli: Llmcli, gptq: Path, tmp_path: Path) -> None:
    result = llmcli("convert", gptq, tmp_path / "int4")
    assert (result.exit_code, result.stdout) == (0, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{tmp_path / 'int4'}: ")
    texts = [
        llmcli("generate", "Hi", "-m", folder, "--seed", 1, "--max-new-tokens", 20).stdout
        for folder in (gptq, tmp_path / "int4")
    ]
    assert texts[0] == texts[1] != ""
    assert "14 layers as int4, groups of 64, stored as GPTQ\n" in llmcli("info", gptq).stdout
    assert "14 layers as int4, groups of 64\n" in llmcli("info", tmp_path / "int4").stdout


def test_an_order_of_inputs_is_told_of(llmcli: Llmcli, plain: Path, tmp_path: Path) -> None:
    ordered = write_gptq(plain, tmp_path / "ordered", desc_act=True)
    result = llmcli("convert", ordered, tmp_path / "int4")
    assert result.exit_code == 0
    assert "warning: inputs have an order of their own (desc_act): transformers loads the model with" in result.stderr
    for folder, name in (
        (ordered, "GPTQ with desc_act"),
        (tmp_path / "int4", "compressed-tensors pack-quantized with g_idx"),
    ):
        assert f"14 layers as int4, groups of 64, stored as {name}\n" in llmcli("info", folder).stdout
    llmcli("convert", tmp_path / "int4", tmp_path / "again").expect_error(2, "pack-quantized already; use it as it is")


def test_a_dry_run_writes_nothing(llmcli: Llmcli, plain: Path, tmp_path: Path) -> None:
    awq = write_awq(plain, tmp_path / "awq", keep="layers.1.mlp")
    before = set(tmp_path.iterdir())
    result = llmcli("convert", awq, tmp_path / "int4", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].split() == ["kind", "tensors", "before", "after"]
    assert "kept as they are: model.layers.1.mlp." in result.stderr
    assert "vLLM takes asymmetric weights only in versions" in result.stderr
    assert set(tmp_path.iterdir()) == before


def test_refusals(llmcli: Llmcli, plain: Path, gptq: Path, tmp_path: Path) -> None:
    destination = tmp_path / "new"
    llmcli("convert", plain, destination).expect_error(2, "is not quantized, so there is nothing to convert")
    llmcli("convert", write_fp8(plain, tmp_path / "fp8"), destination).expect_error(3, "holds 8-bit floats")
    llmcli("convert", gptq, gptq).expect_error(2, "exists; give another folder, or --force to replace it")
    llmcli("convert", gptq, destination, "--shard-size", "5").expect_error(2, "--shard-size is '5', expected a size")
    llmcli("convert", tmp_path / "none", destination).expect_error(3, "does not exist")
    assert not destination.exists()


def test_a_model_folder_is_replaced_on_request(llmcli: Llmcli, gptq: Path, tmp_path: Path) -> None:
    destination = tmp_path / "int4"
    assert llmcli("convert", gptq, destination, "--shard-size", "0.1MB").exit_code == 0
    assert (destination / "model.safetensors.index.json").exists()
    assert llmcli("convert", gptq, destination, "--force").exit_code == 0
    assert (destination / "model.safetensors").exists()
