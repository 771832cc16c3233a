"""Conversions: the same codes, scales and zero points in compressed-tensors' form, which transformers loads."""

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from exports import read_tensors
from foreign_models import (
    codes_of,
    exact,
    write_awq,
    write_fp8,
    write_gptq,
    write_packed,
    write_w8a8,
)
from row_steps import logits_of
from tiny_models import write_tiny_llama
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.export_plan import plan_conversion
from llmcli.checkpoint.model import open_model
from llmcli.errors import LLMCliError, UnsupportedModelError, UsageError
from llmcli.quantization.schemes import WeightScheme
from llmcli.runners.torch.load import load

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
TOKENS = torch.tensor([[3, 7, 1, 250, 4, 9, 100]])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    write_tiny_llama(folder, dtype=torch.float16, attention_bias=True, **SIZES)
    return folder


def convert(folder: Path, destination: Path, **options: Any) -> Path:
    exporter = Exporter(plan_conversion(open_model(folder), **options), destination, folder.name)
    exporter.run(exporter.prepare(), lambda done, total: None, lambda name, quality: None)
    return destination


WRITERS: dict[str, tuple[Callable[..., Path], dict[str, Any], WeightScheme]] = {
    "AWQ": (write_awq, {"group_size": 64}, WeightScheme(4, 64, is_symmetric=False)),
    "AWQ, layers kept": (write_awq, {"keep": "layers.1.mlp"}, WeightScheme(4, 64, is_symmetric=False)),
    "GPTQ": (write_gptq, {}, WeightScheme(4, 64)),
    "GPTQ, 8 bits": (write_gptq, {"bits": 8, "group_size": -1}, WeightScheme(8, None)),
    "GPTQ, asymmetric": (write_gptq, {"sym": False}, WeightScheme(4, 64, is_symmetric=False)),
    "GPTQ, 8 bits, version 2": (write_gptq, {"bits": 8, "sym": False, "version": 2}, WeightScheme(8, 64, False)),
    "w8a8": (write_w8a8, {}, WeightScheme(8, None)),
}
ORDERED: dict[str, tuple[Callable[..., Path], dict[str, Any], WeightScheme]] = {
    "GPTQ, ordered": (write_gptq, {"desc_act": True}, WeightScheme(4, 64)),
    "GPTQ, ordered, asymmetric, 8 bits": (
        write_gptq,
        {"desc_act": True, "shares_order": False, "sym": False, "bits": 8, "group_size": 32},
        WeightScheme(8, 32, is_symmetric=False),
    ),
}


@pytest.mark.parametrize("name", WRITERS | ORDERED)
def test_code_for_code(name: str, source: Path, tmp_path: Path) -> None:
    write, options, scheme = (WRITERS | ORDERED)[name]
    foreign = write(source, tmp_path / "foreign", **options)
    folder = convert(foreign, tmp_path / "converted")
    tensors, layers, offset = read_tensors(folder), open_model(folder).tensors.packed, 1 << (scheme.num_bits - 1)
    assert {layer.scheme for layer in layers.values()} == {scheme}
    written = codes_of(foreign)
    assert {f"{module}.weight" for module in layers} == written.keys() != set()
    for weight, codes in written.items():
        shape = torch.Size(tensors[f"{weight}_shape"].tolist())
        stored = unpack_from_int32(tensors[f"{weight}_packed"], scheme.num_bits, shape)
        assert np.array_equal(stored.int().numpy() + offset, codes.codes)
        assert np.array_equal(tensors[f"{weight}_scale"].numpy(), codes.scales)
        assert tensors[f"{weight}_scale"].dtype == torch.float16
        assert (f"{weight}_g_idx" in tensors) == (name in ORDERED)
        if name in ORDERED:
            assert np.array_equal(tensors[f"{weight}_g_idx"].numpy(), codes.group_of)
        assert (f"{weight}_zero_point" in tensors) == (not scheme.is_symmetric)
        if not scheme.is_symmetric:
            zeros = torch.Size(codes.zeros.shape)
            stored = unpack_from_int32(tensors[f"{weight}_zero_point"], scheme.num_bits, zeros, packed_dim=0)
            assert np.array_equal(stored.int().numpy() + offset, codes.zeros)


