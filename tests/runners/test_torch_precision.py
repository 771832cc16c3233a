"""The type that `auto` means on the CPU, and how a run reports its types."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from foreign_models import write_fp8
from quantized import SIZES, export
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import Model, open_model
from llmcli.checkpoint.random_weights import shape_model
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.targets import open_target
from llmcli.measure.subject import Subject
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.runners.host.load import describe
from llmcli.runners.torch import precision
from llmcli.runners.torch.load import load
from llmcli.runners.torch.precision import resolve_dtype

LARGE = "Llama-3.2-1B"


def with_one_tensor_of(model: Model, dtype: str) -> Model:
    """The same model, whose last norm has another type."""
    tensors = dict(model.tensors.tensors)
    tensors["model.norm.weight"] = replace(tensors["model.norm.weight"], dtype=dtype)
    return replace(model, tensors=replace(model.tensors, tensors=tensors))


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A processor with all instructions."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    return monkeypatch


@pytest.mark.parametrize("form", ["int8", "int4", "bf16"])
def test_a_large_model_takes_bfloat16(form: str, processor: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("auto", shape_model(LARGE, form)) == "bfloat16"


@pytest.mark.parametrize(("form", "expected"), [("int8", "bfloat16"), ("int4", "bfloat16"), ("bf16", "float32")])
def test_without_instructions_for_bfloat16(form: str, expected: str, processor: pytest.MonkeyPatch) -> None:
    processor.setattr("torch.cpu.get_capabilities", lambda: {"neon": True, "bf16": True})
    processor.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    assert resolve_dtype("auto", shape_model(LARGE, form)) == expected


@pytest.mark.parametrize("capability", ["DEFAULT", "NO AVX", "SVE256", "VSX"])
def test_without_vector_code_of_the_operators(capability: str, processor: pytest.MonkeyPatch) -> None:
    processor.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    assert resolve_dtype("auto", shape_model(LARGE, "int8")) == "float32"


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_weights_that_bfloat16_would_round_keep_float32(dtype: str, processor: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("auto", with_one_tensor_of(shape_model(LARGE, "bf16"), dtype)) == "float32"


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float32")])
def test_8_bit_floats_follow_the_weights_beside_them(
    dtype: torch.dtype, expected: str, tmp_path: Path, processor: pytest.MonkeyPatch
) -> None:
    processor.setattr(precision, "SMALL_PARAMETERS", 0)
    source = write_tiny_llama(tmp_path / "source", dtype=dtype, with_tokenizer=False, **SIZES)
    assert resolve_dtype("auto", open_model(write_fp8(source, tmp_path / "fp8", block=(64, 64)))) == expected


def test_a_small_model_keeps_float32(tmp_path: Path, processor: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("auto", open_model(resource_folder(STORYTELLER))) == "float32"
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **SIZES)
    quantized = open_model(export(source, tmp_path / "int8", ExportOptions(WeightScheme(8, 128))))
    assert resolve_dtype("auto", quantized) == "float32"
    processor.setattr(precision, "SMALL_PARAMETERS", 1000)
    assert resolve_dtype("auto", quantized) == "bfloat16"


@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_what_is_asked_for_holds(asked: str, processor: pytest.MonkeyPatch) -> None:
    for model in (open_model(resource_folder(STORYTELLER)), shape_model(LARGE, "int8")):
        assert resolve_dtype(asked, model) == asked


def test_runs_and_plans_say_what_is_computed_in_what(tmp_path: Path, processor: pytest.MonkeyPatch) -> None:
    processor.setattr("llmcli.runners.host.predict.READ_BYTES", 2**20)
    processor.setattr(precision, "SMALL_PARAMETERS", 1000)
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **SIZES)
    model = open_model(export(source, tmp_path / "int4", ExportOptions(WeightScheme(4, 128))))
    assert load(model, max_seq_len=64, dtype="auto").description == "CPU, int4 weights, bfloat16, 1 thread"
    assert load(model, max_seq_len=64).description == "CPU, int4 weights, float32, 1 thread"
    subject = Subject("tiny", model, None)
    planned = [open_target(RunnerOptions("cpu", dtype, 1), subject).description for dtype in ("bfloat16", "auto")]
    assert planned == ["CPU, int4 weights, bfloat16", "CPU, int4 weights, float32, numpy"]
    assert describe(open_model(source), "float32") == "float32"


def test_two_kinds_of_codes_are_both_named(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **SIZES)
    model = open_model(export(source, tmp_path / "both", ExportOptions(WeightScheme(4, 128), head_bits=8)))
    assert describe(model, "bfloat16") == "int4 and int8 weights, bfloat16"
