"""Reading, querying and writing quantization_config, and how other programs read it."""

import copy
import time
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig as TheirConfig
from compressed_tensors.utils.match import match_named_modules, match_targets

from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.quantization.config import _GROUP_KEYS, _WEIGHTS_KEYS, ConfigGroup, QuantizationConfig
from llmcli.quantization.rounding import RowErrors, measure_quality
from llmcli.quantization.schemes import WeightScheme, vllm_concerns

INT8 = WeightScheme(8, None)
INT4 = WeightScheme(4, 128)
GROUP_CHANGES = [f"group_{key}" for key in sorted(_GROUP_KEYS)]
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}


def with_changes(**changes: Any) -> dict[str, Any]:
    """CONFIG with keys replaced; those of the weights or the group by a prefix."""
    config = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        group = config["config_groups"]["group_0"]
        if key.startswith("weights_"):
            group["weights"][key.removeprefix("weights_")] = value
        elif key.startswith("group_"):
            group[key.removeprefix("group_")] = value
        else:
            config[key] = value
    return config


def read(**changes: Any) -> QuantizationConfig:
    return QuantizationConfig.from_dict(with_changes(**changes), "config.json")


def schemes_of(
    config: QuantizationConfig, names: list[str], module_class: str = "Linear"
) -> dict[str, WeightScheme | None]:
    groups = config.groups_of(names, "config.json", module_class)
    return {name: None if group is None else group.scheme for name, group in groups.items()}


