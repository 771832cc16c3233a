"""Models of other formats through the commands: they generate the text of the weights that their codes encode."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from foreign_models import exact, write_awq, write_fp8, write_w8a8
from results import Llmcli

# A format of each kind; the others are held against their weights in tests/runners.
FORMATS: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "awq": (write_awq, "14 layers as int4, groups of 64, asymmetric, stored as AWQ gemm"),
    "fp8": (write_fp8, "14 layers as fp8"),
    "w8a8": (write_w8a8, "14 layers as int8, one scale a row, stored as compressed-tensors int-quantized"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_commands_say_what_the_exact_weights_say(llmcli: Llmcli, wide: Path, tmp_path: Path, name: str) -> None:
    write, words = FORMATS[name]
    foreign = write(wide, tmp_path / name)
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
    assert re.search(
        r"mean KL divergence 0(\.0000\S*)?( \(.*?\))? nats per token, top-1 agreement 100\.00%", measured.stdout
    )
    compared = llmcli("diff", foreign, same, "Once upon a time", "--max-new-tokens", 12)
    assert compared.exit_code == 0
    assert "writes the same text, all 12 tokens" in compared.stdout + compared.stderr
    talk = ("--message", "Hi", "--chat-template", "plain", "--seed", 1, "--max-new-tokens", 12)
    said = llmcli("chat", foreign, *talk)
    for result in (shown, planned, measured, compared, said):
        assert ("8-bit weights and does not round activations to 8 bits" in result.stderr) == (name in ("fp8", "w8a8"))
    assert (said.exit_code, said.stdout) == (0, llmcli("chat", same, *talk).stdout)
    if name != "w8a8":  # its weights are too near the plain model's
        assert said.stdout != llmcli("chat", wide, *talk).stdout
