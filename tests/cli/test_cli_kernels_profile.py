"""`llmcli kernels profile` with a program in place of Nsight Compute, and with the real one on a card."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docs_schemas import check_docs_schema
from fake_ncu import STALL, VALUES, FakeNcu
from results import Llmcli

from llmcli.checkpoint.model import open_model
from llmcli.cli import kernels_bench
from llmcli.cli.kernels_bench import Profiled, limit_text, profile_text
from llmcli.kernels.compiler import KernelResources
from llmcli.kernels.launches import Launch
from llmcli.kernels.spec import KernelCost
from llmcli.lab import nsight
from llmcli.lab.nsight import Counters, metrics_for
from llmcli.lab.occupancy import Occupancy
from llmcli.lab.profile import RungRequest, StepRequest, read_request
from llmcli.lab.roofline import Ceilings
from llmcli.lab.walk import Call, KernelUse, card_of, walk_model

CEILINGS = Ceilings(4e12, {"float32": 50e12, "float16": 500e12})
COUNTERS = Counters(5, 10e-6, 30e6, 2e6, 0.8, 0.3, 0.2, 0.01, 0.02, 0.24, 0.19, {"barrier": 0.4, "wait": 0.01})
USE = KernelUse("gemv<1>", 132, 512, 0, KernelResources(100, 0, 0, 0, 0), Occupancy(1, 16, 0.25, ("registers",)))
CALL = Call(Launch("gemv", "gemv<1>", (1,), 32, ()), "o_proj", KernelCost(20_000_000, 0, 0), (0,), USE)
PROFILED = Profiled("gemv", "1B", "A step", {}, CALL, "a card", "sm_90", 132, CEILINGS, COUNTERS, "memory")


@pytest.fixture
def card(ncu: FakeNcu, monkeypatch: pytest.MonkeyPatch) -> FakeNcu:
    """A card that reads 4 TB/s, and its profiler."""
    device = SimpleNamespace(name="A Card", arch="sm_90", num_multiprocessors=132, facts=card_of("sm_90"))
    rates = SimpleNamespace(read_bytes=CEILINGS.read_bytes, flops=CEILINGS.flops)
    monkeypatch.setattr(kernels_bench, "open_card", lambda: device)
    monkeypatch.setattr("llmcli.runners.cuda.predict.rates.measure_rates", lambda device, types: rates)
    return ncu


def request_of(ncu: FakeNcu) -> Any:
    """The request to the last run's process."""
    return read_request(ncu.calls[-1][-1])


@pytest.mark.usefixtures("nvrtc")
def test_a_kernel_as_a_user_profiles_it(llmcli: Llmcli, card: FakeNcu) -> None:
    result = llmcli("kernels", "profile", "gemv", "-m", "storyteller", "--rows", 2, "--depth", 300)
    assert result.exit_code == 0, result.stderr
    assert f"profiling gemv with {card.path}" in result.stderr
    text = result.stdout
    assert re.search(r"^storyteller on A Card, sm_90, 132 multiprocessors$", text, re.MULTILINE)
    assert re.search(
        r"^A step of decoding of 2 rows at depth 300: gemv on [a-z_ ]+, launches: \d+$", text, re.MULTILINE
    )
    for figure, value in (
        ("duration", "9.31 us"),
        ("memory traffic", "32.5 MiB"),
        ("memory throughput", "78.2%"),
        ("L2 throughput", "31.2%"),
        ("compute throughput", "40.2%"),
        ("L1 hit rate", "1.2%"),
        ("L2 hit rate", "3.0%"),
        ("issuing", "19.0%"),
        ("stall: long scoreboard", "60.0%"),
        ("stall: barrier", "20.0%"),
    ):
        assert re.search(rf"^{figure} +{re.escape(value)}  \S.{{20,}}$", text, re.MULTILINE), figure
    assert re.search(r"^achieved occupancy +24.2% of \d+.\d%  ", text, re.MULTILINE)
    assert text.splitlines()[-1].startswith("Limited by memory: it is busy at 78.2% of its peak")
    asked = request_of(card)
    assert isinstance(asked, StepRequest)
    assert (asked.lengths.rows, asked.lengths.depth, asked.step) == (2, 300, 0)
    model = open_model(Path(asked.folder))
    call = walk_model(model, asked.lengths, card_of("sm_90"), "sm_90")[asked.step].calls[asked.call]
    assert call.launch.stem == "gemv"
    assert f": gemv on {call.matrix}, launches: {len(call.places)}\n{call.name}\n" in text