def test_the_form_that_others_write() -> None:
    config = read(
        version="0.9.4",
        sparsity_config={"format": "dense"},
        transform_config={},
        kv_cache_scheme=None,
        global_compression_ratio=1.5,
        group_input_activations=None,
        group_output_activations=None,
        group_format=None,
        weights_observer="minmax",
        weights_observer_kwargs={},
        weights_block_structure=None,
        weights_actorder="weight",
        weights_scale_dtype=None,
        weights_zp_dtype="torch.int8",
    )
    assert config == QuantizationConfig((ConfigGroup(("Linear",), INT8),), ("lm_head",))


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        ({"weights_strategy": "group", "weights_group_size": 128, "weights_num_bits": 4}, INT4),
        ({"weights_strategy": None, "weights_group_size": 32}, WeightScheme(8, 32)),
        ({"weights_strategy": None, "weights_group_size": -1}, INT8),
        ({"weights_group_size": -1}, INT8),
        ({"weights_symmetric": False}, WeightScheme(8, None, is_symmetric=False)),
        ({"format": "mixed-precision", "group_format": "pack-quantized"}, INT8),
        ({"weights_scale_dtype": "torch.bfloat16"}, INT8),
        ({"ignore": None}, INT8),
        ({"quantization_status": "frozen"}, INT8),
    ],
)
def test_schemes(changes: dict[str, Any], scheme: WeightScheme) -> None:
    name = "model.layers.0.mlp.up_proj"
    assert schemes_of(read(**changes), [name]) == {name: scheme}


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq'"),
        ({"quant_method": None}, "quant_method None"),
        ({"format": "marlin-24"}, "format 'marlin-24'"),
        ({"format": None}, "format None"),
        ({"group_format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ({"quantization_status": "calibration"}, "quantization_status 'calibration'"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"moe_sparsity_config": {"a": 1}}, "moe_sparsity_config"),
        ({"config_groups": {"W8A16": ["Linear"]}}, "a scheme by preset name"),
        ({"group_input_activations": {"num_bits": 8}}, "input_activations"),
        ({"group_output_activations": {"num_bits": 8}}, "output_activations"),
        ({"group_rotation": "hadamard"}, "'rotation'"),
        ({"weights_num_bits": 3}, "num_bits 3"),
        ({"weights_type": "float"}, "type 'float'"),
        ({"weights_dynamic": True}, "dynamic True"),
        ({"weights_actorder": "random"}, "actorder 'random'"),
        ({"weights_actorder": 1.0}, "actorder 1.0"),
        ({"format": "int-quantized", "weights_num_bits": 4}, "num_bits 4 of int-quantized"),
        ({"weights_strategy": "block"}, "strategy 'block'"),
        ({"weights_strategy": "tensor"}, "strategy 'tensor'"),
        ({"weights_strategy": None}, "strategy 'tensor'"),
        ({"weights_block_structure": [128, 128]}, "block_structure"),
        ({"weights_scale_dtype": "torch.float8_e4m3fn"}, "scale_dtype"),
        ({"weights_codebook": [1]}, "'codebook'"),
    ],
)
def test_other_features_are_refused_by_name(changes: dict[str, Any], feature: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(**changes)
    assert feature in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config_groups": {}}, "config_groups is {}"),
        ({"config_groups": None}, "config_groups is None"),
        ({"config_groups": {"group_0": 1}}, "group is 1"),
        ({"group_weights": None}, "weights is None"),
        ({"group_targets": None}, "targets is None"),
        ({"ignore": "lm_head"}, "ignore is 'lm_head'"),
        ({"ignore": ["lm_head", 1]}, "ignore is ['lm_head', 1]"),
        ({"weights_symmetric": "yes"}, "symmetric is 'yes'"),
        ({"weights_strategy": "group"}, "group_size None"),
        ({"weights_strategy": "group", "weights_group_size": 0}, "group_size 0"),
        ({"weights_strategy": "group", "weights_group_size": True}, "group_size True"),
        ({"weights_group_size": 32}, "group_size 32"),
    ],
)
def test_values_the_format_does_not_allow(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_targets": ["re:("]}, "config.json: the pattern '(' is not a regular expression"),
        ({"ignore": ["re:*"]}, "config.json: the pattern '*' is not a regular expression"),
        ({"ignore": ["re:(.+)+$^"]}, "config.json: the pattern '(.+)+$^' takes longer than 3 s to match"),
    ],
)
def test_patterns_that_cannot_be_used(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        schemes_of(read(**changes), ["model.layers.0.self_attn.q_proj"])
    assert message in str(caught.value)


def test_many_targets_cost_little() -> None:
    names = [f"model.layers.{index}.mlp.up_proj" for index in range(2000)]
    groups = (ConfigGroup(tuple(names) * 10, INT4), ConfigGroup(("Linear",), INT8))
    start = time.monotonic()
    schemes = schemes_of(QuantizationConfig(groups, tuple(names[1000:])), names)
    assert time.monotonic() - start < 1
    assert schemes == {name: INT4 if index < 1000 else None for index, name in enumerate(names)}


STRANGE = [None, True, -1, 0, 10**99, 8.0, 1e-320, 1e30, float("inf"), "", "x", "4", [], [[]], {}, {"a": [{}]}, [None]]


@pytest.mark.parametrize("key", [*CONFIG, *(f"weights_{key}" for key in sorted(_WEIGHTS_KEYS)), *GROUP_CHANGES])
def test_strange_values_are_used_or_refused(key: str) -> None:
    for value in STRANGE:
        try:
            schemes = schemes_of(read(**{key: value}), ["model.layers.0.mlp.up_proj"])
        except CheckpointError:
            continue
        (scheme,) = schemes.values()
        assert scheme is None or (type(scheme.offset), scheme.packed_shape((8, 4))[0]) == (int, 8)


@pytest.mark.parametrize(("actorder", "has_group_index"), [("group", True), (True, True), ("static", False)])
def test_the_order_of_inputs(actorder: object, has_group_index: bool) -> None:
    (group,) = read(weights_actorder=actorder).groups
    assert group.has_group_index == has_group_index


@pytest.mark.parametrize("name", ["int-quantized", "naive-quantized"])
def test_weights_of_a_byte_each_with_quantized_activations(name: str) -> None:
    (group,) = read(format=name, group_input_activations={"num_bits": 8, "dynamic": True}).groups
    assert (group.format, group.scheme) == ("int-quantized", INT8)


def test_anything_but_an_object_is_refused() -> None:
    with pytest.raises(CheckpointError, match="quantization_config is 'int8'"):
        QuantizationConfig.from_dict("int8", "config.json")


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(2, 2)
        self.k_proj = torch.nn.Linear(2, 2)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(2, 2)
        self.layers = torch.nn.ModuleList(Attention() for _ in range(3))
        self.lm_head = torch.nn.Linear(2, 2)


TARGETS = [
    [["Linear"]],
    [["Linear"], ["layers.1.q_proj"]],
    [["layers.1.q_proj"], ["re:.*q_proj"], ["Linear"]],
    [["re:layers.1.*"], ["re:.*q_proj"]],
    [["re:.*q_proj"], ["re:layers.1.*"]],
    [["Linear"], ["Linear"]],
    [["re:layers"], ["Embedding"]],
    [["Module"]],
    [["q_proj", "layers.1.k"]],
]


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize(
    "ignore", [[], ["lm_head"], ["re:.*1.*", "layers.0"], ["Embedding", "re:.*k_proj$"], ["Linear"]]
)
def test_layers_match_as_in_compressed_tensors(targets: list[list[str]], ignore: list[str]) -> None:
    groups = tuple(ConfigGroup(tuple(group), WeightScheme(4, size)) for size, group in enumerate(targets, 1))
    config = QuantizationConfig(groups, tuple(ignore))
    model = Model()
    theirs = {target: group.scheme for group in groups for target in group.targets}
    expected = {
        name: theirs[match_targets(name, module, theirs)[0]]
        for name, module in match_named_modules(model, theirs, ignore)
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    }
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            schemes = schemes_of(config, [name], type(module).__name__)
            assert schemes == {name: expected.get(name)}


def test_an_exact_name_wins_over_a_pattern() -> None:
    config = QuantizationConfig((ConfigGroup(("re:.*",), INT8), ConfigGroup(("v_proj", "k_proj"), INT4)), ())
    schemes = schemes_of(config, ["k_proj", "v_proj", "o_proj"])
    assert schemes == {"k_proj": INT4, "v_proj": INT4, "o_proj": INT8}


@pytest.mark.parametrize("scheme", [INT8, INT4, WeightScheme(4, 32, is_symmetric=False)])
def test_what_is_written_is_read(scheme: WeightScheme) -> None:
    groups = (ConfigGroup(("Linear",), scheme), ConfigGroup(("lm_head",), INT8))
    config = QuantizationConfig(groups, ("model.layers.0.mlp.up_proj",))
    assert QuantizationConfig.from_dict(config.to_dict(), "config.json") == config
    theirs = TheirConfig.model_validate(config.to_dict())
    weights = theirs.config_groups["group_0"].weights
    assert (weights.num_bits, weights.symmetric) == (scheme.num_bits, scheme.is_symmetric)
    assert (weights.group_size, weights.strategy) == (scheme.group_size, "group" if scheme.group_size else "channel")


def test_quality_of_blocks() -> None:
    first = RowErrors(torch.tensor([1.0, 0.0]).double().numpy(), torch.tensor([100.0, 0.0]).double().numpy(), 2, 10)
    second = RowErrors(torch.tensor([8.0]).double().numpy(), torch.tensor([200.0]).double().numpy(), 1, 5)
    quality = measure_quality([first, second])
    assert quality.relative_rms_error == pytest.approx((9 / 300) ** 0.5)
    assert (quality.worst_row, quality.worst_row_error) == (2, pytest.approx(0.2))
    assert quality.saturation == pytest.approx(0.2)
    zeros = RowErrors(torch.zeros(2).double().numpy(), torch.zeros(2).double().numpy(), 0, 4)
    assert measure_quality([zeros]).relative_rms_error == 0


def concerns(**changes: WeightScheme | None) -> list[str]:
    names = {
        **{layer: "self_attn" for layer in ("q_proj", "k_proj", "v_proj", "o_proj")},
        **{layer: "mlp" for layer in ("gate_proj", "up_proj", "down_proj")},
    }
    schemes: dict[str, WeightScheme | None] = {
        f"model.layers.0.{block}.{layer}": changes.get(layer, INT4) for layer, block in names.items()
    }
    schemes["lm_head"] = changes.get("lm_head")
    return vllm_concerns(schemes, dict.fromkeys(schemes, (64, 128)), "lm_head")


def test_what_vllm_may_refuse() -> None:
    assert concerns() == []
    assert concerns(o_proj=None, down_proj=INT8) == []
    (line,) = concerns(k_proj=None)
    assert "q_proj, k_proj, v_proj" in line
    assert "model.layers.0" in line
    (line,) = concerns(up_proj=INT8)
    assert "gate_proj, up_proj" in line
    (line,) = concerns(lm_head=INT8)
    assert "output head" in line
    (line,) = concerns(o_proj=WeightScheme(4, 128, is_symmetric=False))
    assert "asymmetric" in line
    (line,) = vllm_concerns({"a": INT4, "b": None}, {"a": (64, 96), "b": (1, 1)}, "lm_head")
    assert "a [64, 96]" in line
    assert vllm_concerns({"a": INT4}, {"a": (65, 128)}, "lm_head")
    fused = {f"self_attn.{name}_proj": INT4 for name in "qkv"}  # 128 + 32 + 32 outputs in one matrix
    sizes = {"self_attn.q_proj": (128, 128), "self_attn.k_proj": (32, 128), "self_attn.v_proj": (32, 128)}
    assert vllm_concerns(fused, sizes, "lm_head") == []
