"""LoRA adapters written by peft: tensors equal to its own merge bit by bit, and both runners' logits."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from row_steps import PROMPT, logits_of, relative_error  # noqa: E402

from llmcli.checkpoint.adapter import open_adapter  # noqa: E402
from llmcli.checkpoint.adapter_merge import merge_adapters  # noqa: E402
from llmcli.checkpoint.layout import EMBEDDING, HEAD  # noqa: E402
from llmcli.checkpoint.model import Model, open_model  # noqa: E402
from llmcli.checkpoint.reader import TensorReader  # noqa: E402
from llmcli.errors import UnsupportedModelError  # noqa: E402
from llmcli.runners.numpy.load import load as load_on_numpy  # noqa: E402
from llmcli.runners.torch.load import load  # noqa: E402

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "attention_bias": True, "with_tokenizer": False}
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

ATTENTION = ["q_proj", "v_proj"]
OPTIONS: dict[str, dict[str, Any]] = {
    "a list of layers": {"target_modules": ATTENTION},
    "another alpha": {"target_modules": ATTENTION, "lora_alpha": 7},
    "rsLoRA": {"target_modules": ATTENTION, "use_rslora": True, "r": 6},
    "a pattern": {"target_modules": r"model\.layers\.1\..*(up|o)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "ranks by pattern": {
        "target_modules": ["q_proj", "k_proj", "up_proj"],
        # peft sorts the keys when it saves, and the first that matches counts.
        "rank_pattern": {"^model.layers.1.mlp.up_proj": 5, r"layers\.0.*proj": 3, "q_proj": 2},
        "alpha_pattern": {r"layers\.1\.self_attn\.[qk]_proj": 32, "q_proj": 5},
        "use_rslora": True,
    },
    "one layer": {"target_modules": ATTENTION, "layers_to_transform": [1]},
    "one layer, by pattern": {"target_modules": ATTENTION, "layers_to_transform": 0, "layers_pattern": "layers"},
    "some left out": {"target_modules": "all-linear", "exclude_modules": ["o_proj", "model.layers.0.mlp.up_proj"]},
    "some left out, by pattern": {"target_modules": ATTENTION, "exclude_modules": r".*\.0\..*q_proj"},
    "all biases": {"target_modules": ["q_proj", "down_proj"], "bias": "all"},
    "biases of the layers": {"target_modules": ["q_proj", "down_proj"], "bias": "lora_only"},
    "fan_in_fan_out": {"target_modules": ["up_proj"], "fan_in_fan_out": True},
    "the head": {"target_modules": ["lm_head", "gate_proj"]},
    "the embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "modules_to_save": {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]},
    "norms saved": {"target_modules": ATTENTION, "modules_to_save": ["norm"]},
    "a saved part of what is listed": {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["layers.1.mlp"]},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in each dtype."""
    root = tmp_path_factory.mktemp("bases")
    return {name: write_tiny_llama(root / name, dtype=dtype, **SIZES) for name, dtype in TORCH_DTYPES.items()}


def load_base(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def write_adapter(base: Path, folder: Path, options: Mapping[str, Any], seed: int = 0) -> Path:
    """By peft, with numbers whose products and sums float32 holds exactly, so that any order of summation agrees."""
    defaults = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", "lora_dropout": 0.1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fan_in_fan_out, tied weights, embeddings that are saved
        model = peft.get_peft_model(load_base(base), peft.LoraConfig(**{**defaults, **options}))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randint(-8, 9, parameter.shape, generator=generator) / 32
            elif parameter.requires_grad:
                parameter.data += torch.randn(parameter.shape, generator=generator) / 4
        model.save_pretrained(folder)
    return folder


def merged_by_peft(base: Path, adapter: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(load_base(base), adapter).merge_and_unload().eval()


def open_merged(base: Path, *adapters: tuple[Path, float]) -> Model:
    return merge_adapters(open_model(base), [open_adapter(folder, folder.name, weight) for folder, weight in adapters])


def read_all(model: Model) -> dict[str, torch.Tensor]:
    """Every tensor of a model as runners get it."""
    tensors = {}
    with TensorReader() as reader:
        for name, info in model.tensors.tensors.items():
            tensor = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype])
            reader.read_tensor_into(info, tensor.view(torch.uint8).numpy())
            tensors[name] = tensor
    return tensors


