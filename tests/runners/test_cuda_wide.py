"""Prompts on cards whose products widen weights themselves, on a simulated card: launches and results."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_models import write_awq, write_fp8, write_gptq
from quantized import SCHEMES, SIZES, export
from row_steps import GREEDY, PROMPT, logits_of, relative_error
from safetensors.torch import load_file, save_file
from simulated_card import SimulatedDevice, fetch, simulate
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.kernels.attention_decode import LaneInputs
from llmcli.quantization.schemes import ExportOptions
from llmcli.runners.base import Runner, Span
from llmcli.runners.cuda.load.model import load as load_on_card
from llmcli.runners.cuda.step import attention
from llmcli.runners.cuda.step import products as row_products
from llmcli.runners.torch.load import load

TAILS = {**SIZES, "intermediate_size": 328, "num_hidden_layers": 2}  # which end within a tile, a step and a span


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    return simulate(monkeypatch)


@pytest.fixture
def launched(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets the kernel of every product of many tokens, and "append parts" if attention adds some up."""
    noted: list[str] = []

    def note(module: Any, stem: str) -> None:
        operation = getattr(module, stem)

        def call(device: Any, **arguments: Any) -> None:
            if isinstance(device, SimulatedDevice):
                noted.append(stem)
            operation(device, **arguments)

        monkeypatch.setattr(module, stem, call)

    for stem in ("stage_wide", "gemm_wide", "gemm_wide_swiglu"):
        note(row_products, stem)
    for module in (attention, row_products):
        note(module, "add_parts")
    append = attention.append_tokens

    def append_tokens(device: Any, lanes: LaneInputs, parts: Any = None, **queries: bool) -> None:
        if isinstance(device, SimulatedDevice) and parts is not None:
            noted.append("append parts")
        append(device, lanes, parts=parts, **queries)

    monkeypatch.setattr(attention, "append_tokens", append_tokens)
    for stem in ("gather_columns", "gather_image"):
        note(row_products, stem)
    return noted


def worst_error(
    folder: Path, device: SimulatedDevice, lengths: Sequence[int] = (65, 128, 129, 196), **options: Any
) -> float:
    """The worst relative error of logits after prompts, against torch."""
    reference = load(open_model(folder), max_seq_len=200)
    runner = load_on_card(
        open_model(folder),
        max_seq_len=200,
        dtype="float32",
        prefill_chunk=130,
        uses_graphs=False,
        device=device,  # type: ignore[arg-type]
        **options,
    )
    prompts = [PROMPT[:length] for length in lengths]
    return max(relative_error(logits_of(runner, one), logits_of(reference, one)) for one in prompts)


@pytest.mark.parametrize("name", ["int8 channel", "int4 channel", "int4 channel, asymmetric"])
def test_prompts_are_computed_as_by_torch(
    name: str, device: SimulatedDevice, launched: list[str], tmp_path: Path
) -> None:
    """With biases; each layer in four products, none of which has its weights widened in memory."""
    sizes = {**TAILS, "attention_bias": True, "mlp_bias": True}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **sizes)
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES[name]))
    assert worst_error(folder, device) < 1e-3
    layer = ["stage_wide", "gemm_wide"] * 2 + ["stage_wide", "gemm_wide_swiglu", "gemm_wide"]
    assert launched[:14] == 2 * layer


@pytest.mark.parametrize("name", ["int8 channel", "int4 channel, asymmetric"])
def test_short_prompts_are_computed_in_parts(
    name: str, device: SimulatedDevice, launched: list[str], tmp_path: Path
) -> None:
    """Prompts of 9 to 64 tokens. append_tokens adds the parts of qkv, the next layer those of down."""
    sizes = {**TAILS, "hidden_size": 320, "intermediate_size": 512, "attention_bias": True, "mlp_bias": True}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **sizes)
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES[name]))
    assert worst_error(folder, device, (9, 40, 64)) < 1e-3
    assert launched.count("append parts") == launched.count("gemm_wide_swiglu") > 3
    assert launched.count("add_parts") == 3  # after each last layer
    launched.clear()
    assert worst_error(folder, device, (8,)) < 1e-3
    assert set(launched) == {"stage_wide"}  # for gemv


