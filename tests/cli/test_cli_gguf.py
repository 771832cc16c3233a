"""GGUF files on the command line: as models, and converted."""

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from results import Llmcli
from tiny_models import write_tiny_llama

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 320}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path / "home"))
    return write_gguf(write_tiny_llama(tmp_path / "source", **SIZES), tmp_path / "model.gguf", Kind.Q5_0)


def test_a_file_is_converted_once_as_a_model(llmcli: Llmcli, tmp_path: Path, path: Path) -> None:
    command = ("generate", "Once", "-m", path, "--max-new-tokens", "3", "--seed", "1")
    first, second = llmcli(*command), llmcli(*command)
    assert first.exit_code == second.exit_code == 0
    assert "converting model.gguf once" in first.stderr
    assert "converting" not in second.stderr
    assert "model.gguf: CPU, int8 weights" in second.stderr
    assert first.stdout == second.stdout
    write_gguf(write_tiny_llama(tmp_path / "other", seed=1, **SIZES), path, Kind.Q4_0)
    assert "converting model.gguf once" in llmcli(*command).stderr


def test_convert_says_what_it_cost(llmcli: Llmcli, tmp_path: Path, path: Path) -> None:
    result = llmcli("convert", path, tmp_path / "folder")
    assert result.exit_code == 0
    assert "largest error" in result.stderr
    assert f"{(tmp_path / 'folder').name}" in result.stderr
    assert llmcli("info", tmp_path / "folder").exit_code == 0
    again = llmcli("convert", path, tmp_path / "folder")
    assert again.exit_code == 2
    assert "exists" in again.stderr


def test_floats_on_request(llmcli: Llmcli, tmp_path: Path, path: Path) -> None:
    result = llmcli("convert", path, tmp_path / "folder", "--dequantize")
    assert result.exit_code == 0
    assert "largest error" not in result.stderr
    assert "quantization_config" not in (tmp_path / "folder" / "config.json").read_text()
    refused = llmcli("convert", tmp_path / "source", tmp_path / "other", "--dequantize")
    assert refused.exit_code == 2
    assert "--dequantize is for GGUF files" in refused.stderr


def test_a_dry_run_writes_nothing(llmcli: Llmcli, tmp_path: Path, path: Path) -> None:
    result = llmcli("convert", path, tmp_path / "folder", "--dry-run")
    assert result.exit_code == 0
    assert "attention" in result.stdout
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("name", ["none.gguf", "models/none.gguf"])
def test_a_missing_file_is_no_hub_id(llmcli: Llmcli, name: str) -> None:
    result = llmcli("generate", "Once", "-m", name)
    assert result.exit_code != 0
    assert f"{name} does not exist; give the path of a GGUF file" in result.stderr


@pytest.mark.parametrize("command", ["generate", "info"])
def test_a_truncated_file_is_refused(llmcli: Llmcli, path: Path, command: str) -> None:
    path.write_bytes(path.read_bytes()[:-100])
    result = llmcli(command, *(("Once", "-m", path) if command == "generate" else (path,)))
    assert result.exit_code != 0
    assert "model.gguf is truncated" in result.stderr
