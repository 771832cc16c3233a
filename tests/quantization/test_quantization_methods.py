"""The quantization_config of AWQ, GPTQ and fp8: its meaning, and no value of it is an internal error."""

from typing import Any

import pytest

from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.quantization.config import AwqConfig, Fp8Config, GptqConfig, read_quantization
from llmcli.quantization.schemes import Fp8Scheme, WeightScheme

AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}

STRANGE = [None, True, -1, 0, 10**99, 8.0, 1e30, float("inf"), "", "x", "4", [], [[]], {}, {"a": [{}]}, [None]]
OTHER_KEYS = [
    "checkpoint_format",
    "format",
    "is_marlin_format",
    "pack_dtype",
    "dynamic",
    "adapter",
    "backend",
    "scale_fmt",
]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (AWQ, AwqConfig(WeightScheme(4, 128, is_symmetric=False))),
        # As autoawq wrote it at first, and a row for a group.
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "zero_point": True, "version": "GEMM"},
            AwqConfig(WeightScheme(4, None, is_symmetric=False)),
        ),
        (GPTQ, GptqConfig(WeightScheme(4, 128), 1, False)),
        ({**GPTQ, "checkpoint_format": "gptq_v2", "sym": False}, GptqConfig(WeightScheme(4, 128, False), 0, False)),
        ({**GPTQ, "bits": 8, "desc_act": None, "format": "gptq"}, GptqConfig(WeightScheme(8, 128), 1, None)),
        ({**GPTQ, "dynamic": {"-:.*lm_head": {}}}, GptqConfig(WeightScheme(4, 128), 1, False)),
        (FP8, Fp8Config(Fp8Scheme(128, 128))),
        ({"quant_method": "fp8"}, Fp8Config(None)),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Fp8Config(None)),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, Fp8Config(None)),
    ],
)
def test_what_it_means(fields: dict[str, Any], expected: object) -> None:
    assert read_quantization(fields, "config.json") == expected


def outcome(fields: dict[str, Any]) -> object:
    """The scheme read, or the message of the refusal."""
    try:
        return read_quantization(fields, "config.json")
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("config", [AWQ, GPTQ, FP8], ids=lambda config: config["quant_method"])
def test_strange_values_are_used_or_refused(config: dict[str, Any]) -> None:
    for key in [*config, *OTHER_KEYS]:
        for value in STRANGE:
            found = outcome({**config, key: value})
            is_refused = isinstance(found, str) and "config.json" in found and "\n" not in found
            assert is_refused or isinstance(found, AwqConfig | GptqConfig | Fp8Config)


@pytest.mark.parametrize(
    ("fields", "method"),
    [
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "exl3"}, "exl3"),
        ({"bits": 4, "group_size": 64}, "mlx"),
        ({}, "unknown"),
        (7, "unknown"),
    ],
)
def test_other_methods_are_refused_with_the_way_out(fields: object, method: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_quantization(fields, "config.json")
    assert f"(method {method}), which is not supported" in str(caught.value)
    assert "llmcli quantize" in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "text"),
    [
        (Fp8Scheme(None, None), "fp8, one scale"),
        (Fp8Scheme(1, None), "fp8, one scale a row"),
        (Fp8Scheme(128, 128), "fp8, blocks of 128 x 128"),
    ],
)
def test_how_users_are_told(scheme: Fp8Scheme, text: str) -> None:
    assert str(scheme) == text
