"""The CUDA runner on a card: conformance, logits against torch, memory, graphs, rows, interrupts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conformance import RunnerConformance
from families import VARIANTS
from launched import launched_by
from prompt_cuts import CHUNK, CutAtPages
from quantized import SCHEMES, SIZES, export
from rounded_torch import load_rounded
from row_steps import GREEDY, PROMPT, WARM, go_on, logits_of, one, relative_error, run_prompt, single_steps, start
from side_by_side import check_changing_pages, check_comings_and_goings, check_rows_together, tell
from tiny_models import CONFIG, write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.errors import CheckpointError, UsageError
from llmcli.kernels.device import Device
from llmcli.kernels.registry import KERNELS
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.base import Runner, Span
from llmcli.runners.torch.load import load as load_on_cpu
from llmcli.sampling.chain import choose
from llmcli.sampling.params import Sampler

pytestmark = pytest.mark.cuda

# Kernels of quantize and of measuring, of larger heads and ordered inputs.
NOT_IN_RUNS = {
    "attention_prefill_wgmma",
    "gather_columns",
    "quantize_rows",
    "read_bandwidth",
}
# How far logits may be from those of torch with the same roundings.
ROUNDED_ERROR = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 2e-3}
LONG_TEXT = (PROMPT[:150], Sampler(WARM, seed=4), 50)


class OnCard(RunnerConformance):
    options: ClassVar[dict[str, Any]] = {}

    @classmethod
    def load(cls, folder: Path, *, max_seq_len: int, num_rows: int) -> Runner:
        from llmcli.runners.cuda.load.model import load

        model = open_model(folder)
        return load(model, max_seq_len=max_seq_len, num_rows=num_rows, prefill_chunk=CHUNK, **cls.options)


class TestCudaRunner(CutAtPages, OnCard):
    """In float32, the model's own type."""


class TestCudaRunnerInFloat16(CutAtPages, OnCard):
    tolerance = 1e-3  # a prompt's attention rounds queries and weights to float16, that of a lone token does not
    options: ClassVar[dict[str, Any]] = {"dtype": "float16"}


class TestCudaRunnerWithCodes(CutAtPages, OnCard):
    # Prefill rounds queries and weights to float16; an element here and there then goes to the next code, a step of
    # 0.8 % of its vector's largest. The cache as a whole costs up to 7e-3.
    tolerance = 3e-3
    options: ClassVar[dict[str, Any]] = {"kv_cache": "int8"}


def compare(ours: Runner, *references: Runner) -> list[float]:
    """The worst relative error against each reference: prompts in each form of products, then lone tokens."""
    worst = [0.0] * len(references)
    for length in (1, 5, 8, 9, 30, 64, 65, 150):
        prompt = PROMPT[:length]
        rows, found = [], []
        for runner in (ours, *references):
            rows.append(runner.open(prompt))
            runner.keep(rows[-1], 0)
            found.append(run_prompt(runner, rows[-1], prompt, choose="none"))
        for _ in range(4):
            logits, *expected = found
            errors = [relative_error(logits, reference) for reference in expected]
            worst = [max(pair) for pair in zip(worst, errors, strict=True)]
            token_id = int(logits.argmax())
            runners = zip((ours, *references), rows, strict=True)
            found = [single_steps(runner, row, [token_id])[0] for runner, row in runners]
        for runner, row in zip((ours, *references), rows, strict=True):
            runner.close(row)
    return worst


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_families(
    name: str, dtype: str, load_on_card: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, **VARIANTS[name])
    exact = load_on_cpu(open_model(folder), max_seq_len=400)
    ours = load_on_card(folder, dtype=dtype)
    error = relative_error(logits_of(ours, PROMPT[:150]), logits_of(exact, PROMPT[:150]))
    print(f"{name}, {dtype}: {error:.2e} from float32")
    reference = load_rounded(monkeypatch, open_model(folder), getattr(torch, dtype), 400)
    (error,) = compare(ours, reference)
    assert error < ROUNDED_ERROR[dtype]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_families_with_codes(
    name: str, dtype: str, load_on_card: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, **VARIANTS[name])
    plain, coded = (load_on_cpu(open_model(folder), max_seq_len=400, kv_cache=kind) for kind in ("auto", "int8"))
    cost = relative_error(logits_of(coded, PROMPT[:150]), logits_of(plain, PROMPT[:150]))
    ours = load_on_card(folder, dtype=dtype, kv_cache="int8")
    assert ours.cache_type == "int8"
    assert ours.description.endswith("KV cache int8")
    reference = load_rounded(monkeypatch, open_model(folder), getattr(torch, dtype), 400, "int8")
    (error,) = compare(ours, reference)
    print(f"{name}, {dtype}: {error:.2e} from torch, where the codes themselves cost {cost:.2e}")
    # A value near the middle of two codes may get either, which moves it by as much as rounding it to a code may. This
    # comes on top of what activations of that type may differ by without codes.
    assert error < ROUNDED_ERROR[dtype] + max(2e-3, cost)


