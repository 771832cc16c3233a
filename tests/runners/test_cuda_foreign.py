"""Models of AWQ and GPTQ on a card: the bits of their conversions."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from foreign_models import write_awq, write_gptq
from quantized import SIZES
from row_steps import PROMPT, logits_of, same
from tiny_models import write_tiny_llama

from llmcli.checkpoint.conversion_plan import plan_conversion
from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.model import open_model
from llmcli.kernels.device import Device

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("write", [write_awq, write_gptq])
def test_a_foreign_model_has_the_bits_of_its_conversion(write: Callable[..., Path], tmp_path: Path) -> None:
    from llmcli.runners.cuda.load import load

    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    foreign, converted = write(source, tmp_path / "foreign"), tmp_path / "converted"
    exporter = Exporter(plan_conversion(open_model(foreign)), converted, "tiny")
    exporter.run(exporter.prepare(), lambda done, total: None, lambda name, quality: None)
    card = Device.open(0)
    for length in (1, 8, 40, 100):  # a token alone, and each way of products
        ours, theirs = (
            logits_of(load(open_model(folder), max_seq_len=128, device=card), PROMPT[:length])
            for folder in (foreign, converted)
        )
        assert same(ours, theirs)
