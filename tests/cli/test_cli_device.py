"""Which device a command uses, and its message if the requested one is not usable."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from results import Result
from tiny_models import write_tiny_llama

from llmcli.checkpoint.random_weights import shape_model
from llmcli.cli import device_choice, lazy
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.device_targets import CardTarget
from llmcli.cli.output.base import decode_wall_seconds
from llmcli.cli.targets import open_target
from llmcli.engine.request import Timings
from llmcli.errors import DeviceError, UsageError
from llmcli.kernels import device
from llmcli.kernels.card_facts import TYPICAL_CARD
from llmcli.kernels.environment import Card, Driver
from llmcli.measure.subject import Subject
from llmcli.runners.cuda.memory import PREFILL_CHUNKS, plan_memory
from llmcli.runners.cuda.pricing import Rates
from llmcli.runners.cuda.stored import StoredModel
from llmcli.runners.host.memory import SMALL_PARAMETERS

OLD_CARD = Card(0, "Old Card", (7, 5), 8 * 2**30)
NEW_CARD = Card(1, "New Card", (9, 0), 80 * 2**30)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Driver | None], None]:
    """A machine with this driver, where CuPy works."""

    def become(driver: Driver | None) -> None:
        monkeypatch.setattr(device_choice, "find_driver", lambda: driver)
        monkeypatch.setattr(device.environment, "find_driver", lambda: driver)
        monkeypatch.setattr(device.environment, "cupy_distributions", lambda: {"cupy-cuda12x": "14.2.0"})
        monkeypatch.setattr(device, "_import_problem", lambda: None)

    return become


def test_auto_takes_the_first_card(machine: Callable[[Driver | None], None]) -> None:
    machine(Driver((13, 0), (NEW_CARD,)))
    assert RunnerOptions("auto", "auto", None).card == 0
    assert RunnerOptions("auto", "auto", None).note == ""
    assert RunnerOptions("cpu", "auto", None).card is None


def test_a_card_is_chosen_by_number(machine: Callable[[Driver | None], None]) -> None:
    machine(Driver((13, 0), (NEW_CARD, NEW_CARD)))
    assert RunnerOptions("cuda", "auto", None).card == 0
    assert RunnerOptions("cuda:1", "bfloat16", None).card == 1
    with pytest.raises(DeviceError, match=r"--device cuda:2: there is no card 2, .* 0 to 1; use --device cpu"):
        RunnerOptions("cuda:2", "auto", None)


def test_cuda_without_a_driver_exits_4(llmcli: Callable[..., Result], tiny_llama: Path) -> None:
    result = llmcli("generate", "Hi", "-m", tiny_llama, "--device", "cuda")
    result.expect_error(4, "--device cuda: there is no NVIDIA driver; use --device cpu")


def test_a_card_that_is_too_old_is_named(
    machine: Callable[[Driver | None], None], llmcli: Callable[..., Result], tiny_llama: Path
) -> None:
    machine(Driver((13, 0), (OLD_CARD,)))
    arguments = ("generate", "Hi", "-m", tiny_llama, "--max-new-tokens", 1, "--seed", 1)
    llmcli(*arguments, "--device", "cuda").expect_error(4, "--device cuda: card 0, Old Card,", "use --device cpu")
    first, second = llmcli(*arguments).stderr.splitlines()
    assert first.startswith("warning: running on the CPU: card 0, Old Card, has compute capability 7.5")
    assert second.startswith("tiny-llama: CPU, float32")
    assert "driver" not in second
    assert llmcli(*arguments, "--device", "cpu").stderr.count("\n") == 1


def test_two_models_warn_once(
    machine: Callable[[Driver | None], None], llmcli: Callable[..., Result], tiny_llama: Path
) -> None:
    machine(Driver((13, 0), ()))
    result = llmcli("diff", tiny_llama, tiny_llama, "Hi", "--max-new-tokens", 1)
    assert result.stderr.count("warning: running on the CPU: the NVIDIA driver sees no card") == 1


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda0", "cpu:0", ""])
def test_names_that_are_no_device(name: str) -> None:
    with pytest.raises(UsageError, match="expected auto, cpu, cuda or cuda:N"):
        RunnerOptions(name, "auto", None)


def test_the_kv_cache_is_usual_or_int8(llmcli: Callable[..., Result], tiny_llama: Path) -> None:
    arguments = ("generate", "Hi", "-m", tiny_llama, "--max-new-tokens", 2, "--seed", 1, "--stats", "--kv-cache")
    llmcli(*arguments, "int4").expect_error(2, "--kv-cache is 'int4', expected auto or int8")
    for choice, cache_type, shown in (("auto", "float32", "CPU, float32, "), ("int8", "int8", "KV cache int8")):
        stderr = llmcli(*arguments, choice).stderr
        assert shown in stderr.splitlines()[0]
        assert any(line.split() == ["KV", "cache", cache_type] for line in stderr.splitlines())


def test_float16_needs_a_card(llmcli: Callable[..., Result], tiny_llama: Path) -> None:
    arguments = ("generate", "Hi", "-m", tiny_llama, "--dtype", "float16")
    llmcli(*arguments, "--device", "cpu").expect_error(2, "--dtype float16 is for CUDA", "float32 or bfloat16")
    llmcli(*arguments).expect_error(2, "--dtype float16 is for CUDA, and there is no NVIDIA driver")


def timings(first_token: float, decode_seconds: float) -> Timings:
    return Timings(10, 0.1, first_token, 50, decode_seconds)


def test_time_that_samples_share_counts_once() -> None:
    assert decode_wall_seconds([timings(1.0, 2.0)]) == pytest.approx(2.0)
    assert decode_wall_seconds([timings(1.0, 2.0), timings(1.0, 3.0), timings(1.5, 1.0)]) == pytest.approx(3.0)
    assert decode_wall_seconds([timings(5.0, 2.0), timings(1.0, 3.0)]) == pytest.approx(5.0)
    assert decode_wall_seconds([]) == 0


def test_the_cpu_runs_small_models_with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    least = SMALL_PARAMETERS
    for num_parameters, options, expected in (
        (least - 1, RunnerOptions("cpu", "auto", None), True),
        (least - 1, RunnerOptions("cpu", "auto", 1), True),
        (least, RunnerOptions("cpu", "auto", None), False),
        (1000, RunnerOptions("cpu", "float32", None), False),
        (1000, RunnerOptions("cpu", "bfloat16", None), False),
        (1000, RunnerOptions("cpu", "auto", 2), False),
        (1000, RunnerOptions("cpu", "auto", None, "int8"), False),
    ):
        monkeypatch.setattr("llmcli.checkpoint.model.num_parameters", lambda model, count=num_parameters: count)
        assert options.runs_on_numpy(None) == expected, (num_parameters, options)  # type: ignore[arg-type]


@pytest.fixture
def hopper(machine: Callable[[Driver | None], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a typical card, as far as plans need it."""
    machine(Driver((13, 0), (NEW_CARD, NEW_CARD)))
    card = SimpleNamespace(name="Card", index=0, facts=TYPICAL_CARD)
    rates = Rates(4.5e12, {"float16": 7e14, "bfloat16": 7e14, "float32": 5e13})
    monkeypatch.setattr(lazy, "Device", SimpleNamespace(open=lambda index: card), raising=False)
    monkeypatch.setattr(lazy, "measure_rates", lambda device, types: rates, raising=False)
    monkeypatch.setattr(lazy, "free_bytes", lambda: 80 * 2**30, raising=False)
    monkeypatch.setattr(lazy, "open_meter", lambda card: "no meter", raising=False)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("flags", [(), ("--speed-first",)])
