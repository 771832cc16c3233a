"""Models as they are on the hub, on the CPU: both runners against transformers with the weights that they encode."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_models import exact, write_awq, write_fp8, write_gptq, write_packed, write_w8a8
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama

transformers = pytest.importorskip("transformers")

from quantized import SIZES  # noqa: E402
from row_steps import PROMPT, logits_of, relative_error  # noqa: E402

from llmcli.checkpoint.model import open_model  # noqa: E402
from llmcli.errors import CheckpointError, UnsupportedModelError  # noqa: E402
from llmcli.runners.numpy.load import load as load_on_numpy  # noqa: E402
from llmcli.runners.torch.load import load  # noqa: E402

LAYER = "model.layers.1.mlp.up_proj"

AWQ = {
    "AWQ, groups of 32": {"group_size": 32},
    "AWQ, groups of 128": {"group_size": 128},
    "AWQ, whole rows": {"group_size": -1},
    "AWQ, some layers in 16 bits": {"keep": "layers.0.mlp", "modules_to_not_convert": ["layers.0.mlp"]},
}
GPTQ = {
    f"GPTQ, {bits} bits, {'symmetric' if sym else 'asymmetric'}, version {version}": {
        "bits": bits,
        "sym": sym,
        "version": version,
    }
    for bits in (4, 8)
    for sym in (True, False)
    for version in (1, 2)
} | {
    "GPTQ, whole rows": {"group_size": -1},
    "GPTQ, ordered": {"desc_act": True},
    "GPTQ, ordered, asymmetric, 8 bits": {"desc_act": True, "sym": False, "bits": 8, "group_size": 32},
    # An official model says version 1 and stores 8.
    "GPTQ, version 2 under the name of 1": {"version": 2, "checkpoint_format": "gptq"},
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "model"
    return write_tiny_llama(folder, dtype=torch.bfloat16, with_tokenizer=False, attention_bias=True, **SIZES)


def reference_logits(folder: Path) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT[:60]])).logits[0, -1].numpy()


def check_logits(folder: Path, original: Path) -> None:
    expected, model = reference_logits(exact(folder)), open_model(folder)
    assert model.tensors.unused == ()
    assert relative_error(logits_of(load(model, max_seq_len=128), PROMPT[:60]), expected) < 1e-5
    assert relative_error(logits_of(load_on_numpy(model, max_seq_len=128), PROMPT[:60]), expected) < 1e-5
    assert relative_error(logits_of(load(model, max_seq_len=128, dtype="bfloat16"), PROMPT[:60]), expected) < 0.1
    assert relative_error(reference_logits(original), expected) > 1e-3  # it is the quantized model that is compared


@pytest.mark.parametrize("name", AWQ)
def test_awq(name: str, original: Path, tmp_path: Path) -> None:
    check_logits(write_awq(original, tmp_path / "awq", **AWQ[name]), original)


@pytest.mark.parametrize("name", GPTQ)
def test_gptq(name: str, original: Path, tmp_path: Path) -> None:
    check_logits(write_gptq(original, tmp_path / "gptq", **GPTQ[name]), original)


@pytest.mark.parametrize(("bits", "sym"), [(4, True), (4, False), (8, True)])
def test_ordered_inputs_of_compressed_tensors(bits: int, sym: bool, original: Path, tmp_path: Path) -> None:
    check_logits(write_packed(original, tmp_path / "packed", bits=bits, group_size=64, sym=sym), original)


@pytest.mark.parametrize(
    ("block", "suffix"),
    [
        ((128, 128), "scale_inv"),
        ((96, 100), "scale_inv"),
        ((10**30, 1), "scale_inv"),
        (None, "scale_inv"),
        (None, "scale"),
    ],
)
def test_fp8(block: tuple[int, int] | None, suffix: str, original: Path, tmp_path: Path) -> None:
    folder = write_fp8(original, tmp_path / "fp8", block=block, suffix=suffix)
    check_logits(folder, original)


FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "fmt": None, "weight_block_size": None}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "fmt": None}


@pytest.mark.parametrize(
    ("block", "config", "scheme"),
    [
        ((1, 10**30), {"weight_block_size": None}, "fp8, one scale a row"),
        ((1, 10**30), FBGEMM, "fp8, one scale a row"),
        (None, MODELOPT, "fp8, one scale"),
    ],
)
def test_fp8_whose_scales_tell_what_they_are_of(
    block: tuple[int, int] | None, config: dict[str, Any], scheme: str, original: Path, tmp_path: Path
) -> None:
    folder = write_fp8(original, tmp_path / "fp8", block=block, suffix="scale")
    module = "model.layers.0.self_attn.k_proj"
    beside = {f"{module}.{part}": torch.ones(1) for part in ("input_scale", "k_scale", "input_scale_ub")}
    change(folder, beside, **config)
    check_logits(folder, original)
    assert {str(layer.scheme) for layer in open_model(folder).tensors.scaled.values()} == {scheme}


def test_fp8_as_transformers_widens_it(original: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")  # transformers needs it here, and it is not a dependency
    folder = write_fp8(original, tmp_path / "fp8", suffix="scale_inv")
    config = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).state_dict()
    for name, weight in load_file(exact(folder) / "model.safetensors").items():
        assert torch.equal(theirs[name], weight.to(theirs[name].dtype)), name  # it widens to 16 bits


def change(folder: Path, tensors: dict[str, torch.Tensor | None] | None = None, **config: Any) -> Path:
    """Replace tensors (None removes one) and keys of the quantization_config (None removes one, too)."""
    held = load_file(folder / "model.safetensors") | (tensors or {})
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    declared = values["quantization_config"] | config
    values["quantization_config"] = {key: value for key, value in declared.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
FROZEN: dict[str, tuple[Callable[..., Path], dict[str, Any], str]] = {
    "w8a8": (write_w8a8, {}, "int8, one scale a row"),
    "packed": (lambda *where: write_packed(*where, bits=4, group_size=64, sym=True), {}, "int4, groups of 64"),
    "fp8": (
        lambda *where: write_fp8(*where, block=None, suffix="scale"),
        {
            "quant_method": "compressed-tensors",
            "format": "naive-quantized",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": FLOATS}},
        },
        "fp8, one scale",
    ),
}


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_models_are_those_with_codes(name: str, original: Path, tmp_path: Path) -> None:
    """The hub has models that say frozen and hold codes; one with plain weights next to the scales has none."""
    write, config, scheme = FROZEN[name]
    folder = change(write(original, tmp_path / "frozen"), quantization_status="frozen", **config)
    check_logits(folder, original)
    plain = {f"{LAYER}.weight": torch.zeros(384, 256, dtype=torch.bfloat16), f"{LAYER}.weight_packed": None}
    message = f"{LAYER}.weight in model.safetensors is BF16, expected {scheme} as config.json says; its weights are not"
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        open_model(change(folder, plain))


@pytest.mark.parametrize(
    ("write", "config", "message"),
    [
        (write_awq, {"version": "gemv"}, "AWQ version gemv is not supported, expected gemm"),
        (write_awq, {"backend": "llm-awq"}, "AWQ version llm-awq is not supported, expected gemm"),
        (write_awq, {"bits": 3}, "AWQ with bits 3 is not supported, expected 4"),
        (write_awq, {"zero_point": False}, "AWQ with zero_point false is not supported"),
        (write_gptq, {"bits": 3}, "GPTQ with bits 3 is not supported, expected 4 or 8"),
        (write_gptq, {"checkpoint_format": "marlin"}, "GPTQ format marlin is not supported, expected gptq or gptq_v2"),
        (write_gptq, {"is_marlin_format": True}, "GPTQ format marlin is not supported"),
        (write_gptq, {"pack_dtype": "int64"}, "GPTQ with pack_dtype 'int64' is not supported"),
        (write_gptq, {"adapter": {"name": "lora"}}, "GPTQ with adapter is not supported"),
        (write_gptq, {"dynamic": {"+:.*up_proj": {"bits": 8}}}, "bits that differ between layers (dynamic)"),
        (write_fp8, {"fmt": "e5m2"}, "fp8 with fmt 'e5m2' is not supported, expected e4m3"),
        (write_fp8, {"scale_fmt": "ue8m0"}, "fp8 with scale_fmt 'ue8m0' is not supported, expected float"),
        (write_gptq, {"quant_method": "auto-round"}, "quantized (method auto-round), which is not supported"),
        (write_awq, {"checkpoint_format": "gemv", "version": None}, "AWQ version gemv is not supported, expected gemm"),
        (write_fp8, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4' is not supported"),
    ],
)
def test_refused_by_name(
    write: Callable[..., Path], config: dict[str, Any], message: str, original: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        open_model(change(write(original, tmp_path / "model"), **config))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("write", "config", "message"),
    [
        (write_awq, {"bits": None}, "bits is None, expected a number"),
        (write_awq, {"w_bit": 8}, "bits 4 and w_bit 8 contradict each other"),
        (write_awq, {"group_size": 0}, "group_size is 0, expected a number from 1 up"),
        (write_awq, {"group_size": 33}, "has 256 inputs, which groups of 33 do not divide"),
        (write_awq, {"group_size": 128}, "qzeros in model.safetensors is [4, 32], expected [2, 32]"),
        (write_awq, {"version": 4}, "version is 4, expected a name"),
        (write_gptq, {"sym": None}, "sym is None, expected true or false"),
        (write_gptq, {"desc_act": "no"}, "desc_act is 'no', expected true or false"),
        (write_gptq, {"bits": 8}, "qweight in model.safetensors is [32, 256], expected [64, 256]"),
        (write_fp8, {"weight_block_size": [128]}, "weight_block_size is [128], expected two numbers from 1 up"),
        (
            write_fp8,
            {"weight_block_size": [64, 128]},
            "weight_scale_inv in model.safetensors is [2, 2], expected [4, 2]",
        ),
        (write_gptq, {"format": "gptq_v2"}, "checkpoint_format 'gptq' and format 'gptq_v2' contradict each other"),
    ],
)
def test_contradictions_of_the_config(
    write: Callable[..., Path], config: dict[str, Any], message: str, original: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_model(change(write(original, tmp_path / "model"), **config))
    assert message in str(caught.value)


ORDER = torch.arange(256, dtype=torch.int32) // 64


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({f"{LAYER}.g_idx": ORDER.flip(0)}, {}, f"{LAYER}.g_idx in model.safetensors orders the inputs"),
        ({f"{LAYER}.g_idx": ORDER * 0}, {"desc_act": True}, "has groups of other sizes, expected 4 of 64 inputs"),
        (
            {f"{LAYER}.g_idx": ORDER.flip(0) + 1},
            {"desc_act": True},
            f"{LAYER}.g_idx in model.safetensors names group 4, expected 0 to 3",
        ),
        (
            {f"{LAYER}.g_idx": ORDER * 0 - 1},
            {"desc_act": True},
            f"{LAYER}.g_idx in model.safetensors names group -1, expected 0 to 3",
        ),
        (
            {f"{LAYER}.g_idx": ORDER * 0 - 1},
            {},
            "names group -1, expected 0 to 3: the order of the inputs is not known",
        ),
        (
            {f"{LAYER}.qzeros": torch.zeros(4, 48, dtype=torch.int32)},
            {},
            f"{LAYER}.qzeros in model.safetensors holds zero points other than 7 or 8 throughout",
        ),
        ({}, {"checkpoint_format": "gptq_v2"}, "qzeros in model.safetensors holds zero points other than 8 throughout"),
        (
            {f"{LAYER}.qzeros": torch.full((4, 48), -0x77777778, dtype=torch.int32)},
            {"sym": False},
            "holds 8 throughout, as symmetric weights have it, which version 1 of GPTQ reads as 9; set sym to true",
        ),
        ({f"{LAYER}.scales": torch.full((4, 384), torch.nan)}, {}, f"{LAYER}.scales in model.safetensors holds NaN"),
    ],
)
def test_contradictions_of_the_tensors(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], message: str, original: Path, tmp_path: Path
) -> None:
    model = open_model(change(write_gptq(original, tmp_path / "model"), tensors, **config))
    for read in (load, load_on_numpy):
        with pytest.raises(CheckpointError) as caught:
            read(model, max_seq_len=32)
        assert message in str(caught.value)


def test_an_order_may_go_unsaid(original: Path, tmp_path: Path) -> None:
    """Without desc_act the index itself counts; with it, the index must be there."""
    folder = write_gptq(original, tmp_path / "gptq", desc_act=True)
    check_logits(change(folder, desc_act=None), original)
    folder = change(folder, {f"{LAYER}.g_idx": None}, desc_act=True)
    with pytest.raises(CheckpointError, match=rf"tensors are missing: {LAYER}.g_idx"):
        open_model(folder)


def test_a_layer_stored_twice(original: Path, tmp_path: Path) -> None:
    folder = change(write_awq(original, tmp_path / "awq"), {f"{LAYER}.weight": torch.zeros(384, 256)})
    with pytest.raises(CheckpointError, match=rf"{LAYER} has both weight and qweight"):
        open_model(folder)


def test_codes_that_the_config_does_not_tell_of(original: Path, tmp_path: Path) -> None:
    folder = write_awq(original, tmp_path / "awq")
    (folder / "config.json").write_bytes((original / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="q_proj holds codes instead of weights, and config.json has no quant"):
        open_model(folder)


def test_8_bit_floats_that_the_config_does_not_tell_of(original: Path, tmp_path: Path) -> None:
    folder = write_fp8(original, tmp_path / "fp8")
    (folder / "config.json").write_bytes((original / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"q_proj.weight holds 8-bit floats, and config.json has no quant"):
        open_model(folder)


@pytest.mark.parametrize("config", [{"quant_method": "fp8"}, {"quant_method": "awq", "bits": 4, "group_size": 64}])
def test_a_config_that_was_left_behind(config: dict[str, Any], original: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(original, tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = config | {"zero_point": True}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="says that weights are quantized, and none is; remove quantization_c"):
        open_model(folder)


@pytest.mark.parametrize(
    ("suffixes", "method"), [(("q_weight", "q_scale"), "exl2"), (("trellis", "suh"), "exl3"), (("B", "s"), "marlin")]
)
def test_other_forms_are_told_by_their_tensors(
    suffixes: tuple[str, ...], method: str, original: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(original, tmp_path / "model")
    held = load_file(folder / "model.safetensors")
    del held[f"{LAYER}.weight"]
    held |= {f"{LAYER}.{suffix}": torch.zeros(4, 4, dtype=torch.int32) for suffix in suffixes}
    save_file(held, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=rf"{LAYER}.{suffixes[0]} says that .* \(method {method}\), which"):
        open_model(folder)


def test_models_of_mlx_are_told_by_their_config(original: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(original, tmp_path / "model")
    values = json.loads((folder / "config.json").read_text()) | {"quantization": {"group_size": 64, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModelError, match=r"quantized \(method mlx\), which is not supported"):
        open_model(folder)


def test_8_bit_floats_of_another_kind(original: Path, tmp_path: Path) -> None:
    other = {f"{LAYER}.weight": torch.zeros(384, 256, dtype=torch.float8_e5m2)}
    with pytest.raises(UnsupportedModelError, match=rf"{LAYER}.weight in .* is F8_E5M2, expected F8_E4M3"):
        open_model(change(write_fp8(original, tmp_path / "fp8"), other))


def test_outputs_that_awq_cannot_pack(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", intermediate_size=188, with_tokenizer=False)
    with pytest.raises(UnsupportedModelError, match="has 188 outputs, which AWQ cannot pack by the 8"):
        open_model(write_awq(source, tmp_path / "awq", group_size=-1))


def test_floats_that_contradict(original: Path, tmp_path: Path) -> None:
    name = f"{LAYER}.weight"
    folder = write_fp8(original, tmp_path / "fp8")
    nan = load_file(folder / "model.safetensors")[name].view(torch.uint8)
    nan[200, 3] = 0x7F
    for tensors in ({name: nan.view(torch.float8_e4m3fn)}, {f"{name}_scale_inv": torch.full((3, 2), torch.inf)}):
        model = open_model(change(write_fp8(original, tmp_path / str(len(list(tmp_path.iterdir())))), tensors))
        for read in (load, load_on_numpy):
            with pytest.raises(CheckpointError, match=rf"{next(iter(tensors))} in model.safetensors holds NaN"):
                read(model, max_seq_len=32)
    wide = {name: torch.zeros(384, 256, dtype=torch.bfloat16)}
    with pytest.raises(
        CheckpointError, match=rf"{name} is BF16, and there is {name}_scale_inv, which belongs to 8-bit"
    ):
        open_model(change(write_fp8(original, tmp_path / "wide"), wide))
    with pytest.raises(CheckpointError, match="has both weight_scale and weight_scale_inv"):
        open_model(change(folder, {f"{name}_scale": torch.ones(3, 2)}))
    with pytest.raises(CheckpointError, match=rf"tensors are missing: {name}_scale_inv;"):
        open_model(change(folder, {f"{name}_scale": None, f"{name}_scale_inv": None}))


@pytest.mark.parametrize("write", [write_awq, write_gptq])
@pytest.mark.parametrize("others", [{"qzeros": None}, {"scales": None}, {}])
def test_codes_are_missing_by_their_own_name(
    write: Callable[..., Path], others: dict[str, None], original: Path, tmp_path: Path
) -> None:
    missing = {f"{LAYER}.{part}": None for part in ("qweight", *others)}
    with pytest.raises(CheckpointError, match=rf"tensors are missing: {', '.join(missing)};"):
        open_model(change(write(original, tmp_path / "model"), missing))


@pytest.mark.filterwarnings("error")
def test_what_overflows_is_one_error(original: Path, tmp_path: Path) -> None:
    """And no warning of numpy with it."""
    large = {f"{LAYER}.weight_scale_inv": torch.full((3, 2), 3e38)}
    model = open_model(change(write_fp8(original, tmp_path / "fp8"), large))
    for read in (load, load_on_numpy):
        with pytest.raises(CheckpointError, match=rf"{LAYER}.weight in model.safetensors holds NaN or infinity"):
            read(model, max_seq_len=32)
