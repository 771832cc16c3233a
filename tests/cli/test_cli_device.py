"""Which device a command uses, and its message if the requested one is not usable."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from results import Llmcli

from llmcli.checkpoint.random_weights import shape_model
from llmcli.cli import device_choice
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.device_targets import CardTarget
from llmcli.cli.output.base import decode_wall_seconds
from llmcli.engine.request import Timings
from llmcli.errors import DeviceError, UsageError
from llmcli.kernels import device
from llmcli.kernels.environment import Card, Driver
from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.measure.subject import Subject
from llmcli.runners.cuda.plan.memory import PREFILL_CHUNKS, plan_memory
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.predict.predictor import Rates
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


def test_a_card_that_is_too_old_is_named(
    machine: Callable[[Driver | None], None], llmcli: Llmcli, tiny_llama: Path
) -> None:
    machine(Driver((13, 0), (OLD_CARD,)))
    arguments = ("generate", "Hi", "-m", tiny_llama, "--max-new-tokens", 1, "--seed", 1)
    llmcli(*arguments, "--device", "cuda").expect_error(4, "--device cuda: card 0, Old Card,", "use --device cpu")
    first, second = llmcli(*arguments).stderr.splitlines()
    assert first.startswith("warning: running on the CPU: card 0, Old Card, has compute capability 7.5")
    assert second.startswith("tiny-llama: CPU, float32")
    assert "driver" not in second
    assert llmcli(*arguments, "--device", "cpu").stderr.count("\n") == 1


def test_two_models_warn_once(machine: Callable[[Driver | None], None], llmcli: Llmcli, tiny_llama: Path) -> None:
    machine(Driver((13, 0), ()))
    result = llmcli("diff", tiny_llama, tiny_llama, "Hi", "--max-new-tokens", 1)
    assert result.stderr.count("warning: running on the CPU: the NVIDIA driver sees no card") == 1


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda0", "cpu:0", ""])
def test_names_that_are_no_device(name: str) -> None:
    with pytest.raises(UsageError, match="expected auto, cpu, cuda or cuda:N"):
        RunnerOptions(name, "auto", None)


def test_the_kv_cache_is_usual_or_int8(llmcli: Llmcli, tiny_llama: Path) -> None:
    arguments = ("generate", "Hi", "-m", tiny_llama, "--max-new-tokens", 2, "--seed", 1, "--stats", "--kv-cache")
    llmcli(*arguments, "int4").expect_error(2, "--kv-cache is 'int4', expected auto or int8")
    for choice, cache_type, shown in (("auto", "float32", "CPU, float32, "), ("int8", "int8", "KV cache int8")):
        stderr = llmcli(*arguments, choice).stderr
        assert shown in stderr.splitlines()[0]
        assert any(line.split() == ["KV", "cache", cache_type] for line in stderr.splitlines())


def test_float16_needs_a_card(llmcli: Llmcli, tiny_llama: Path) -> None:
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
    monkeypatch.setattr("llmcli.kernels.device.Device.open", lambda index: card)
    monkeypatch.setattr("llmcli.runners.cuda.predict.rates.measure_rates", lambda device, types: rates)
    monkeypatch.setattr("llmcli.runners.cuda.step.arena.free_bytes", lambda: 80 * 2**30)
    monkeypatch.setattr("llmcli.measure.energy.open_meter", lambda card: "no meter")


@pytest.mark.usefixtures("hopper")
def test_more_rows_make_more_tokens_in_a_plan_for_the_card_here(llmcli: Llmcli) -> None:
    def rate(num_rows: int) -> float:
        plan = json.loads(llmcli("plan", "Llama-3.1-8B", "--rows", num_rows, "--context", 300, "--json").stdout)
        rate: float = plan["decode"][0]["tokens_per_second"]
        return rate

    rates = [rate(num_rows) for num_rows in (1, 8, 16, 64, 256)]
    assert rates == sorted(rates)
    assert rates[-1] > 6 * rates[1]  # weights are read once for all rows


def test_a_plan_takes_the_rows_and_the_context_that_fit() -> None:
    subject = Subject("shape", shape_model("Llama-3.1-8B", "int8"), "int8")
    stored = StoredModel.of_model(subject.model)
    memory = plan_memory(stored, max_seq_len=512, num_rows=256, chunk_tokens=PREFILL_CHUNKS[-1]).total_bytes
    card = CardTarget("card", "auto", "auto", Rates(4.5e12, {"float16": 7e14}), memory)
    assert card.plan(subject, context=16, num_rows=256).memory.largest_context == 512
    assert card.plan(subject, context=512, num_rows=None).num_rows == 256