@pytest.mark.parametrize("name", SCHEMES)
def test_quantized(
    name: str, load_on_card: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES[name]))
    ours = load_on_card(folder)
    assert ours.description.endswith("KV cache float16")
    reference = load_rounded(monkeypatch, open_model(folder), torch.bfloat16, 400)
    (error,) = compare(ours, reference)
    assert error < 2e-3


@pytest.mark.parametrize("skipped", ["up_proj", "q_proj", "down_proj"])
def test_layers_that_are_not_quantized(
    skipped: str, load_on_card: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**SIZES, "attention_bias": True, "mlp_bias": True}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **sizes)
    folder = export(source, tmp_path / "model", ExportOptions(WeightScheme(4, 64), skip=(skipped,)))
    assert compare(load_on_card(folder), load_on_cpu(open_model(folder), max_seq_len=400))[0] < 2e-3


@pytest.mark.parametrize("slot_bytes", [1, 5000])
def test_weights_that_arrive_in_pieces(
    slot_bytes: int, load_on_card: Callable[..., Any], int8_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_on_card(int8_model)
    monkeypatch.setattr("llmcli.runners.cuda.plan.staging.SLOT_BYTES", slot_bytes)
    pieces = load_on_card(int8_model)
    assert logits_of(pieces, PROMPT[:50]).tobytes() == logits_of(whole, PROMPT[:50]).tobytes()


def test_every_kernel_is_launched(card: Device, load_on_card: Callable[..., Any], tmp_path: Path) -> None:
    """Runs of all formats use every production kernel, and none that the registry does not know."""
    qwen = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES, **qwen)
    dtypes = ("float32", "float16", "bfloat16")
    formats: list[tuple[Path, dict[str, Any]]] = [(source, {"dtype": dtype}) for dtype in dtypes]
    for name, scheme in SCHEMES.items():
        formats.append((export(source, tmp_path / name.replace(" ", "-"), ExportOptions(scheme)), {}))
    skips = ExportOptions(WeightScheme(8, 64), skip=("q_proj", "layers.0.self_attn.o_proj"))
    formats.append((export(source, tmp_path / "skips", skips), {"dtype": "float32"}))
    launched = set()
    for folder, options in formats:
        card.noted = []
        try:
            runner = load_on_card(folder, uses_graphs=False, **options)
            runner.close(start(runner, PROMPT[:200]))
            row = start(runner, PROMPT[200:212])
            prefilled = {stem for stem, _ in launched_by(card)}
            card.noted.clear()
            go_on(runner, row, 3)
            decoded = {stem for stem, _ in launched_by(card)}
            card.noted.clear()
            runner.queue([Span(row, tuple(PROMPT[:5]), "none")])
            spanned = {stem for stem, _ in launched_by(card)}
        finally:
            card.noted = None
        assert {"attention_prefill", "append_tokens", "embedding"} <= prefilled, (folder, options)
        is_float, has_codes = options.get("dtype") == "float32", folder != source
        products = {"gemv", "gemv_float"} if is_float and has_codes else {"gemv_float" if is_float else "gemv"}
        staged = {"stage_wide"} if "gemv" in products else set()
        assert decoded == {"sample_token", "embedding", "attention_decode"} | products | staged, (folder, options)
        of_spans = {"append_tokens", "attention_decode"} if is_float else {"attention_span"}
        assert spanned == {"embedding"} | products | staged | of_spans, (folder, options)
        launched |= prefilled | decoded | spanned
    runner = load_on_card(tmp_path / "int8-groups-of-128", uses_graphs=False, num_rows=40)
    rows = [start(runner, PROMPT[row : row + 5]) for row in range(40)]
    card.noted = []
    runner.queue([Span(row) for row in rows]).choices()
    launched |= {stem for stem, _ in launched_by(card)}
    card.noted = None
    of_other_cards = {"gemm_mma"} if card.can_wgmma else {"gemm_narrow", "gemm_wide"}
    assert launched == KERNELS.keys() - NOT_IN_RUNS - of_other_cards