def require_same_bits(model: Model, expected: Mapping[str, torch.Tensor], dtype: str) -> None:
    """`expected` is float32."""
    tensors = read_all(model)
    assert tensors.keys() <= expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name].to(TORCH_DTYPES[dtype])), name


def logits_by_transformers(model: Any) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([PROMPT[:40]])).logits[0, -1].numpy()


@pytest.mark.parametrize("what", OPTIONS)
def test_tensors_and_logits_are_those_of_peft(bases: dict[str, Path], tmp_path: Path, what: str) -> None:
    adapter = write_adapter(bases["F32"], tmp_path / "adapter", OPTIONS[what])
    for dtype in ("BF16", "F32"):
        merged = merged_by_peft(bases[dtype], adapter)
        require_same_bits(open_merged(bases[dtype], (adapter, 1.0)), merged.state_dict(), dtype)
    reference = logits_by_transformers(merged)
    model = open_merged(bases["F32"], (adapter, 1.0))
    runner = load(model, max_seq_len=64)
    assert relative_error(logits_of(runner, PROMPT[:40]), reference) < 1e-3
    assert relative_error(logits_of(load_on_numpy(model, max_seq_len=64), PROMPT[:40]), reference) < 1e-3
    # The adapter's effect is large.
    assert relative_error(logits_by_transformers(load_base(bases["F32"])), reference) > 1e-2


def test_weights_are_rounded_once(bases: dict[str, Path], tmp_path: Path) -> None:
    """Ordinary numbers, whose sums round differently in another order: at most the last bit differs, and seldom."""
    adapter = write_adapter(bases["F32"], tmp_path / "adapter", {"target_modules": "all-linear"})
    model = merged_by_peft(bases["BF16"], adapter)
    file = adapter / "adapter_model.safetensors"
    factors = {name: torch.randn_like(value) / 8 for name, value in load_file(file).items()}
    save_file(factors, file)
    model = merged_by_peft(bases["BF16"], adapter)
    tensors, expected = read_all(open_merged(bases["BF16"], (adapter, 1.0))), model.state_dict()
    wrong = sum(int((tensor != expected[name].to(torch.bfloat16)).sum()) for name, tensor in tensors.items())
    assert wrong <= sum(tensor.numel() for tensor in tensors.values()) // 10_000
    for name, tensor in tensors.items():
        error = (tensor.float() - expected[name]).abs()
        assert (error <= expected[name].abs() * 2.0**-8 + 1e-9).all(), name


def test_several_adapters_with_weights(bases: dict[str, Path], tmp_path: Path) -> None:
    first = write_adapter(bases["F32"], tmp_path / "first", {"target_modules": ["q_proj", "up_proj"]}, seed=1)
    second = write_adapter(bases["F32"], tmp_path / "second", {"target_modules": ["q_proj", "o_proj"], "r": 2}, seed=2)
    model = peft.PeftModel.from_pretrained(load_base(bases["F32"]), first, adapter_name="first")
    model.load_adapter(second, adapter_name="second")
    for layer in model.modules():
        if isinstance(layer, peft.tuners.lora.Linear) and "second" in layer.scaling:
            layer.set_scale("second", -0.5)
    model.base_model.set_adapter(["first", "second"])
    merged = model.merge_and_unload(adapter_names=["first", "second"])
    require_same_bits(open_merged(bases["F32"], (first, 1.0), (second, -0.5)), merged.state_dict(), "F32")


