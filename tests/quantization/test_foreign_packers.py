"""The tests' own packers of AWQ and GPTQ against those of autoawq and gptqmodel, where these are installed.

Neither is a dependency: `pip install autoawq gptqmodel` into an environment of its own, and run this file there.
"""

import numpy as np
import pytest
import torch
from foreign_models import Codes, awq_tensors, gptq_tensors, quantize


def codes_of(bits: int, group_size: int, symmetric: bool, *, ordered: bool = False) -> Codes:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    group_of = np.arange(128) // group_size
    return quantize(
        weight, bits, group_size, symmetric, np.random.default_rng(0).permutation(group_of) if ordered else group_of
    )


def linear(codes: Codes) -> torch.nn.Linear:
    module = torch.nn.Linear(codes.codes.shape[1], codes.codes.shape[0], bias=False)
    module.weight.data = codes.weight.float()
    return module


@pytest.mark.parametrize("group_size", [32, 128])
def test_awq(group_size: int) -> None:
    gemm = pytest.importorskip("awq.modules.linear.gemm")
    codes = codes_of(4, group_size, symmetric=False)
    scales, zeros = (torch.from_numpy(values.T.copy()) for values in (codes.scales.astype(np.float32), codes.zeros))
    theirs = gemm.WQLinear_GEMM.from_linear(linear(codes), 4, group_size, False, scales, zeros)
    for name, tensor in awq_tensors(codes).items():
        assert torch.equal(getattr(theirs, name), tensor), name


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq(version: int, bits: int, symmetric: bool, ordered: bool) -> None:
    gptqmodel = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    codes = codes_of(bits, 32, symmetric, ordered=ordered)
    theirs = gptqmodel.TorchLinear(
        bits=bits, group_size=32, sym=symmetric, desc_act=ordered, in_features=128, out_features=96, bias=False
    )
    group_of = torch.from_numpy(codes.group_of.astype(np.int32))
    theirs.pack_original(
        linear(codes), *map(torch.from_numpy, (codes.scales.astype(np.float32), codes.zeros)), group_of
    )
    if version == 1:
        convert_gptq_v2_to_v1_format_module(theirs, type("Config", (), {"bits": bits, "pack_dtype": torch.int32})())
    for name, tensor in gptq_tensors(codes, bits, version).items():
        assert torch.equal(getattr(theirs, name), tensor), name
