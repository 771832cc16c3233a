"""A whole model by the kernels themselves, thread by thread on the CPU, on machines without a card.

Memory is full of NaN at first. So a kernel that reads what none has written shows, and so does one that is right alone
but does not take what the one before it leaves.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rounded_torch
import torch
from emulated import COMPILER, EmulatedDevice, can_emulate
from foreign_models import write_fp8, write_gptq
from row_steps import PROMPT, logits_of, relative_error, single_steps, start
from simulated_card import EmulatedCard, emulate
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.runners.base import Span
from llmcli.runners.cuda.load.model import load
from llmcli.runners.torch.load import load as load_by_torch

pytestmark = pytest.mark.skipif(not can_emulate(), reason=f"no {COMPILER} that knows _Float16 and ucontext.h")

MANY_ROWS = 33  # that attention_rows serves; it writes the image that o takes, as rows of its inputs are whole spans
# Hidden size and intermediate size leave the last span unfilled.
SIZES: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    return write_tiny_llama(folder, with_tokenizer=False, dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    return EmulatedDevice(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def card(kernels: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> EmulatedCard:
    return emulate(monkeypatch, kernels)


def test_logits_are_those_of_torch_with_the_same_roundings(
    model: Path, card: EmulatedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = load(open_model(model), device=card, max_seq_len=100, num_rows=2, uses_graphs=False)  # type: ignore[arg-type]
    reference = rounded_torch.load_rounded(monkeypatch, open_model(model), torch.bfloat16, 100)
    for length in (1, 7, 9, 65):  # each form of products
        assert relative_error(*(logits_of(runner, PROMPT[:length]) for runner in (ours, reference))) < 1e-3, length
    rows = [start(runner, PROMPT[:9], None) for runner in (ours, reference)]
    steps = [single_steps(runner, row, [5, 6]) for runner, row in zip((ours, reference), rows, strict=True)]
    assert max(relative_error(*pair) for pair in zip(*steps, strict=True)) < 1e-3


def test_a_row_has_the_same_bits_among_others(model: Path, card: EmulatedCard) -> None:
    options: dict[str, Any] = {"max_seq_len": 32, "num_rows": MANY_ROWS, "uses_graphs": False}
    runner = load(open_model(model), device=card, **options)  # type: ignore[arg-type]
    rows = [start(runner, PROMPT[row : row + 2 + row % 3]) for row in range(MANY_ROWS)]

    def bits_of(places: Sequence[int]) -> list[bytes]:
        step = runner.queue([Span(rows[place], (PROMPT[place],)) for place in places])
        bits = [step.logits(index).tobytes() for index in range(len(places))]
        step.choices()
        for place in places:
            runner.keep(rows[place], 2 + place % 3)
        return bits

    together = bits_of(range(MANY_ROWS))
    assert len(set(together)) == MANY_ROWS
    for places in ([32], [0], range(4, 12), range(9)):  # each form of products
        assert bits_of(places) == [together[place] for place in places]


@pytest.mark.parametrize(("write", "options"), [(write_gptq, {"desc_act": True, "group_size": 32}), (write_fp8, {})])
def test_inputs_in_an_order_and_scales_of_blocks(
    write: Any, options: dict[str, Any], card: EmulatedCard, tmp_path: Path
) -> None:
    """Few rows, and a prompt as an image: the logits of torch."""
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 160}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **sizes)
    folder = write(source, tmp_path / "model", **options)
    ours = load(open_model(folder), device=card, max_seq_len=32, num_rows=1, uses_graphs=False)  # type: ignore[arg-type]
    reference = load_by_torch(open_model(folder), max_seq_len=32)
    for length in (1, 9):
        assert relative_error(*(logits_of(runner, PROMPT[:length]) for runner in (ours, reference))) < 5e-3, length
