"""Layouts of models: their tensors, written shapes, and packed weights."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from row_steps import logits_of
from safetensors.torch import load_file, save_file
from tiny_models import CONFIG, write_tiny_llama

from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.export_plan import plan_export
from llmcli.checkpoint.layout import EMBEDDING, HEAD
from llmcli.checkpoint.model import Model, num_parameters, open_model
from llmcli.checkpoint.random_weights import FORMATS, RandomReader, shape_model, shape_names, write_shape
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.errors import CheckpointError, OutputError, UnsupportedModelError, UsageError
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.torch.load import load


def changed(folder: Path, config: dict[str, Any] | None = None, **changes: torch.Tensor | None) -> Model:
    """Open the folder after setting tensors (None removes one; __ in a keyword stands for a dot)."""
    tensors = load_file(folder / "model.safetensors")
    for keyword, tensor in changes.items():
        name = keyword.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    return open_model(folder)


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model", with_tokenizer=False)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model", with_tokenizer=False, tie_word_embeddings=True)


def test_untied(untied: Path) -> None:
    model = open_model(untied)
    assert model.tensors.head == HEAD
    assert model.tensors.unused == ()


def test_tied_shares_the_embedding(tied: Path) -> None:
    model = open_model(tied)
    assert model.tensors.head == EMBEDDING
    assert HEAD not in model.tensors.tensors


def test_tied_with_an_equal_copy_of_the_head_shares_one_buffer(tied: Path) -> None:
    embedding = load_file(tied / "model.safetensors")[EMBEDDING]
    model = changed(tied, lm_head__weight=embedding.clone())
    assert model.tensors.head == EMBEDDING
    assert HEAD not in model.tensors.tensors
    assert model.tensors.unused == ()


def test_tied_with_another_head_uses_that_head(tied: Path) -> None:
    embedding = load_file(tied / "model.safetensors")[EMBEDDING]
    assert changed(tied, lm_head__weight=embedding + 1).tensors.head == HEAD


def test_tied_stored_under_the_name_of_the_head_only(tied: Path) -> None:
    embedding = load_file(tied / "model.safetensors")[EMBEDDING]
    model = changed(tied, lm_head__weight=embedding, model__embed_tokens__weight=None)
    assert model.tensors.head == EMBEDDING
    assert model.tensors.tensors[EMBEDDING].name == EMBEDDING  # runners know it by that name only
    assert model.tensors.tensors[EMBEDDING].offset == model.checkpoint.tensors[HEAD].offset


def test_untied_without_a_head_is_refused_with_the_remedy(untied: Path) -> None:
    with pytest.raises(CheckpointError, match="lm_head.weight is missing .* set tie_word_embeddings to true"):
        changed(untied, lm_head__weight=None)


def test_missing_tensors_are_named(untied: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1 of 30 tensors are missing: model.layers.1.mlp.up_proj.weight"):
        changed(untied, model__layers__1__mlp__up_proj__weight=None)


def test_a_config_of_more_layers_names_some_and_counts_the_rest(untied: Path) -> None:
    with pytest.raises(CheckpointError, match=r"18 of 48 tensors are missing: model.layers.3.* and 14 more"):
        changed(untied, {"num_hidden_layers": 5})


def test_misshapen_tensors_are_explained(untied: Path) -> None:
    expected = (
        r"model.layers.2.self_attn.k_proj.weight in model.safetensors is \[64, 64\], expected \[16, 64\] "
        r"\(num_key_value_heads 2 \* head_dim 8, hidden_size in config.json\)"
    )
    with pytest.raises(CheckpointError, match=expected):
        changed(untied, model__layers__2__self_attn__k_proj__weight=torch.zeros(64, 64))


def test_integer_weights_are_refused(untied: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match="model.norm.weight in model.safetensors is I32, expected one of BF16"
    ):
        changed(untied, model__norm__weight=torch.zeros(64, dtype=torch.int32))


def test_unused_tensors_are_listed_but_rotary_tables_are_not(untied: Path) -> None:
    table = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.zeros(4)}
    model = changed(untied, vision__weight=torch.zeros(3), **table)
    assert model.tensors.unused == ("vision.weight",)


def test_biases_the_config_does_not_ask_for_are_unused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, attention_bias=True)
    assert len(changed(folder, {"attention_bias": False}).tensors.unused) == 3 * 4


# Shapes of models, and the random weights that are written for them.


# By their authors' count, a tied head once.
PUBLISHED = {
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-13B": 13_015_864_320,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "TinyLlama-1.1B": 1_100_048_384,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen3-4B": 4_022_468_096,
}


def ignore(done: int, total: int) -> None: ...


def test_parameters_are_the_published_ones() -> None:
    assert {name: num_parameters(shape_model(name, "bf16")) for name in shape_names()} == PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_quantizing_leaves_the_parameters(name: str) -> None:
    model = shape_model(name, "int4")
    assert num_parameters(model) == PUBLISHED[name]
    assert model.tensors.unused == ()


def test_an_unknown_name_lists_the_shapes() -> None:
    with pytest.raises(
        UsageError, match="'Llama-9' is not a known shape; expected one of Llama-2-13B, .*, TinyLlama-1.1B"
    ):
        shape_model("Llama-9", "bf16")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A shape small enough to be written in a test, with biases."""
    folder = tmp_path / "configs" / "models"
    folder.mkdir(parents=True)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 320}
    config = {**CONFIG, **sizes, "dtype": "float16", "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (folder / "Tiny.json").write_text(json.dumps(config))
    monkeypatch.setattr("llmcli.checkpoint.random_weights.resource_folder", lambda name: tmp_path / name)
    return "Tiny"


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_written_is_what_was_planned(tiny: str, form: str, tmp_path: Path) -> None:
    folder = tmp_path / "scratch" / "model"
    done = []
    write_shape(tiny, form, folder, lambda read, total: done.append((read, total)))
    written, planned = open_model(folder), shape_model(tiny, form)

    def facts(tensors: dict[str, TensorInfo]) -> dict[str, tuple[str, tuple[int, ...], int]]:
        return {name: (info.dtype, info.shape, info.num_bytes) for name, info in tensors.items()}

    assert facts(written.checkpoint.tensors) == facts(planned.checkpoint.tensors)
    assert written.tensors.quantized == planned.tensors.quantized
    assert (form == "fp8") == bool(written.tensors.scaled)
    assert written.config == planned.config
    assert {"int8": 8, "int4": 4, "awq": 4, "fp8": None, "bf16": None}[form] == next(
        (layer.scheme.num_bits for layer in written.tensors.packed.values()), None
    )
    with (folder / "model.safetensors").open("rb") as file:
        header_bytes = struct.unpack("<Q", file.read(8))[0]
    data_bytes = sum(info.num_bytes for info in planned.checkpoint.tensors.values())
    assert (folder / "model.safetensors").stat().st_size == 8 + header_bytes + data_bytes
    assert done[-1][0] == done[-1][1] > 0
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("form", FORMATS)
def test_random_models_neither_repeat_themselves_nor_blow_up(tiny: str, form: str, tmp_path: Path) -> None:
    write_shape(tiny, form, tmp_path / "model", ignore)
    runner = load(open_model(tmp_path / "model"), max_seq_len=64)
    choices = set()
    for first in range(20):
        logits = logits_of(runner, [first, 7, 9])
        assert 1 < logits.std() < 4
        choices.add(int(logits.argmax()))
    assert len(choices) > 10


def test_an_interrupted_run_leaves_nothing(tiny: str, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for form in FORMATS:
        with pytest.raises(KeyboardInterrupt):
            write_shape(tiny, form, tmp_path / "scratch" / "model", interrupt)
        assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("form", ["int8", "bf16"])
def test_a_full_disk_is_found_before_it_is_full(
    tiny: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shape(tiny, form, tmp_path / "model", ignore)
    taken = sum(path.stat().st_blocks * 512 for path in (tmp_path / "model").iterdir())
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": taken + 1_200_000})())
    write_shape(tiny, form, tmp_path / "fits", ignore)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": taken - 1})())
    with pytest.raises((CheckpointError, OutputError), match=r"B free; the (export|model) needs"):
        write_shape(tiny, form, tmp_path / "other", ignore)
    assert not (tmp_path / "other").exists()


def info(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> TensorInfo:
    itemsize = {"BF16": 2, "F16": 2, "F32": 4}[dtype]
    return TensorInfo(name, dtype, shape, Path("nowhere"), 0, int(np.prod(shape)) * itemsize)


def read(reader: RandomReader, tensor: TensorInfo, begin: int = 0, count: int | None = None) -> torch.Tensor:
    buffer = bytearray(tensor.num_bytes - begin if count is None else count)
    reader.read_range_into(tensor, begin, buffer)
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[tensor.dtype]
    return torch.frombuffer(buffer, dtype=dtype).float()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_random_numbers_have_the_size_of_their_layer(dtype: str) -> None:
    reader = RandomReader()
    weight = read(reader, info("model.layers.0.mlp.up_proj.weight", (500, 400), dtype))
    assert weight.std().item() == pytest.approx(400**-0.5, rel=0.02)
    assert abs(weight.mean().item()) < 1e-3
    head = read(reader, info("lm_head.weight", (500, 400), dtype))
    assert head.std().item() == pytest.approx(2 * 400**-0.5, rel=0.02)
    assert read(reader, info("model.norm.weight", (400,), dtype)).unique().tolist() == [1.0]
    rows = weight.reshape(500, 400)
    assert len({tuple(row.tolist()) for row in rows}) == 500


def test_pieces_are_those_of_the_whole_beyond_the_end_of_the_pool() -> None:
    tensor = info("model.layers.3.mlp.up_proj.weight", (4500, 2000))  # more numbers than the pool has
    whole = read(RandomReader(), tensor)
    begin = 2 * 8_388_000
    assert torch.equal(read(RandomReader(), tensor, begin, 20_000), whole[begin // 2 :][:10_000])
    other = read(RandomReader(), info("model.layers.4.mlp.up_proj.weight", (4500, 2000)))
    assert not torch.equal(other, whole)


# Folders with quantized layers: what is matched, and what is refused by name.


LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A model in int8, groups of 32, with down_proj (176 inputs) in a channel group of its own."""
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False)
    destination = tmp_path / "packed"
    exporter = Exporter(plan_export(open_model(source), ExportOptions(WeightScheme(8, 32))), destination, "tiny")
    exporter.run(exporter.prepare(), lambda done, total: None, lambda name, quality: None)
    return destination


@pytest.fixture
def opened(packed: Path) -> Callable[..., Model]:
    """Open the folder after changing tensors (None removes one) and the quantization_config."""

    def call(tensors: dict[str, torch.Tensor | None] | None = None, **config: Any) -> Model:
        held = load_file(packed / "model.safetensors") | (tensors or {})
        save_file({name: tensor for name, tensor in held.items() if tensor is not None}, packed / "model.safetensors")
        values = json.loads((packed / "config.json").read_text())
        values["quantization_config"] |= config
        (packed / "config.json").write_text(json.dumps(values))
        return open_model(packed)

    return call


def test_schemes_and_shapes(opened: Callable[..., Model]) -> None:
    model = opened()
    assert len(model.tensors.packed) == 3 * 7
    assert model.tensors.packed[LAYER].scheme == WeightScheme(8, 32)
    assert model.tensors.packed[LAYER].shape == (176, 64)
    assert model.tensors.packed["model.layers.0.mlp.down_proj"].scheme == WeightScheme(8, None)
    assert model.tensors.unused == ()


def test_a_missing_part_is_named(opened: Callable[..., Model]) -> None:
    with pytest.raises(CheckpointError, match=rf"1 of \d+ tensors are missing: {LAYER}.weight_scale"):
        opened({f"{LAYER}.weight_scale": None})


def test_scales_of_another_group_size_are_explained(opened: Callable[..., Model]) -> None:
    with pytest.raises(CheckpointError, match=r"weight_scale .*is \[176, 1\], expected \[176, 2\] .*groups of 32"):
        opened({f"{LAYER}.weight_scale": torch.ones(176, 1)})


def test_codes_that_are_no_integers(opened: Callable[..., Model]) -> None:
    with pytest.raises(UnsupportedModelError, match="weight_packed in model.safetensors is F32, expected I32"):
        opened({f"{LAYER}.weight_packed": torch.zeros(176, 16)})


def test_a_stored_shape_that_lies(opened: Callable[..., Model]) -> None:
    model = opened({f"{LAYER}.weight_shape": torch.tensor([176, 63])})
    with pytest.raises(CheckpointError, match=rf"{LAYER}.weight_shape is \[176, 63\], expected \[176, 64\]"):
        load(model, max_seq_len=32)


def test_scales_that_are_not_finite(opened: Callable[..., Model]) -> None:
    model = opened({f"{LAYER}.weight_scale": torch.full((176, 2), torch.inf)})
    with pytest.raises(CheckpointError, match=rf"{LAYER}.weight_scale in model.safetensors holds NaN or infinity"):
        load(model, max_seq_len=32)


def test_an_order_that_is_not_declared(opened: Callable[..., Model]) -> None:
    """Groups of neighbours need no order, nor do unset ones; any other contradicts the config."""
    natural = torch.arange(64, dtype=torch.int32) // 32
    for index in (natural, torch.full_like(natural, -1)):
        load(opened({f"{LAYER}.weight_g_idx": index}), max_seq_len=32)
    model = opened({f"{LAYER}.weight_g_idx": natural.flip(0)})
    with pytest.raises(CheckpointError, match=rf"{LAYER}.weight_g_idx in model.safetensors orders the inputs, and"):
        load(model, max_seq_len=32)


def test_a_quantized_embedding_is_refused(opened: Callable[..., Model]) -> None:
    with pytest.raises(UnsupportedModelError, match="a quantized embedding .* is not supported"):
        opened({"model.embed_tokens.weight_packed": torch.zeros(288, 16, dtype=torch.int32)})


def test_groups_that_do_not_divide_a_layer(opened: Callable[..., Model]) -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True}}}
    groups["group_0"]["weights"] |= {"strategy": "group", "group_size": 64}
    with pytest.raises(CheckpointError, match="down_proj has 176 inputs, which groups of 64 do not divide"):
        opened(config_groups=groups)


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"quant_method": "quip"}, "quip"),
    ],
)
def test_other_features_are_refused_by_name(opened: Callable[..., Model], change: dict[str, Any], feature: str) -> None:
    with pytest.raises(UnsupportedModelError, match=feature):
        opened(**change)


def test_a_quantized_cache_is_not_used_and_a_line_says_so(opened: Callable[..., Model]) -> None:
    scales = {f"model.layers.0.self_attn.{side}_scale": torch.ones(1) for side in "qkv"}
    model = opened(scales, kv_cache_scheme={"num_bits": 8, "type": "float"})
    assert model.tensors.unused == ()
    assert model.notes == (
        "made for a quantized KV cache; llmcli does not use its scales (--kv-cache int8 needs none)",
    )
    assert opened(kv_cache_scheme=None).notes == ()


def test_zero_points_of_a_symmetric_model(opened: Callable[..., Model]) -> None:
    name = "model.layers.0.mlp.up_proj.weight_zero_point"
    with pytest.raises(CheckpointError, match=f"{name} is there, and config.json says that the weights are symmetric"):
        opened({name: torch.zeros(22, 2, dtype=torch.int32)})


def test_activation_quantization_is_refused_by_name(opened: Callable[..., Model], packed: Path) -> None:
    groups = json.loads((packed / "config.json").read_text())["quantization_config"]["config_groups"]
    for group in groups.values():
        group["input_activations"] = {"num_bits": 8, "type": "int", "symmetric": True}
    with pytest.raises(UnsupportedModelError, match="input_activations"):
        opened(config_groups=groups)