def test_layer_by_layer_nothing_is_left(device: SimulatedDevice, launched: list[str], tmp_path: Path) -> None:
    """A request for each layer's states gets them all; the last layer's have the bits of a prompt's."""
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **TAILS)
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES["int8 channel"]))
    runner = load_on_card(open_model(folder), max_seq_len=200, uses_graphs=False, device=device)  # type: ignore[arg-type]
    prompt = PROMPT[:40]
    states = runner.hidden_states(Span(runner.open(prompt), tuple(prompt), "none"))
    assert launched.count("add_parts") == launched.count("gemm_wide_swiglu") > 0

    reference = load(open_model(folder), max_seq_len=200)
    row, expected = reference.open(prompt), []
    while (begin := reference.num_tokens(row)) < len(prompt):
        span = Span(row, tuple(prompt[begin : reference.span_end(row, len(prompt))]), "none")
        expected.append(reference.hidden_states(span))
    for of_layer, wanted in zip(states, np.concatenate(expected, axis=1), strict=True):
        assert relative_error(of_layer, wanted) < 1e-3

    again = runner.open(prompt)
    runner.keep(again, 0)
    runner.queue([Span(again, tuple(prompt), "none")])
    on_card: Any = runner._device
    assert np.array_equal(fetch(device, on_card._forward.hidden[: len(prompt)]), states[-1])


@pytest.mark.parametrize("name", ["int8 channel", "int4 channel", None])
def test_attention_that_makes_images(
    name: str | None, device: SimulatedDevice, launched: list[str], tmp_path: Path
) -> None:
    """Prompts side by side, whose tokens lie anywhere in an image. Attention rotates their queries."""
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 2}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **sizes)
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES[name])) if name else source
    reference = load(open_model(folder), max_seq_len=250)
    runner = load_on_card(
        open_model(folder),
        max_seq_len=250,
        num_rows=3,
        prefill_chunk=256,
        uses_graphs=False,
        device=device,  # type: ignore[arg-type]
    )
    prompts = [PROMPT[number : number + length] for number, length in enumerate((70, 80, 75))]
    rows = [runner.open(prompt) for prompt in prompts]
    step = runner.queue([Span(row, tuple(prompt), "none") for row, prompt in zip(rows, prompts, strict=True)])
    assert launched == 2 * ["stage_wide", "gemm_wide", "gemm_wide", "stage_wide", "gemm_wide_swiglu", "gemm_wide"]
    for number, prompt in enumerate(prompts):
        assert relative_error(step.logits(number)[-1], logits_of(reference, prompt)) < 2e-3