@pytest.mark.usefixtures("nvrtc")
def test_a_rung_as_a_user_profiles_it(llmcli: Llmcli, card: FakeNcu) -> None:
    text = llmcli("kernels", "profile", "rmsnorm/packed").stdout
    assert text.startswith("Study rmsnorm on A Card, ")
    assert "\nRung packed, num_rows 1, num_columns 16,384\nby_four\n" in text
    assert request_of(card) == RungRequest("rmsnorm", "packed")
    told = json.loads(llmcli("kernels", "profile", "rmsnorm/packed", "--json").stdout)
    check_docs_schema("kernels-profile", told)
    assert (told["study"], told["rung"], told["kernel"]) == ("rmsnorm", "packed", "rmsnorm/packed")
    assert told["sizes"] == {"num_rows": 1, "num_columns": 16384}
    assert told["bytes"] == 4 * (3 * 16384 + 1)  # x and weight; out and the row's scale
    assert told["least_seconds"] == pytest.approx(told["bytes"] / 4e12)


@pytest.mark.usefixtures("nvrtc")
def test_json_and_csv(llmcli: Llmcli, card: FakeNcu) -> None:
    card.write(values={name: values for name, values in VALUES.items() if not name.startswith("dram")})
    told = json.loads(llmcli("kernels", "profile", "gemv", "-m", "storyteller", "--json").stdout)
    check_docs_schema("kernels-profile", told)
    assert (told["model"], told["kernel"], told["arch"], told["profiled_launches"]) == (
        "storyteller",
        "gemv",
        "sm_90",
        3,
    )
    assert told["use"]["threads"] == 128  # four warps: a tile of qkv has two chunks
    assert told["figures"]["seconds"] == pytest.approx(9.312e-6)
    assert told["figures"]["read_bytes"] is None
    assert told["figures"]["memory_throughput"] is None
    assert told["stalls"]["long_scoreboard"] == pytest.approx(0.6)
    assert told["limit"] in ("blocks", "occupancy", "latency")
    text = llmcli("kernels", "profile", "gemv", "-m", "storyteller", "--csv").stdout
    rows = {row["figure"]: row["value"] for row in csv.DictReader(io.StringIO(text))}
    assert float(rows["stall_barrier"]) == pytest.approx(0.2)
    assert rows["read_bytes"] == ""
    assert rows.keys() == told["figures"].keys() | {f"stall_{name}" for name in told["stalls"]}


@pytest.mark.usefixtures("nvrtc")
def test_a_table_without_any_known_metric_still_stands(llmcli: Llmcli, card: FakeNcu) -> None:
    card.write(values={}, units={})
    result = llmcli("kernels", "profile", "gemv", "-m", "storyteller")
    assert result.exit_code == 0
    assert re.search(r"^duration +-  ", result.stdout, re.MULTILINE)
    assert result.stdout.endswith("counts too little on this card to name what limits the kernel.\n")


@pytest.mark.usefixtures("nvrtc", "card")
@pytest.mark.parametrize(
    ("does", "parts"),
    [
        ("permission", ("ERR_NVGPUCTRPERM", "--cap-add=SYS_ADMIN", "sudo")),
        ("crash", ("exit code 1", "card's memory is full")),
        ("killed", ("signal 9",)),
        ("garbage", ("counted nothing",)),
    ],
)
def test_a_profiler_that_fails(llmcli: Llmcli, card: FakeNcu, does: str, parts: tuple[str, ...]) -> None:
    card.write(does)
    llmcli("kernels", "profile", "rmsnorm/packed", "-q").expect_error(4, *parts)


@pytest.mark.usefixtures("card")
def test_without_the_profiler_the_way_to_it_is_named(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise nsight.DeviceError(nsight.HOW_TO_GET)

    monkeypatch.setattr("llmcli.lab.nsight.find_ncu", refuse)
    for name in ("gemv", "rmsnorm/packed"):
        llmcli("kernels", "profile", name).expect_error(4, "Nsight Compute (ncu) is not installed", "kernels bench")


def test_without_a_card_the_way_out_is_named(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.kernels.device.find_problem", lambda: "there is no card")
    for name in ("gemv", "rmsnorm/packed"):
        llmcli("kernels", "profile", name).expect_error(4, "there is no card", "kernels list")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nothing",), "no kernel 'nothing'; run llmcli kernels list"),
        (("rmsnorm",), "rmsnorm/packed"),
        (("layernorm",), "layernorm is a study"),
        (("nothing/packed",), "no study 'nothing'; run llmcli kernels compare"),
        (("rmsnorm/nothing",), "no rung 'nothing'; it has"),
        (("../gemv/plain",), "no study '..'"),
        (("rmsnorm/packed", "--depth", "5"), "rmsnorm/packed is a rung"),
        (("rmsnorm/packed", "-m", "storyteller"), "rmsnorm/packed is a rung"),
        (("rmsnorm/packed", "--matrix", "o_proj"), "rmsnorm/packed is a rung"),
        (("gemv", "-m", "nothing"), "Llama-3.2-1B"),
        (("gemv", "--json", "--csv"), "combined"),
    ],
)
def test_what_cannot_be_is_refused(llmcli: Llmcli, arguments: tuple[str, ...], named: str) -> None:
    llmcli("kernels", "profile", *arguments).expect_error(2, named)