def test_ten_equal_runs(load_on_card: Callable[..., Any], int8_model: Path) -> None:
    runner = load_on_card(int8_model)
    results = {(tuple(told), bits) for told, bits in (tell(runner, *LONG_TEXT) for _ in range(10))}
    assert len(results) == 1


@pytest.mark.parametrize("num_rows", [3, 8, 9, 16, 40, 64, 200])
def test_rows_side_by_side_are_each_row_alone(
    num_rows: int, load_on_card: Callable[..., Any], int8_model: Path
) -> None:
    check_rows_together(load_on_card(int8_model, num_rows=num_rows), num_rows, 30)


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
@pytest.mark.parametrize("num_rows", [3, 11, 40])
def test_rows_that_come_and_go_change_no_token(
    num_rows: int, kv_cache: str, load_on_card: Callable[..., Any], int8_model: Path
) -> None:
    check_comings_and_goings(load_on_card(int8_model, num_rows=num_rows, kv_cache=kv_cache), 4 * num_rows, 30)


@pytest.mark.parametrize("options", [{}, {"kv_cache": "int8"}, {"dtype": "float32"}], ids=str)
def test_pages_that_change_in_every_step(
    options: dict[str, Any], load_on_card: Callable[..., Any], int8_model: Path
) -> None:
    check_changing_pages(load_on_card(int8_model, num_rows=3, **options), 100)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"])
def test_infinite_weights_are_refused_by_name(name: str, load_on_card: Callable[..., Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[7] = float("inf")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} in model.safetensors holds NaN or infinity"):
        load_on_card(folder)


def test_weights_beyond_the_type_asked_for_are_refused(load_on_card: Callable[..., Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][3, 3] = 1e5
    save_file(tensors, folder / "model.safetensors")
    load_on_card(folder)
    with pytest.raises(CheckpointError, match="lm_head.weight in model.safetensors holds values that float16 cannot"):
        load_on_card(folder, dtype="float16")


def test_a_sampler_that_leaves_no_token(load_on_card: Callable[..., Any], int8_model: Path) -> None:
    runner = load_on_card(int8_model)
    expected, _ = tell(runner, PROMPT[:20], GREEDY, 8)
    row = start(runner, PROMPT[:20], GREEDY)
    bans = Sampler(WARM, seed=1, logit_bias=dict.fromkeys(range(CONFIG["vocab_size"]), -np.inf))
    runner.set_sampler(row, bans)
    step = runner.queue([Span(row)])
    (found,) = step.choices()
    with pytest.raises(UsageError) as error:
        choose(step.logits(0)[0], [*PROMPT[:20], expected[0]], bans)
    assert str(found) == str(error.value)
    assert isinstance(found, UsageError)
    # The row goes on from its latest token, and from an earlier one.
    runner.set_sampler(row, GREEDY)
    first = one(runner, Span(row, (expected[1],))).token_id
    assert [first, *go_on(runner, row, 5)] == expected[2:]
    runner.keep(row, 20)
    first = one(runner, Span(row, (expected[0],))).token_id
    assert [first, *go_on(runner, row, 6)] == expected[1:]


def test_published_greedy_text(stories: Path, load_on_card: Callable[..., Any]) -> None:
    expected = json.loads((stories / "expected_greedy.json").read_text())["token_ids"]
    runner = load_on_card(stories, dtype="float32", max_seq_len=512)
    assert tell(runner, expected[:1], GREEDY, len(expected) - 1)[0] == expected[1:]


def test_published_text_in_bfloat16(stories: Path, load_on_card: Callable[..., Any]) -> None:
    """Weights of 8 bits give the same text for a while: the first difference is printed."""
    expected = json.loads((stories / "expected_greedy.json").read_text())["token_ids"]
    runner = load_on_card(stories, dtype="bfloat16", max_seq_len=512)
    found, _ = tell(runner, expected[:1], GREEDY, len(expected) - 1)
    pairs = zip(found, expected[1:], strict=True)
    first = next((index for index, (ours, theirs) in enumerate(pairs, start=1) if ours != theirs), len(expected))
    print(f"stories260K in bfloat16: the first {first} of {len(expected)} tokens are those published in float32")
    assert first > 5
