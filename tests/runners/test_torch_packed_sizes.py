"""torch's packed operators at every size: sizes that they do not check must not reach them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmcli.quantization.schemes import WeightScheme
from llmcli.runners.torch import codes_product
from llmcli.runners.torch.packed_linear import ChannelInt8Product, WideningProduct, choose_product
from llmcli.runners.torch.weights import PackedWeight

ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = {"default": {"ATEN_CPU_CAPABILITY": "default"}, "avx2": {"ATEN_CPU_CAPABILITY": "avx2"}, "own": {}}


def run_in_child(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guards memory with Linux's mprotect")
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ("8-140", "1,16,50"),
        ("16,24,64,256", "8-80"),
        pytest.param("8-300", "1,16,50", marks=pytest.mark.long),
        pytest.param("16,24,64,256", "8-300", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_size(inputs: str, outputs: str, capability: str) -> None:
    """`packed_sizes.py` has the whole sweep; here inputs of every remainder of 128 and outputs of 64."""
    sweep = ROOT / "tests" / "runners" / "packed_sizes.py"
    result = run_in_child([str(sweep), inputs, outputs], **CAPABILITIES[capability])
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout.split()[0]) > 300  # matrices that one of torch's operators took


def test_a_quantized_model_of_odd_sizes_generates(stories260k: Path, tmp_path: Path) -> None:
    """Its 172 inputs are not a multiple of 16. As a user runs it, so that a crash is an exit code."""
    folder = tmp_path / "export"
    assert run_in_child(["-m", "llmcli", "quantize", str(stories260k), str(folder)]).returncode == 0
    texts = {}
    for dtype in ("bfloat16", "float32"):
        options = ["-m", str(folder), "--dtype", dtype, "--temperature", "0", "--threads", "1"]
        result = run_in_child(["-m", "llmcli", "generate", "Once upon a time", *options])
        assert result.returncode == 0, result.stderr
        texts[dtype] = result.stdout
    assert texts["bfloat16"][:100] == texts["float32"][:100]


@pytest.mark.parametrize("input_size", [9, 24, 172])
def test_int8_of_any_input_size_goes_through_the_operator(input_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes_product, "is_available", lambda: False)
    codes = torch.zeros(8, -(-input_size // 4) * 4, dtype=torch.uint8)
    weight = PackedWeight(WeightScheme(8, None), (8, input_size), codes, torch.ones(8, 1), None)
    assert isinstance(choose_product(weight, torch.bfloat16), ChannelInt8Product)


@pytest.mark.parametrize(
    ("scheme", "shape"),
    [
        (WeightScheme(8, None), (2**17, 2**14)),
        (WeightScheme(4, 32), (2**17, 2**14)),
        (WeightScheme(8, 32), (2**16, 2**14)),  # twice as many codes of 4 bits
    ],
    ids=str,
)
def test_matrices_beyond_the_operators_32_bits_are_widened(
    scheme: WeightScheme, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codes_product, "is_available", lambda: False)
    codes = torch.zeros(1, 1, dtype=torch.uint8).expand(shape[0], 4 * scheme.packed_shape(shape)[1])  # takes no memory
    weight = PackedWeight(scheme, shape, codes, torch.ones(1, 1).expand(scheme.scale_shape(shape)), None)
    assert isinstance(choose_product(weight, torch.bfloat16), WideningProduct)