@pytest.mark.parametrize("command", ["batch", "serve", "bench"])
def test_speed_first_reaches_the_card(
    llmcli: Callable[..., Result],
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    flags: tuple[str, ...],
) -> None:
    asked: list[bool] = []

    def load(*arguments: Any, speed_first: bool, **options: Any) -> None:
        asked.append(speed_first)
        raise DeviceError("as far as this")

    monkeypatch.setattr(lazy, "load_on_card", load, raising=False)
    monkeypatch.setattr(lazy, "Server", lambda listener, work: nullcontext(), raising=False)
    (tmp_path / "in").write_text("Hi\n")
    arguments = {"batch": ("--text", tmp_path / "in", tmp_path / "out"), "serve": ("--port", 0), "bench": ()}[command]
    llmcli(command, *arguments, "-m", tiny_llama, "--quiet", *flags).expect_error(4, "as far as this")
    assert asked == [bool(flags)]


@pytest.mark.usefixtures("hopper")
def test_speed_first_makes_many_rows_faster_in_a_plan(llmcli: Callable[..., Result], tiny_llama: Path) -> None:
    def rate(*arguments: object) -> float:
        plan = json.loads(llmcli("plan", *arguments, "--context", 300, "--json").stdout)
        rate: float = plan["decode"][0]["tokens_per_second"]
        return rate

    shape = ("Llama-3.1-8B", "--rows")
    assert rate(*shape, 256, "--speed-first") > 1.3 * rate(*shape, 256)
    for num_rows in (16, 64):
        assert rate(*shape, num_rows, "--speed-first") > rate(*shape, num_rows)
    assert rate(*shape, 8, "--speed-first") == rate(*shape, 8)
    # gemm_wide takes no scales of blocks.
    assert rate(*shape, 256, "--format", "fp8", "--speed-first") == rate(*shape, 256, "--format", "fp8")
    assert llmcli("plan", tiny_llama, "--rows", 100, "--device", "cpu", "--speed-first").exit_code == 0


