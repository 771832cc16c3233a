"""Models of other formats through the commands: they generate the text of the weights that their codes encode."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from foreign_models import exact, write_awq, write_fp8, write_gptq, write_packed, write_w8a8
from results import Result
from tiny_models import write_tiny_llama

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 320}
FORMATS: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "awq": (write_awq, "14 layers as int4, groups of 64, asymmetric, stored as AWQ gemm"),
    "gptq": (write_gptq, "14 layers as int4, groups of 64, stored as GPTQ"),
    "gptq-8": (
        lambda source, folder: write_gptq(source, folder, bits=8, sym=False),
        "14 layers as int8, groups of 64, asymmetric, stored as GPTQ",
    ),
    "gptq-ordered": (lambda source, folder: write_gptq(source, folder, desc_act=True), "14 layers as int4"),
    "packed-ordered": (
        lambda source, folder: write_packed(source, folder, bits=4, group_size=32, sym=True),
        "14 layers as int4, groups of 32",
    ),
    "fp8": (write_fp8, "14 layers as fp8"),
    "w8a8": (write_w8a8, "14 layers as int8, one scale a row, stored as compressed-tensors int-quantized"),
}

Llmcli = Callable[..., Result]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("foreign") / "model", dtype=torch.bfloat16, **SIZES)


@pytest.mark.parametrize("name", FORMATS)
def test_commands_say_what_the_exact_weights_say(llmcli: Llmcli, plain: Path, tmp_path: Path, name: str) -> None:
    write, words = FORMATS[name]
    foreign = write(plain, tmp_path / name)
    same = exact(foreign)
    shown = llmcli("info", foreign)
    assert words in shown.stdout
    planned = llmcli("plan", foreign)
    assert planned.exit_code == 0
    assert f"model             {name}, " in planned.stdout
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a model that others had packed.")
    measured = llmcli("eval", foreign, "--against", same, "--file", text)
    assert measured.exit_code == 0
    assert re.search(r"mean KL divergence 0(\.0000\S*)? nats per token, top-1 agreement 100\.00%", measured.stdout)
    compared = llmcli("diff", foreign, same, "Once upon a time", "--max-new-tokens", 12)
    assert compared.exit_code == 0
    assert "writes the same text, all 12 tokens" in compared.stdout + compared.stderr
    talk = ("--message", "Hi", "--chat-template", "plain", "--seed", 1, "--max-new-tokens", 12)
    said = llmcli("chat", foreign, *talk)
    for result in (shown, planned, measured, compared, said):
        assert ("8-bit weights and does not round activations to 8 bits" in result.stderr) == (name in ("fp8", "w8a8"))
    assert (said.exit_code, said.stdout) == (0, llmcli("chat", same, *talk).stdout)
    if name != "w8a8":  # its weights are too near the plain model's
        assert said.stdout != llmcli("chat", plain, *talk).stdout
