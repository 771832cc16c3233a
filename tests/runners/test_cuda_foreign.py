"""Models of AWQ and GPTQ on a card: the bits of their conversions; without a conversion: the logits of the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import write_awq, write_fp8, write_gptq, write_packed, write_w8a8
from quantized import SIZES
from row_steps import PROMPT, logits_of, relative_error, same
from side_by_side import check_rows_together
from tiny_models import write_tiny_llama

from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.export_plan import plan_conversion
from llmcli.checkpoint.model import open_model
from llmcli.kernels.device import Device

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("write", [write_awq, write_gptq, write_w8a8])
def test_a_foreign_model_has_the_bits_of_its_conversion(write: Callable[..., Path], tmp_path: Path) -> None:
    from llmcli.runners.cuda.load.model import load

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


@pytest.mark.parametrize("options", [{}, {"block": None, "suffix": "scale"}, {"block": (1, 4096)}, {"keep": "up_proj"}])
def test_fp8_has_the_logits_of_the_cpu(options: dict[str, Any], tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **SIZES)
    check_logits(write_fp8(source, tmp_path / "fp8", **options))


ORDERED: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "GPTQ": (write_gptq, {"desc_act": True}),
    "GPTQ, asymmetric, 8 bits": (write_gptq, {"desc_act": True, "sym": False, "bits": 8}),
    "GPTQ, every layer by itself": (write_gptq, {"desc_act": True, "shares_order": False}),
    "compressed-tensors": (write_packed, {"bits": 4, "group_size": 64, "sym": False}),
}


@pytest.mark.parametrize("name", ORDERED)
def test_ordered_inputs_have_the_logits_of_the_cpu(name: str, tmp_path: Path) -> None:
    write, options = ORDERED[name]
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, attention_bias=True, **SIZES)
    check_logits(write(source, tmp_path / "ordered", **options))


def check_logits(folder: Path) -> None:
    """For single tokens, a few, and prompts in each kind of products; for a row alone and with others."""
    from llmcli.runners.cuda.load.model import load
    from llmcli.runners.torch.load import load as load_on_cpu

    model = open_model(folder)
    on_card = load(model, max_seq_len=128, num_rows=24, dtype="float32")
    on_cpu = load_on_cpu(model, max_seq_len=128, dtype="float32")
    for length in (1, 8, 40, 100):
        assert relative_error(logits_of(on_card, PROMPT[:length]), logits_of(on_cpu, PROMPT[:length])) < 1e-3
    check_rows_together(on_card, 20, 4)