@pytest.mark.parametrize("head_dim", [32, 128])
def test_the_last_layer_runs_few_tokens(
    head_dim: int, device: SimulatedDevice, launched: list[str], tmp_path: Path
) -> None:
    """Only tokens whose logits may be read; others get keys and values. Bits equal those of a whole prompt."""
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": head_dim}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **sizes)
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES["int8 channel"]))

    def load_runner() -> Runner:
        return load_on_card(
            open_model(folder), max_seq_len=250, num_rows=3, prefill_chunk=256, uses_graphs=False, device=device
        )  # type: ignore[arg-type]

    prompts = [PROMPT[number : number + length] for number, length in enumerate((70, 80, 75))]
    runner, whole = load_runner(), load_runner()
    rows = [runner.open(prompt) for prompt in prompts]
    first_reads = (68, 80, 73)
    step = runner.queue(
        [
            Span(row, tuple(prompt), "none", logits_from=first)
            for row, prompt, first in zip(rows, prompts, first_reads, strict=True)
        ]
    )
    qkv, rest = ["stage_wide", "gemm_wide"], ["gemm_wide", "stage_wide", "gemm_wide_swiglu", "gemm_wide"]
    stages = [] if head_dim == 128 else ["stage_wide"]
    assert launched == 2 * [*qkv, *stages, *rest]
    logits = [step.logits(0, 68), step.logits(2, 73)]
    with pytest.raises(ValueError, match="ask for logits of this span from token 73 on, not from 72"):
        step.logits(2, 72)
    launched.clear()
    other = runner.open(PROMPT[100:200])
    runner.queue([Span(other, tuple(PROMPT[100:200]), "none", logits_from=100)])
    assert launched == [*qkv, *stages, *rest, *qkv]

    full = [whole.open(prompt) for prompt in prompts]
    step = whole.queue([Span(row, tuple(prompt), "none") for row, prompt in zip(full, prompts, strict=True)])
    assert np.array_equal(logits[0], step.logits(0, 68))
    assert np.array_equal(logits[1], step.logits(2, 73))
    prompt = PROMPT[10:90]
    state, same_state = (one.hidden_states(Span(one.open(prompt), tuple(prompt), "none")) for one in (runner, whole))
    assert np.array_equal(state, same_state)
    for row, same in zip(rows, full, strict=True):  # later tokens see all keys and values
        steps = [one.queue([Span(place, (7,), "none")]) for one, place in ((runner, row), (whole, same))]
        assert np.array_equal(*(step.logits(0) for step in steps))


def test_a_token_is_chosen_whatever_logits_are_read(device: SimulatedDevice, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES["int8 channel"]))
    runner = load_on_card(open_model(folder), max_seq_len=250, num_rows=2, uses_graphs=False, device=device)  # type: ignore[arg-type]
    prompt, chosen = PROMPT[:70], []
    for first in (0, 70):
        row = runner.open(prompt, GREEDY)
        runner.keep(row, 0)
        chosen.append(runner.queue([Span(row, tuple(prompt), "last", logits_from=first)]).choices())
        runner.close(row)
    assert chosen[0] == chosen[1]


def test_results_that_float16_cannot_hold(device: SimulatedDevice, launched: list[str], tmp_path: Path) -> None:
    """A few rows of up give results beyond 65504, which down takes over 16."""
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.float32, **TAILS)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("up_proj.weight"):
            tensor[::50] *= 5e4
        if name.endswith("down_proj.weight"):
            tensor[:, ::50] *= 1e-4
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES["int8 groups of 32"]))
    assert worst_error(folder, device) < 2e-3
    assert "gemm_wide_swiglu" in launched


@pytest.mark.parametrize(
    ("write", "options"),
    [
        (write_fp8, {"block": None, "suffix": "scale"}),
        (write_fp8, {"block": None, "suffix": "scale", "keep": "q_proj"}),  # a layer with one matrix of floats
        (write_fp8, {}),  # scales of blocks, which rows share
        (write_awq, {"group_size": 32}),
        (write_gptq, {"sym": False, "bits": 8, "desc_act": None}),
        (write_gptq, {"desc_act": True}),  # inputs in an order
    ],
)
def test_every_layer_takes_it(
    write: Callable[..., Path], options: dict[str, Any], device: SimulatedDevice, launched: list[str], tmp_path: Path
) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, attention_bias=True, **SIZES)
    assert worst_error(write(source, tmp_path / "model", **options), device) < 1e-3
    assert {"gemm_wide", "gemm_wide_swiglu"} <= set(launched)
    assert ("gather_image" in launched) == ("desc_act" in options and bool(options["desc_act"]))


def test_rows_in_an_order_have_the_same_bits_among_others(device: SimulatedDevice, tmp_path: Path) -> None:
    """Few are gathered as rows, many as an image."""
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **SIZES)
    folder = write_gptq(source, tmp_path / "model", desc_act=True)
    for length in (1, 9, 65):
        assert worst_error(folder, device, (length,)) < 1e-3, length