def test_a_plan_of_many_rows_needs_no_more_memory_where_speed_comes_first() -> None:
    subject = Subject("shape", shape_model("Llama-3.1-8B", "int8"), "int8")
    stored = StoredModel.of_model(subject.model)
    exact = plan_memory(stored, max_seq_len=512, num_rows=256, chunk_tokens=PREFILL_CHUNKS[-1]).total_bytes
    rates = Rates(4.5e12, {"float16": 7e14, "bfloat16": 7e14})
    for speed_first in (False, True):
        card = CardTarget("card", "auto", "auto", rates, exact, speed_first=speed_first)
        assert card.plan(subject, context=16, num_rows=256).memory.largest_context == 512
        assert card.plan(subject, context=512, num_rows=None).num_rows == 256


@pytest.mark.parametrize("command", ["generate", "chat", "eval"])
def test_commands_of_few_rows_have_no_speed_first(llmcli: Callable[..., Result], command: str) -> None:
    llmcli(command, "--speed-first").expect_error(2, "no such option: --speed-first")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_speed_first_is_told_and_kept_where_it_acts(
    llmcli: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """On a simulated card, which multiplies prompts of 16-bit weights by gemm_wide, and float32 ones otherwise."""
    pytest.importorskip("cupy")
    from simulated_card import simulate

    from llmcli.runners.cuda.load import load

    simulated = simulate(monkeypatch)

    def load_here(*arguments: Any, device: Any, card: int, **options: Any) -> Any:
        return load(*arguments, device=simulated, uses_graphs=False, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(lazy, "load_on_card", load_here, raising=False)
    model = write_tiny_llama(tmp_path / "model", dtype=dtype, hidden_size=128, intermediate_size=256)
    acts, flag = dtype == torch.bfloat16, "--speed-first"
    (tmp_path / "in").write_text("Hi\nYes\n")
    run = ("batch", "--text", tmp_path / "in", tmp_path / "out", "-m", model, "--seed", 1, "--max-new-tokens", 3)

    assert (", speed first, context" in llmcli(*run, flag).stderr) == acts
    first, _ = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    (tmp_path / "out").write_bytes(first)
    if acts:
        told = llmcli(*run, "--quiet")
        told.expect_error(2, "KV cache float16, speed first', now 'Simulated Card (cuda:0), ", "KV cache float16'")
    resumed = llmcli(*run, *((flag,) if acts else ()))
    assert "Resumed: 1 of 2 prompts are done" in resumed.stderr
    assert "holds all 2 results" in resumed.stderr

    bench = ("bench", model, "--rows", 2, "--prompt", 20, "--tokens", 4, "--repeats", 1)
    # The simulated launchers do not take part in a plan's dry run.
    here = RunnerOptions("cpu", "auto", None)
    monkeypatch.setattr("llmcli.cli.bench.open_target", lambda options, subject: open_target(here, subject))
    assert json.loads(llmcli(*bench, flag, "--json").stdout)["speed_first"] is False  # it does nothing to two rows
    monkeypatch.setattr("llmcli.runners.cuda.wide_layer.MOST_EXACT_ROWS", 1)
    assert json.loads(llmcli(*bench, flag, "--json").stdout)["speed_first"] == acts
    like = "in two equal runs" if acts else "as generate's"
    assert f"checked           4 tokens, the same {like}" in llmcli(*bench, flag).stdout
    assert "4 tokens, the same as generate's" in llmcli(*bench).stdout
