"""On a card: memory is as planned, rates are those of a card, and a small shape is measured throughout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conformance import start
from launched import launched_by
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.kernels.device import Device
from llmcli.measure.bench import Bench, BenchOptions
from llmcli.runners.base import Span
from llmcli.runners.cuda.load.model import load
from llmcli.runners.cuda.plan.memory import RESERVED_BYTES, fit_memory
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.predict.dry_run import DryModel
from llmcli.runners.cuda.predict.predictor import CardPredictor
from llmcli.runners.cuda.predict.rates import measure_rates
from llmcli.runners.cuda.step.arena import free_bytes

pytestmark = [pytest.mark.cuda, pytest.mark.whole_card]

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "max_position_embeddings": 16384}


@pytest.fixture(scope="module")
def device() -> Device:
    device = Device.open(0)
    device.activate()
    return device


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "model"
    return write_tiny_llama(folder, with_tokenizer=False, dtype=torch.bfloat16, **SIZES)


def test_a_plan_is_what_loading_takes(device: Device, model: Path) -> None:
    load(open_model(model), max_seq_len=64, device=device)  # CUDA's own memory is allocated by now
    before = free_bytes()
    plan = fit_memory(
        StoredModel.of_model(open_model(model)),
        "model",
        max_seq_len=16384,
        num_rows=4,
        available=before,
        card=device.facts,
    )
    runner = load(open_model(model), max_seq_len=16384, num_rows=4, device=device)
    taken = before - free_bytes()
    planned = plan.total_bytes - RESERVED_BYTES
    rounding = 4 * 2**21  # allocations come in pages of 2 MiB
    assert planned <= taken + rounding
    assert taken <= plan.total_bytes
    assert (runner.limits.num_rows, runner.limits.num_pages) == (4, plan.num_pages)


def test_rates_are_steady_and_possible(device: Device) -> None:
    before = free_bytes()
    first, second = (measure_rates(device, ["float16", "bfloat16", "float32"]) for _ in range(2))
    assert 5e10 < first.read_bytes < 2e13
    assert second.read_bytes == pytest.approx(first.read_bytes, rel=0.05)
    assert first.flops["float32"] < first.flops["float16"]
    assert first.flops["bfloat16"] == pytest.approx(first.flops["float16"], rel=0.3)
    assert free_bytes() >= before - 64 * 2**20


@pytest.mark.parametrize("num_rows", [1, 8])
def test_kernels_of_a_step_are_those_of_a_dry_run(device: Device, model: Path, num_rows: int) -> None:
    plan = fit_memory(
        StoredModel.of_model(open_model(model)), "model", max_seq_len=64, num_rows=num_rows, available=free_bytes()
    )
    runner = load(open_model(model), max_seq_len=64, num_rows=num_rows, device=device, uses_graphs=False)
    rows = [start(runner, [1, 2, 3]) for _ in range(num_rows)]
    runner.queue([Span(row) for row in rows]).choices()
    device.noted = []
    runner.queue([Span(row) for row in rows])
    expected = [
        (one.launch.stem, one.launch.name)
        for one in DryModel(plan, device.facts).step(num_rows, 3)
        for _ in range(one.count)
    ]
    assert sorted(launched_by(device)) == sorted(expected)
    device.noted = None


def test_bench_of_a_runner(device: Device, model: Path) -> None:
    rates = measure_rates(device, ["bfloat16"])
    plan = fit_memory(
        StoredModel.of_model(open_model(model)), "model", max_seq_len=2200, num_rows=2, available=free_bytes()
    )
    runner = load(open_model(model), max_seq_len=2200, num_rows=2, device=device)
    options = BenchOptions((100, 2048), (100, 2048), 2, 32, 3)
    bench = Bench(runner, CardPredictor(plan, rates, device.facts), options)
    assert bench.check_tokens() == 32
    short, long = (bench.measure_prompt(length)[0] for length in options.prompts)
    assert short.seconds.median < long.seconds.median <= long.first_token_seconds.median
    for depth in options.depths:
        (figures,) = bench.measure_decode(depth)
        assert figures.tokens_per_second > 100
        assert figures.step_seconds.num_runs == 3


def test_a_shape_through_the_command_line(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "llmcli", "bench", "Qwen2.5-0.5B", "--format", "int8", "--scratch", str(tmp_path))
    arguments = ("--prompt", "128", "--tokens", "32", "--repeats", "3", "--device", "cuda", "--json")
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, cwd=root)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    (figures,) = facts["decode"]
    assert 0 < figures["floor_share"] < 1
    assert figures["tokens_per_second"] < figures["num_rows"] / (
        figures["bytes_per_step"] / facts["read_bytes_per_second"]
    )
    assert list(tmp_path.iterdir()) == []
