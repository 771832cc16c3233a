"""An export by a card has the bytes of one by the CPU: on a card, and with numpy in a card's place."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import VARIANTS
from quantized import SCHEMES
from tiny_models import write_tiny_llama

pytest.importorskip("cupy")

from simulated_card import Event, SimulatedDevice, send  # noqa: E402
from simulated_kernels import allocate, on_host  # noqa: E402

from llmcli.checkpoint.export import Exporter  # noqa: E402
from llmcli.checkpoint.export_plan import plan_export  # noqa: E402
from llmcli.checkpoint.model import open_model  # noqa: E402
from llmcli.errors import CheckpointError  # noqa: E402
from llmcli.kernels.device import Device  # noqa: E402
from llmcli.quantization import rounding  # noqa: E402
from llmcli.quantization.rounding import pack_rows
from llmcli.quantization.schemes import (
    ExportOptions,
    WeightScheme,  # noqa: E402
)
from llmcli.runners.cuda.load import quantizer
from llmcli.runners.cuda.load.quantizer import CardQuantizer  # noqa: E402
from llmcli.runners.cuda.step import arena

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STORED_DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.uint16): "BF16"}
SCALE_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
FAMILIES = ["grouped", "tied", "biases", "mistral", "qwen2", "qwen3", "smollm3", "one layer, odd sizes"]
SIZES = {"hidden_size": 256, "intermediate_size": 384}


def quantize_rows_on_host(device: Any, *, weights: Any, form: Any, scale_type: str, **results: Any) -> None:
    """The launcher by numpy. Its sums are off in their last bits, as a card's are."""
    stored, scales = on_host(weights), on_host(results["scales"])
    is_symmetric = results["zero_points"] is None
    scheme = WeightScheme(form.num_bits, stored.shape[1] // scales.shape[1], is_symmetric)
    assert (form.lowest, form.offset) == (scheme.code_range[0], scheme.offset)
    block = rounding.quantize_rows(stored, STORED_DTYPES[stored.dtype], scheme, SCALE_DTYPES[scale_type])
    if block is None:
        scales[:] = np.inf
        return
    scales[:] = block.scales
    on_host(results["packed"])[:] = pack_rows(block.codes, form.num_bits).view(np.uint32)
    if block.zero_points is not None:
        on_host(results["zero_points"])[:] = block.zero_points
    sums = np.stack((block.errors.error_squares, block.errors.weight_squares), axis=1)
    wrong = np.random.default_rng(0).uniform(-(2.0**-44), 2.0**-44, sums.shape)
    on_host(results["squares"])[:] = sums * (1 + wrong)
    saturated = on_host(results["num_saturated"])
    saturated[:] = 0
    saturated[-1] = block.errors.num_saturated


def receive(device: Any, target: np.ndarray, source: Any, num_bytes: int) -> None:
    target[:num_bytes] = on_host(source)[:num_bytes]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    monkeypatch.setattr(arena, "allocate", allocate)
    monkeypatch.setattr(quantizer, "send", send)
    monkeypatch.setattr(quantizer, "receive", receive)
    monkeypatch.setattr(quantizer, "pinned_bytes", lambda num_bytes: np.full(num_bytes, 0xA5, np.uint8))
    monkeypatch.setattr(quantizer, "quantize_rows", quantize_rows_on_host)
    monkeypatch.setattr(quantizer.cupy.cuda, "Event", lambda **options: Event())
    return SimulatedDevice()


@pytest.fixture(scope="session")
def card() -> Device:
    return Device.open(0)


def export(source: Path, destination: Path, device: Any, options: ExportOptions) -> dict[str, bytes]:
    """Every file of an export, by a card or with None by the CPU. All have one name, which model cards repeat."""
    plan = plan_export(open_model(source), options)
    more = {} if device is None else {"open_quantizer": partial(CardQuantizer, device, plan.weights)}
    exporter = Exporter(plan, destination / "export", "tiny", replace=True, **more)
    exporter.run(exporter.prepare(), lambda done, total: None, lambda name, quality: None)
    return {path.name: path.read_bytes() for path in (destination / "export").iterdir()}


def assert_same_files(source: Path, folder: Path, device: Any, **options: Any) -> None:
    choice = ExportOptions(**options)
    by_cpu, by_card = (export(source, folder, one, choice) for one in (None, device))
    assert by_cpu.keys() == by_card.keys()
    assert {"model.safetensors", "quantization.json"} <= by_cpu.keys()
    assert json.loads(by_card["quantization.json"]) == json.loads(by_cpu["quantization.json"])
    for name, content in by_cpu.items():
        assert by_card[name] == content, f"{name} differs"


@pytest.fixture(params=[1 << 22, 1000], ids=["a block a weight", "small blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizer, "WEIGHTS_PER_BLOCK", request.param)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_simulated_files_are_the_same(scheme: str, simulated: SimulatedDevice, tmp_path: Path, blocks: None) -> None:
    source = write_tiny_llama(tmp_path / "source", dtype=torch.bfloat16, num_hidden_layers=1, **SIZES)
    assert_same_files(source, tmp_path, simulated, scheme=SCHEMES[scheme])


def test_a_slot_serves_weights_of_every_size(simulated: SimulatedDevice, tmp_path: Path, blocks: None) -> None:
    sizes = {**SIZES, "intermediate_size": 250}  # this gives one scale a row next to groups
    source = write_tiny_llama(tmp_path / "source", dtype=torch.float32, num_hidden_layers=1, **sizes)
    assert_same_files(source, tmp_path, simulated, scheme=WeightScheme(4, 32), head_bits=8)


def damage(source: Path) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][7, 5] = float("nan")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    return source


def test_a_simulated_card_reports_weights_that_are_not_finite(simulated: SimulatedDevice, tmp_path: Path) -> None:
    source = damage(write_tiny_llama(tmp_path / "source", dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match="up_proj.weight in .* holds NaN"):
        export(source, tmp_path, simulated, ExportOptions(WeightScheme(8, None)))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.cuda
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_files_of_every_family_are_the_same(family: str, dtype: torch.dtype, card: Device, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", dtype=dtype, **VARIANTS[family])
    assert_same_files(source, tmp_path, card, scheme=WeightScheme(8, 32))
    assert_same_files(source, tmp_path, card, scheme=WeightScheme(4, None, is_symmetric=False))


@pytest.mark.cuda
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_files_of_every_scheme_are_the_same(
    scheme: str, dtype: torch.dtype, card: Device, tmp_path: Path, blocks: None
) -> None:
    source = write_tiny_llama(tmp_path / "source", dtype=dtype, num_hidden_layers=2, **SIZES)
    head_bits = 8 if SCHEMES[scheme].is_symmetric else None
    assert_same_files(source, tmp_path, card, scheme=SCHEMES[scheme], head_bits=head_bits)


@pytest.mark.cuda
def test_a_card_reports_weights_that_are_not_finite(card: Device, tmp_path: Path) -> None:
    source = damage(write_tiny_llama(tmp_path / "source", dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match="up_proj.weight in .* holds NaN"):
        export(source, tmp_path, card, ExportOptions(WeightScheme(8, None)))


@pytest.mark.cuda
def test_large_rows_stream_through_the_slots(card: Device, tmp_path: Path) -> None:
    """Weights of several blocks each, at the size of blocks that users get."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_hidden_layers": 1}
    source = write_tiny_llama(tmp_path / "source", dtype=torch.bfloat16, **sizes)
    assert_same_files(source, tmp_path, card, scheme=WeightScheme(4, 128))


@pytest.mark.cuda
def test_the_command_gives_the_same_files(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", dtype=torch.bfloat16)
    files = []
    for device in ("cpu", "cuda:0", "auto"):
        command = [sys.executable, "-m", "llmcli", "quantize", source, tmp_path / "export", "--group-size", "32"]
        result = subprocess.run([*command, "--device", device, "--force"], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert ("(cuda:0)" in result.stderr) == (device != "cpu")
        files.append({path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()})
    assert files[0] == files[1] == files[2]
