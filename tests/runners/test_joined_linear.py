"""Layers of one input as one matrix: bit for bit as apart."""

from pathlib import Path

import pytest
import torch
from packed_sizes import random_weight
from quantized import export
from row_steps import PROMPT, logits_of
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.torch import codes_product
from llmcli.runners.torch.load import load
from llmcli.runners.torch.packed_linear import JoinedLinear, PackedLinear

pytestmark = pytest.mark.skipif(not codes_product.is_available(), reason="no C++ compiler for this processor")

SCHEMES = [WeightScheme(8, None), WeightScheme(8, 32, is_symmetric=False), WeightScheme(4, 64)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_each_layer_has_the_bits_that_it_has_alone(scheme: WeightScheme) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [random_weight(scheme, (rows, 384), generator) for rows in (200, 33, 64)]
    biases = [torch.randn(200, generator=generator).bfloat16(), None, torch.randn(64, generator=generator)]
    joined = JoinedLinear(weights, biases)
    for sizes in ((1,), (1, 1, 1), (20, 3)):
        x = torch.randn(sum(sizes), 384, generator=generator)
        for found, weight, bias in zip(joined(x, sizes), weights, biases, strict=True):
            alone = PackedLinear(weight, bias, torch.bfloat16)
            assert torch.equal(found, torch.cat([alone(part) for part in x.split(sizes)]))


def test_what_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    def weight(bits: int, group_size: int, inputs: int = 64, is_symmetric: bool = True):
        scheme = WeightScheme(bits, group_size, is_symmetric=is_symmetric)
        return random_weight(scheme, (64, inputs), torch.Generator().manual_seed(0))

    first = weight(8, 32)
    assert JoinedLinear.takes([first, first], torch.bfloat16)
    assert not JoinedLinear.takes([first, first], torch.float32)
    for other in (weight(4, 32), weight(8, 64), weight(8, 32, 128), weight(8, 32, is_symmetric=False)):
        assert not JoinedLinear.takes([first, other], torch.bfloat16)
    monkeypatch.setattr(codes_product, "is_available", lambda: False)
    assert not JoinedLinear.takes([first, first], torch.bfloat16)


def test_a_model_has_the_bits_that_it_has_with_separate_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_llama(tmp_path / "model", with_tokenizer=False)
    folder = export(source, tmp_path / "int8", ExportOptions(WeightScheme(8, 32)))
    products = []
    usual = codes_product.CodesProduct.__init__
    monkeypatch.setattr(
        codes_product.CodesProduct, "__init__", lambda self, weight: products.append(usual(self, weight))
    )
    runner = load(open_model(folder), max_seq_len=64, dtype="bfloat16")
    num_joined = len(products)
    monkeypatch.setattr(JoinedLinear, "takes", lambda weights, dtype: False)
    separate = load(open_model(folder), max_seq_len=64, dtype="bfloat16")
    layers = runner.config.num_hidden_layers
    assert (num_joined, len(products) - num_joined) == (4 * layers, 7 * layers)
    assert (logits_of(runner, PROMPT[:20]) == logits_of(separate, PROMPT[:20])).all()
