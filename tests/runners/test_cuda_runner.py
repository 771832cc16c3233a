"""The CUDA runner on a card: conformance, logits against torch, memory, graphs, rows, interrupts."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance import GREEDY, PROMPT, WARM, RunnerConformance, decode, prefill, relative_error
from families import VARIANTS
from quantized import SCHEMES, SIZES, export
from rounded_torch import load_rounded
from tiny_models import CONFIG, write_tiny_llama

from llmcli.checkpoint.export_options import ExportOptions
from llmcli.checkpoint.model import open_model
from llmcli.errors import CheckpointError, InsufficientMemoryError, UsageError
from llmcli.kernels.device import Device
from llmcli.kernels.registry import KERNELS
from llmcli.quantization.schemes import WeightScheme
from llmcli.runners.base import Runner
from llmcli.runners.torch.load import load as load_on_cpu
from llmcli.sampling.chain import choose
from llmcli.sampling.sampler import Sampler

pytestmark = pytest.mark.cuda

# Kernels of quantize and of measuring, and forms that the runner does without: they serve as yardsticks.
NOT_IN_RUNS = {"quantize_rows", "read_bandwidth", "row_reduce", "softmax"}
FIXTURES = Path(__file__).resolve().parents[2] / ".fixtures"


@pytest.fixture(scope="session")
def card() -> Device:
    return Device.open(0)


@pytest.fixture
def load_on_card(card: Device) -> Callable[..., Any]:
    from llmcli.runners.cuda.load import load

    def call(folder: Path, **options: Any) -> Any:
        return load(open_model(folder), device=card, **{"max_seq_len": 400, **options})

    return call


@pytest.fixture(scope="session")
def int8_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8")
    source = write_tiny_llama(folder / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    return export(source, folder / "model", ExportOptions(WeightScheme(8, 128)))


class TestCudaRunner(RunnerConformance):
    @classmethod
    def load(cls, folder: Path, *, max_seq_len: int, num_rows: int) -> Runner:
        from llmcli.runners.cuda.load import load

        return load(open_model(folder), max_seq_len=max_seq_len, num_rows=num_rows, prefill_chunk=128)


class TestCudaRunnerWithCodes(RunnerConformance):
    # Prefill rounds queries and weights to float16; an element here and there then goes to the next code, a step of
    # 0.8 % of its vector's largest. The cache as a whole costs up to 7e-3.
    tolerance = 3e-3

    @classmethod
    def load(cls, folder: Path, *, max_seq_len: int, num_rows: int) -> Runner:
        from llmcli.runners.cuda.load import load

        return load(open_model(folder), max_seq_len=max_seq_len, num_rows=num_rows, kv_cache="int8", prefill_chunk=128)


def compare(ours: Runner, *references: Runner) -> list[float]:
    """The worst relative error against each reference: prefills in each form of products, then lone tokens."""
    worst = [0.0] * len(references)
    for length in (1, 5, 8, 9, 30, 64, 65, 150):
        for runner in (ours, *references):
            runner.truncate(0, 0)
            prefill(runner, PROMPT[:length])
        for _ in range(4):
            logits = ours.logits(0)
            errors = [relative_error(logits, reference.logits(0)) for reference in references]
            worst = [max(pair) for pair in zip(worst, errors, strict=True)]
            token_ids = [*ours.token_ids(0), int(logits.argmax())]
            for runner in (ours, *references):
                prefill(runner, token_ids)
    return worst


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_families(
    name: str, dtype: str, load_on_card: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, **VARIANTS[name])
    exact = load_on_cpu(open_model(folder), max_seq_len=400)
    ours = load_on_card(folder, dtype=dtype)
    for runner in (exact, ours):
        prefill(runner, PROMPT[:150])
    print(f"{name}, {dtype}: {relative_error(ours.logits(0), exact.logits(0)):.2e} from float32")
    reference = load_rounded(monkeypatch, open_model(folder), getattr(torch, dtype), 400)
    (error,) = compare(ours, reference)
    assert error < {"float32": 1e-5, "float16": 1e-3, "bfloat16": 2e-3}[dtype]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_families_with_codes(
    name: str, dtype: str, load_on_card: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False, **VARIANTS[name])
    plain, coded = (load_on_cpu(open_model(folder), max_seq_len=400, kv_cache=kind) for kind in ("auto", "int8"))
    for runner in (plain, coded):
        prefill(runner, PROMPT[:150])
    cost = relative_error(coded.logits(0), plain.logits(0))
    ours = load_on_card(folder, dtype=dtype, kv_cache="int8")
    assert ours.cache_type == "int8"
    assert ours.description.endswith("KV cache int8")
    reference = load_rounded(monkeypatch, open_model(folder), getattr(torch, dtype), 400, "int8")
    (error,) = compare(ours, reference)
    print(f"{name}, {dtype}: {error:.2e} from torch, where the codes themselves cost {cost:.2e}")
    # A value near the middle of two codes may get either, which moves it by as much as rounding it to a code may.
    assert error < max(2e-3, cost)


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
    monkeypatch.setattr("llmcli.runners.cuda.staging.SLOT_BYTES", slot_bytes)
    pieces = load_on_card(int8_model)
    for runner in (whole, pieces):
        prefill(runner, PROMPT[:50])
    assert pieces.logits(0).tobytes() == whole.logits(0).tobytes()


def test_every_kernel_is_launched(card: Device, load_on_card: Callable[..., Any], tmp_path: Path) -> None:
    """No production kernel is left out of runs of all formats, and none runs that the registry does not know."""
    qwen = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES, **qwen)
    formats: list[tuple[Path, dict[str, Any]]] = [
        (source, {"dtype": dtype}) for dtype in ("float32", "float16", "bfloat16")
    ]
    for name, scheme in SCHEMES.items():
        formats.append((export(source, tmp_path / name.replace(" ", "-"), ExportOptions(scheme)), {}))
    launched = set()
    for folder, options in formats:
        card.trace = []
        try:
            runner = load_on_card(folder, uses_graphs=False, **options)
            for length in (200, 20):
                runner.truncate(0, 0)
                prefill(runner, PROMPT[:length])
            prefilled = {stem for stem, _ in card.trace}
            card.trace.clear()
            decode(runner, 3)
            decoded = {stem for stem, _ in card.trace}
        finally:
            card.trace = None
        assert {"rms_norm", "attention_prefill", "kv_append", "dequantize"} <= prefilled, (folder, options)
        assert decoded == {"sample_token", "embedding", "gemv", "attention_decode"}, (folder, options)
        launched |= prefilled | decoded
    assert launched == KERNELS.keys() - NOT_IN_RUNS


def test_ten_equal_runs(load_on_card: Callable[..., Any], int8_model: Path) -> None:
    runner = load_on_card(int8_model)
    results = set()
    for _ in range(10):
        runner.truncate(0, 0)
        prefill(runner, PROMPT[:150])
        results.add((tuple(decode(runner, 50, Sampler(WARM, seed=4))), runner.logits(0).tobytes()))
    assert len(results) == 1


@pytest.mark.parametrize("num_rows", [8, 11])
def test_rows_side_by_side_are_each_row_alone(
    num_rows: int, load_on_card: Callable[..., Any], int8_model: Path
) -> None:
    runner = load_on_card(int8_model, num_rows=num_rows)
    samplers = [Sampler(WARM, seed=3, sample_index=row) for row in range(num_rows)]
    prompts = [PROMPT[row : 3 * row + 20] for row in range(num_rows)]
    alone = []
    for prompt, sampler in zip(prompts, samplers, strict=True):
        runner.truncate(0, 0)
        prefill(runner, prompt)
        alone.append((decode(runner, 30, sampler), runner.logits(0).tobytes()))
    runner.truncate(0, 0)
    for row, prompt in enumerate(prompts):
        prefill(runner, prompt, row)
    steps = runner.decode(range(num_rows), samplers)
    tokens = [next(steps) for _ in range(30)]
    steps.close()
    together = [([step[row] for step in tokens], runner.logits(row).tobytes()) for row in range(num_rows)]
    assert together == alone


def used_bytes() -> int:
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


def test_nothing_is_allocated_after_load(load_on_card: Callable[..., Any], int8_model: Path) -> None:
    import cupy

    runner = load_on_card(int8_model, num_rows=2)

    def work() -> None:
        for row in range(2):
            prefill(runner, PROMPT[:300], row)
        steps = runner.decode([0, 1], [GREEDY, GREEDY])
        for _ in range(20):
            next(steps)
        steps.close()
        runner.truncate(0, 300)
        runner.copy_row(0, 1)
        decode(runner, 20)
        list(runner.score(1, PROMPT[:200], first=1))

    work()  # graphs are made by the first decode of so many rows
    pool = cupy.get_default_memory_pool()
    before = used_bytes(), pool.total_bytes()
    work()
    assert (used_bytes(), pool.total_bytes()) == before


def test_everything_is_freed_with_the_runner(load_on_card: Callable[..., Any], int8_model: Path) -> None:
    def use() -> None:
        runner = load_on_card(int8_model, max_seq_len=100_000)
        prefill(runner, PROMPT[:100])
        decode(runner, 5)

    use()
    before = used_bytes()
    use()
    assert used_bytes() == before


def test_a_load_that_fails_leaves_nothing(
    load_on_card: Callable[..., Any], int8_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_on_card(int8_model)
    before = used_bytes()
    with pytest.raises(InsufficientMemoryError, match="use --context"):
        load_on_card(int8_model, max_seq_len=2**33)
    # The plan can be wrong about what is free.
    monkeypatch.setattr("llmcli.runners.cuda.load.free_bytes", lambda: 2**60)
    with pytest.raises(InsufficientMemoryError, match="the card's memory is full"):
        load_on_card(int8_model, max_seq_len=2**31)

    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("llmcli.runners.cuda.load.DeviceSampler", fail)
    with pytest.raises(KeyboardInterrupt):
        load_on_card(int8_model)
    assert used_bytes() <= before


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
    prefill(runner, PROMPT[:20])
    bans = Sampler(WARM, seed=1, logit_bias=dict.fromkeys(range(CONFIG["vocab_size"]), -np.inf))
    with pytest.raises(UsageError) as expected:
        choose(runner.logits(0), runner.token_ids(0), bans)
    with pytest.raises(UsageError) as found:
        decode(runner, 1, bans)
    assert str(found.value) == str(expected.value)
    assert list(runner.token_ids(0)) == PROMPT[:20]
    assert decode(runner, 5) == decode_again(runner, 20, 5)


def decode_again(runner: Runner, num_tokens: int, count: int) -> list[int]:
    runner.truncate(0, num_tokens)
    return decode(runner, count)


@pytest.fixture
def stories(request: pytest.FixtureRequest) -> Path:
    folder = FIXTURES / "stories260K"
    return folder if folder.is_dir() else request.getfixturevalue("stories260k")


def test_published_greedy_text(stories: Path, load_on_card: Callable[..., Any]) -> None:
    expected = json.loads((stories / "expected_greedy.json").read_text())["token_ids"]
    runner = load_on_card(stories, dtype="float32", max_seq_len=512)
    prefill(runner, expected[:1])
    assert decode(runner, len(expected) - 1) == expected[1:]


def test_published_text_in_bfloat16(stories: Path, load_on_card: Callable[..., Any]) -> None:
    """Weights of 8 bits tell the same for a while: where they first part is printed."""
    expected = json.loads((stories / "expected_greedy.json").read_text())["token_ids"]
    runner = load_on_card(stories, dtype="bfloat16", max_seq_len=512)
    prefill(runner, expected[:1])
    found = decode(runner, len(expected) - 1)
    pairs = zip(found, expected[1:], strict=True)
    first = next((index for index, (ours, theirs) in enumerate(pairs, start=1) if ours != theirs), len(expected))
    print(f"stories260K in bfloat16: the first {first} of {len(expected)} tokens are those published in float32")
    assert first > 5