@pytest.mark.parametrize("saved", [["embed_tokens", "lm_head"], ["embed_tokens"], ["lm_head"]])
def test_copies_of_a_shared_matrix(tmp_path: Path, saved: list[str]) -> None:
    """peft trains copies of an embedding that is also the head: afterwards they are two."""
    base = write_tiny_llama(tmp_path / "base", tie_word_embeddings=True, **SIZES)
    adapter = write_adapter(base, tmp_path / "adapter", {"target_modules": ["q_proj"], "modules_to_save": saved})
    model = open_merged(base, (adapter, 1.0))
    assert model.tensors.head == HEAD
    reference = logits_by_transformers(merged_by_peft(base, adapter))
    assert relative_error(logits_of(load_on_numpy(model, max_seq_len=64), PROMPT[:40]), reference) < 1e-3


@pytest.mark.parametrize("saved", [["embed_tokens", "lm_head"], ["embed_tokens"], ["lm_head"]])
def test_a_shared_matrix_that_stays_one(tmp_path: Path, saved: list[str]) -> None:
    """With ensure_weight_tying peft trains one, and saves it once or twice."""
    base = write_tiny_llama(tmp_path / "base", tie_word_embeddings=True, **SIZES)
    options = {"target_modules": ["q_proj"], "modules_to_save": saved, "ensure_weight_tying": True}
    adapter = write_adapter(base, tmp_path / "adapter", options)
    model = open_merged(base, (adapter, 1.0))
    assert model.tensors.head == EMBEDDING
    reference = logits_by_transformers(merged_by_peft(base, adapter))
    assert relative_error(logits_of(load_on_numpy(model, max_seq_len=64), PROMPT[:40]), reference) < 1e-3
    assert relative_error(logits_by_transformers(load_base(base)), reference) > 1e-2
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    other = f"base_model.model.{EMBEDDING}"
    save_file({**tensors, other: torch.zeros(288, 64), f"base_model.model.{HEAD}": torch.ones(288, 64)}, file)
    with pytest.raises(UnsupportedModelError, match="differ, and the base model has one matrix for both"):
        open_merged(base, (adapter, 1.0))


def test_embeddings_that_are_saved_unasked(bases: dict[str, Path], tmp_path: Path) -> None:
    """peft saves them if it sees a changed vocabulary, and loads them over those of the base."""
    adapter = write_adapter(bases["F32"], tmp_path / "adapter", {"target_modules": ["q_proj"]})
    file = adapter / "adapter_model.safetensors"
    ends = {f"base_model.model.{name}": torch.randn(288, 64) for name in (EMBEDDING, HEAD)}
    save_file({**load_file(file), **ends}, file)
    model = open_merged(bases["F32"], (adapter, 1.0))
    require_same_bits(model, merged_by_peft(bases["F32"], adapter).state_dict(), "F32")
    save_file({**load_file(file), **{name: torch.randn(296, 64) for name in ends}}, file)
    with pytest.raises(UnsupportedModelError, match=r"has 296 tokens, the base model 288; .* merge_and_unload"):
        open_merged(bases["F32"], (adapter, 1.0))


def test_bits_do_not_depend_on_how_a_tensor_is_cut(bases: dict[str, Path], tmp_path: Path) -> None:
    """Runners, cards and `quantize` read parts of different sizes."""
    base = write_tiny_llama(tmp_path / "base", dtype=torch.bfloat16, num_hidden_layers=1, intermediate_size=9000)
    adapter = write_adapter(base, tmp_path / "adapter", {"target_modules": ["gate_proj"], "r": 8})
    file = adapter / "adapter_model.safetensors"
    save_file({name: torch.randn_like(value) for name, value in load_file(file).items()}, file)
    model = open_merged(base, (adapter, 1.0))
    name = "model.layers.0.mlp.gate_proj.weight"
    info, whole = model.tensors.tensors[name], read_all(model)[name].view(torch.uint8).numpy().tobytes()
    rng = np.random.default_rng(0)
    with TensorReader() as reader:
        for _ in range(20):
            begin, end = sorted(int(place) for place in rng.integers(0, info.num_bytes, 2))
            part = bytearray(end - begin)
            reader.read_range_into(info, begin, part)
            assert part == whole[begin:end]