@pytest.mark.parametrize("name", WRITERS)
def test_transformers_loads_it(name: str, source: Path, tmp_path: Path) -> None:
    write, options, scheme = WRITERS[name]
    foreign = write(source, tmp_path / "foreign", **options)
    folder = convert(foreign, tmp_path / "converted")
    load = {} if scheme.is_symmetric else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32, **load)
    assert not any(report.values()), report
    with torch.no_grad():
        logits = theirs(TOKENS).logits
        expected = AutoModelForCausalLM.from_pretrained(exact(foreign), dtype=torch.float32)(TOKENS).logits
    # It rounds weights that it widens, so all asymmetric ones, to the type of the scales: float16, by 2^-12.
    assert (logits - expected).norm() / expected.norm() < (1e-5 if scheme.is_symmetric else 1e-3)


@pytest.mark.parametrize("name", ORDERED)
def test_ordered_inputs_in_transformers(name: str, source: Path, tmp_path: Path) -> None:
    """compressed-tensors accepts them up to 0.18, those with zero points in 0.15.0; later ones refuse them."""
    write, options, _ = ORDERED[name]
    foreign = write(source, tmp_path / "foreign", **options)
    folder = convert(foreign, tmp_path / "converted")
    assert "transformers with compressed-tensors 0.15.0" in (folder / "README.md").read_text()
    installed = importlib.metadata.version("compressed-tensors")
    if tuple(map(int, installed.split(".")[:2])) >= (0, 19):
        with pytest.raises(ValueError, match="actorder='group' has been removed"):
            AutoModelForCausalLM.from_pretrained(folder)
        return
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
        expected = AutoModelForCausalLM.from_pretrained(exact(foreign), dtype=torch.float32)(TOKENS).logits
    assert (logits - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("name", ORDERED)
def test_ordered_inputs_keep_their_logits(name: str, source: Path, tmp_path: Path) -> None:
    write, options, _ = ORDERED[name]
    foreign = write(source, tmp_path / "foreign", **options)
    folder = convert(foreign, tmp_path / "converted")
    ours, theirs = (logits_of(load(open_model(each), max_seq_len=32), TOKENS[0].tolist()) for each in (folder, foreign))
    assert np.array_equal(ours, theirs)


def test_the_small_files(source: Path, tmp_path: Path) -> None:
    foreign = write_awq(source, tmp_path / "foreign", keep="layers.1.mlp")
    (foreign / "quant_config.json").write_text("{}")
    folder = convert(foreign, tmp_path / "converted", shard_bytes=60_000)
    names = {path.name for path in folder.iterdir()}
    assert {"tokenizer.json", "README.md", "model.safetensors.index.json"} < names
    assert not names & {"quantization.json", "quant_config.json"}
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    kept = [f"model.layers.1.mlp.{name}_proj" for name in ("down", "gate", "up")]
    assert config["quant_method"] == "compressed-tensors"
    assert sorted(config["ignore"]) == ["lm_head", *kept]
    card = (folder / "README.md").read_text()
    assert "from AWQ gemm into" in card
    assert "| 11 layers | int4, groups of 64, asymmetric |" in card
    again = convert(foreign, tmp_path / "again", shard_bytes=60_000)
    for name in names - {"README.md"}:
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.parametrize(
    ("write", "options", "message", "kind"),
    [
        (None, {}, "is not quantized, so there is nothing to convert", UsageError),
        (write_fp8, {}, "holds 8-bit floats, which have no integer codes", UnsupportedModelError),
        (
            write_packed,
            {"bits": 4, "group_size": 64, "sym": True},
            "pack-quantized already; use it as it is",
            UsageError,
        ),
    ],
)
def test_refusals_leave_nothing_behind(
    write: Callable[..., Path] | None,
    options: dict[str, Any],
    message: str,
    kind: type[LLMCliError],
    source: Path,
    tmp_path: Path,
) -> None:
    folder = source if write is None else write(source, tmp_path / "foreign", **options)
    before = set(tmp_path.iterdir())
    with pytest.raises(kind) as caught:
        convert(folder, tmp_path / "converted")
    assert message in str(caught.value)
    assert {path.name for path in set(tmp_path.iterdir()) - before} <= {".converted.lock"}


def test_what_is_converted_already(source: Path, tmp_path: Path) -> None:
    folder = convert(write_gptq(source, tmp_path / "foreign"), tmp_path / "converted")
    with pytest.raises(UsageError, match="is compressed-tensors pack-quantized already; use it as it is"):
        plan_conversion(open_model(folder))