@pytest.mark.usefixtures("nvrtc", "card")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("quantize_rows", "-m", "storyteller"), "does not launch quantize_rows"),
        (("gemv", "-m", "storyteller", "--matrix", "nothing"), "down_proj"),
        (("fusion/two",), "launches 2 kernels"),
    ],
)
def test_what_is_not_launched_is_refused(llmcli: Llmcli, arguments: tuple[str, ...], named: str) -> None:
    llmcli("kernels", "profile", *arguments).expect_error(2, named)


def test_figures_beside_what_is_known_without_a_profiler() -> None:
    """20 MB at 4 TB/s are 5 us, half of what it took; 32 MB moved are 30.5 MiB."""
    text = profile_text(PROFILED)
    assert "of one launch; it would take 5.00 us at the ceiling, and reaches 50.0% of it\n" in text
    assert re.search(r"memory traffic +30.5 MiB .* needs 19.1 MiB", text)
    assert re.search(r"achieved occupancy +24.0% of 25.0%  .*; registers allow 25.0%\n", text)
    assert "stall: barrier" in text
    assert "stall: wait" not in text  # 1 % is not worth a line
    assert max(map(len, text.splitlines())) <= 150


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, "memory: it is busy at 80.0% of its peak, and it moves 1.6 times the bytes that it needs."),
        ({"counters": replace(COUNTERS, read_bytes=20e6)}, "memory: it is busy at 80.0% of its peak."),
        ({"counters": replace(COUNTERS, read_bytes=None)}, "memory: it is busy at 80.0% of its peak."),
        ({"limit": "L2"}, "the L2 cache: it is busy at 30.0% of its peak."),
        ({"limit": "multiprocessors"}, "the multiprocessors: their busiest unit works at 20.0% of its peak."),
        ({"limit": "blocks"}, "its size: 132 blocks for 132 multiprocessors, most of which have no work."),
        ({"limit": "occupancy"}, "occupancy: 24.0% of the warps are there on average, of 25.0% that could be;"),
        ({"limit": "latency"}, "latency: nothing is busy, and warps spend 40.0% of their time waiting at a barrier"),
    ],
)
def test_the_last_sentence(change: dict[str, Any], sentence: str) -> None:
    assert limit_text(PROFILED._replace(**change)).startswith(f"Limited by {sentence}")


def test_every_stall_has_a_meaning() -> None:
    asked = {metric for metric in metrics_for("sm_90") if "stalled" in metric} - {
        STALL.format("selected"),
        STALL.format("not_selected"),
    }
    for metric in asked:
        (state,) = re.findall(STALL.format("(.*)"), metric)
        told = PROFILED._replace(counters=replace(COUNTERS, stalls={state: 0.5}), limit="latency")
        line = f"stall: {state.replace('_', ' ')} +50.0%  of their time, warps are "
        assert re.search(rf"^{line}", profile_text(told), re.MULTILINE), state
        assert re.search(r"of their time (waiting|ready|asleep|held) ?.*\w\.$", limit_text(told)), state


@pytest.mark.cuda
@pytest.mark.whole_card
@pytest.mark.parametrize(
    ("name", "options"),
    [("gemv", ("-m", "storyteller")), ("attention_prefill", ("-m", "storyteller")), ("rmsnorm/packed", ())],
)
def test_a_real_profile(llmcli: Llmcli, name: str, options: tuple[str, ...]) -> None:
    """If ncu is installed and may read the counters: figures that no kernel can exceed."""
    try:
        nsight.find_ncu()
    except nsight.DeviceError as error:
        pytest.skip(str(error))
    result = llmcli("kernels", "profile", name, *options, "--json")
    if "ERR_NVGPUCTRPERM" in result.stderr:
        pytest.skip(result.stderr)
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    figures = told["figures"]
    assert told["profiled_launches"] == 5
    assert 0.5e-6 < figures["seconds"] < 10e-3
    # Hits and requests may be counted in different runs of a short launch, so their rates may pass 1; clocks may rise.
    shares = {key: value for key, value in figures.items() if key not in ("seconds", "read_bytes", "written_bytes")}
    assert all(0 <= value <= 1.1 for value in shares.values()), shares
    # Caches are empty: most of what must be read comes from memory.
    assert figures["read_bytes"] > told["bytes"] / 3
    assert figures["achieved_occupancy"] <= told["use"]["occupancy"] + 0.01
    assert 0.5 < sum(told["stalls"].values()) <= 1
    assert told["limit"] != "unknown"
