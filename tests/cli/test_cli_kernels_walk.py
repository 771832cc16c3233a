"""`llmcli kernels list`, `bench` and `roofline` without a card: their lists, refusals and reports."""

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docs_schemas import check_docs_schema
from results import Llmcli

from llmcli.cli import kernels_bench, lazy
from llmcli.cli.kernel_report import (
    HEIGHT,
    WIDTH,
    bench_csv,
    bench_json,
    bench_text,
    draw_roofline,
    gap_text,
    placed_marks,
    roofline_json,
    roofline_text,
)
from llmcli.errors import DeviceError
from llmcli.kernels.launches import Launch
from llmcli.kernels.spec import KernelCost
from llmcli.lab.engine import KERNELS
from llmcli.lab.roofline import Ceilings, Gap, TimedStep, find_gap, place_calls
from llmcli.lab.trial import Times
from llmcli.lab.walk import Call, Walk

CEILINGS = Ceilings(1e12, {"float32": 50e12, "float16": 500e12})


def call(stem: str, name: str, matrix: str, num_bytes: int, flops: int, count: int) -> Call:
    return Call(Launch(stem, name, (1,), 32, ()), matrix, KernelCost(num_bytes, 0, flops), tuple(range(count)), None)


def step(title: str, *timed: tuple[Call, float]) -> TimedStep:
    calls = tuple(one for one, _ in timed)
    walk = Walk(title, tuple((one.launch.stem, one.launch.name) for one in calls), calls)
    return TimedStep(walk, Times(100e-6, 90e-6), tuple(Times(seconds, 0.9 * seconds) for _, seconds in timed))


STEPS = [
    step(
        "A step of decoding",
        (call("embedding", "embedding<float, 4>", "", 12_000, 0, 1), 1e-6),
        (call("gemv", "gemv<Int8>", "o_proj", 8_000_000, 16_000_000, 4), 10e-6),
        (call("gemv", "gemv<Int8>", "down_proj", 16_000_000, 32_000_000, 4), 18e-6),
    ),
    step("A prompt", (call("cublas", "", "o_proj", 1_000_000, 5_000_000_000, 2), 20e-6)),
]


def test_all_kernels_are_listed_with_what_they_do(llmcli: Llmcli) -> None:
    result = llmcli("kernels", "list", "--arch", "sm_86")
    assert result.exit_code == 0, result.stderr
    for spec in KERNELS.values():
        assert f"{spec.stem:<25}{spec.op}" in result.stdout
    launched, _, others = result.stdout.partition("Not launched in these steps:")
    assert "row_reduce" in others
    assert "gemv<Int8" in launched


@pytest.mark.parametrize("call", ["kernels", "kernels list", "kernels compare rmsnorm --arch sm_86"])
def test_without_the_compiler_one_line_says_how_to_get_it(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path))
    monkeypatch.setattr("llmcli.kernels.environment.find_driver", lambda: None)
    monkeypatch.setattr("llmcli.kernels.environment.cupy_distributions", dict)
    monkeypatch.setattr("llmcli.kernels.environment.nvrtc_version", lambda: "not there")
    llmcli(*call.split()).expect_error(4, "NVRTC is missing (not there); `", '[compile]"` brings it')


def test_the_group_alone_lists(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.kernels.device.find_problem", lambda: "there is no card")
    alone = llmcli("kernels")
    assert alone.exit_code == 0
    assert "compiled for sm_90: there is no card" in alone.stderr
    assert alone.stdout == llmcli("kernels", "list", "-q").stdout
    assert alone.stdout == llmcli("kernels", "list", "--arch", "sm_90").stdout


def test_a_call_has_all_figures(llmcli: Llmcli) -> None:
    told = json.loads(llmcli("kernels", "list", "--arch", "sm_90", "--json", "--depth", 100).stdout)
    assert (told["model"], told["arch"]) == ("Llama-3.2-1B int8", "sm_90")
    decode, prompt = told["steps"]
    assert decode["title"] == "A step of decoding at depth 100"
    (head,) = (one for one in decode["calls"] if one["matrix"] == "embed_tokens")
    assert head["operations"] == 2 * 128256 * 2048
    assert head["launches"] == 1
    use = head["use"]
    assert use["threads"] == 512
    assert use["occupancy"] == use["blocks_per_multiprocessor"] * 512 / 2048
    assert use["shared_bytes"] <= 227 * 1024
    assert all(one["use"] is not None for one in prompt["calls"])
    assert {one["kernel"] for one in told["kernels"]} == KERNELS.keys()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("list", "--arch", "sm_12"), "sm_12"),
        (("list", "-m", "nothing"), "Llama-3.2-1B"),
        (("list", "--prompt", "4000"), "--prompt is 4000"),
        (("list", "--depth", "131072"), "--depth is 131072"),
        (("list", "-m", "storyteller", "--format", "int4"), "--format is for a shape"),
        (("bench", "nothing"), "no kernel 'nothing'"),
        (("bench", "--json", "--csv"), "combined"),
        (("roofline", "nothing"), "Llama-3.2-1B"),
        (("roofline", "--out", "plot.gif"), ".png or .svg"),
    ],
)
def test_what_cannot_be_is_refused(llmcli: Llmcli, arguments: tuple[str, ...], named: str) -> None:
    llmcli("kernels", *arguments).expect_error(2, named)


@pytest.mark.parametrize("command", ["bench", "roofline"])
def test_without_a_card_the_way_out_is_named(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr("llmcli.kernels.device.find_problem", lambda: "there is no card")
    llmcli("kernels", command).expect_error(4, "there is no card", "kernels list")


def test_without_matplotlib_a_line_says_how_to_get_it(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def __getattr__(self, name: str) -> Any:
            raise ModuleNotFoundError("No module named 'matplotlib'")

    monkeypatch.setattr(kernels_bench, "lazy", Missing())
    llmcli("kernels", "roofline", "--out", "plot.svg").expect_error(2, "--out needs matplotlib: run `", '[plot]"`')


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    marks, labels = placed_marks([place_calls(one, CEILINGS) for one in STEPS])
    for suffix, head in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        lazy.roofline_figure.save_figure(tmp_path / f"plot{suffix}", "a title", marks, labels, 1e12, CEILINGS.flops)
        assert (tmp_path / f"plot{suffix}").read_bytes().startswith(head)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that has been measured."""
    device = SimpleNamespace(name="A Card", arch="sm_90", num_multiprocessors=132)
    monkeypatch.setattr(kernels_bench, "measure_subject_kernels", lambda *arguments: (device, CEILINGS, STEPS))


@pytest.mark.usefixtures("card")
def test_bench_as_a_user_runs_it(llmcli: Llmcli) -> None:
    result = llmcli("kernels", "bench")
    assert result.exit_code == 0, result.stderr
    title = "Llama-3.2-1B int8 on A Card, sm_90, 132 multiprocessors"
    assert result.stdout == bench_text(title, STEPS, CEILINGS, ())
    assert llmcli("kernels", "bench", "gemv", "--csv").stdout == bench_csv(STEPS, CEILINGS, ["gemv"])
    told = json.loads(llmcli("kernels", "bench", "--json").stdout)
    assert told["device"] == "A Card"
    check_docs_schema("kernels-bench", told)
    llmcli("kernels", "bench", "gemv", "repack").expect_error(2, "does not launch repack", "embedding")


@pytest.mark.usefixtures("card")
def test_roofline_as_a_user_runs_it(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.runners.cuda.predict.rates.measure_flops", lambda device, kind: 1e15)
    told = json.loads(llmcli("kernels", "roofline", "--json").stdout)
    check_docs_schema("kernels-roofline", told)
    assert told["operations_per_second"] == {"float32": 50e12, "float16": 500e12, "int8": 1e15}
    text = llmcli("kernels", "roofline", "Llama-2-7B").stdout
    assert text.startswith("Llama-2-7B int8 on A Card\n")
    assert "- int8" in text

    def refuse(device: Any, kind: str) -> float:
        raise DeviceError("no algorithm")

    monkeypatch.setattr("llmcli.runners.cuda.predict.rates.measure_flops", refuse)
    result = llmcli("kernels", "roofline")
    assert result.exit_code == 0
    assert "int8 products is left out: no algorithm" in result.stderr
    assert "- float16" in result.stdout


def test_times_and_rates_of_a_bench() -> None:
    lines = [line.split() for line in bench_text("a card", STEPS, CEILINGS, ()).splitlines()]
    # us, GB/s, GFLOP/s, share of the ceiling, share of the step: 4 * 10 of 1 + 4 * 10 + 4 * 18 us
    assert ["gemv", "o_proj", "4", "7.6", "MiB", "16.0", "M", "10.00", "800.0", "1,600.0", "80.0%", "35.4%"] in lines
    assert [
        "cublas",
        "o_proj",
        "2",
        "976.6",
        "KiB",
        "5,000.0",
        "M",
        "20.00",
        "50.0",
        "250,000.0",
        "50.0%",
        "100.0%",
    ] in lines
    text = bench_text("a card", STEPS, CEILINGS, ())
    assert "the whole step takes 100.0 us; its launches, each timed beside its like, add up to 113.0 us" in text


def test_variants_of_a_kernel_are_told_apart() -> None:
    named = (("a", "x"), ("b", "y"), ("a", "z"))
    calls = [(call("gemv", f"gemv<{kind}>", matrix, 8, 8, 1), 1e-6) for kind, matrix in named]
    lines = bench_text("a card", [step("A step", *calls)], CEILINGS, ()).splitlines()
    assert [line.split()[:3] for line in lines if " x " in line or " y " in line or " z " in line] == [
        ["gemv", "1", "x"],
        ["gemv", "2", "y"],
        ["gemv", "1", "z"],
    ]
    assert [line for line in lines if "<" in line] == [f"{'gemv 1':<25}gemv<a>", f"{'gemv 2':<25}gemv<b>"]


def test_a_bench_of_some_kernels_shows_those() -> None:
    text = bench_text("a card", STEPS, CEILINGS, ["gemv"])
    assert "gemv<Int8>" in text
    assert "embedding" not in text
    assert "A prompt" not in text
    rows = list(csv.DictReader(io.StringIO(bench_csv(STEPS, CEILINGS, ["gemv"]))))
    assert [(row["matrix"], float(row["median_seconds"])) for row in rows] == [("o_proj", 10e-6), ("down_proj", 18e-6)]
    told = json.loads(json.dumps(bench_json("1B", "a card", "sm_90", STEPS, CEILINGS, ["cublas"])))
    assert [len(one["calls"]) for one in told["steps"]] == [0, 1]
    assert told["steps"][1]["calls"][0]["ceiling_share"] == pytest.approx(0.5)
    assert told["steps"][0]["alone_seconds"] == pytest.approx(113e-6)


def test_the_roofline_ends_with_what_holds_the_gap() -> None:
    placed = [place_calls(one, CEILINGS) for one in STEPS]
    gaps = [find_gap(one, CEILINGS) for one in STEPS]
    text = roofline_text("1B on a card", CEILINGS, STEPS, placed, gaps)
    assert text.splitlines()[-2:] == [
        "A step of decoding: at 1,000 GB/s the ceilings allow 96.0 us, and it takes 100.0 us, 96.0% of the ceiling; of "
        "what its kernels lose, gemv loses 94%, 16.0 us.",
        "A prompt: at 1,000 GB/s the ceilings allow 20.0 us, and it takes 100.0 us, 20.0% of the ceiling; of what its "
        "kernels lose, cublas loses 100%, 20.0 us.",
    ]
    lines = [line.split() for line in text.splitlines()]
    assert ["a", "gemv", "o_proj", "2", "1,600.0", "2,000.0", "80.0%"] in lines
    assert ["-", "embedding", "-", "-", "-", "1.2%"] in lines
    told = json.loads(json.dumps(roofline_json("1B", CEILINGS, STEPS, placed, gaps)))
    assert told["steps"][0]["lost_seconds"]["gemv"] == pytest.approx(16e-6)


def test_a_step_at_its_ceiling_has_no_gap() -> None:
    assert gap_text(Gap("A step", 1e-6, 1e-6, {"gemv": 0.0}), CEILINGS).endswith("no kernel is below its ceiling.")


def test_a_plot_in_plain_characters() -> None:
    """1 GB/s and two roofs, five decades by three: every corner is worked out by hand."""
    marks = [("a", 1.0, 1e9), ("b", 1.0, 1e9), ("c", 1e5, 1e9)]
    lines = draw_roofline(marks, 1e9, {"float32": 1e11, "float16": 1e12}).splitlines()
    assert len(lines) == HEIGHT
    assert max(map(len, lines)) <= WIDTH
    assert all(line.isascii() for line in lines)
    assert [line[:8].strip() for line in lines if line[:8].strip()] == ["1T", "100G", "10G", "1G"]
    corner = lines[-3]  # the lowest row: 1G
    assert corner[9] == "a"  # drawn over the roof and over b
    assert corner[-1] == "c"
    for name, ridge in (("float16", 3), ("float32", 2)):  # decades from the left
        (roof,) = (line for line in lines if line.endswith(f"- {name}"))
        assert roof.index("-") == 9 + round(ridge / 5 * (WIDTH - 10))
    slope = [line.find("/") for line in lines[1:-3] if "/" in line]
    assert len(slope) == HEIGHT - 4
    assert slope == sorted(slope, reverse=True)
    assert lines[-1].split() == ["1", "10", "100", "1000", "1e4", "1e5"]


def test_a_roof_at_the_edge_has_room_for_its_name() -> None:
    lines = draw_roofline([("a", 1.0, 1e9)], 1e9, {"float32": 1e11, "float16": 1e12}).splitlines()
    assert any(line.endswith("- float16") for line in lines)
    assert max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_a_plot_of_any_scale_fits(scale: float) -> None:
    marks = [(letter, 0.3 * 7**place * scale, 2e9 * 5**place) for place, letter in enumerate("abcdefgh")]
    lines = draw_roofline(marks, 4.48e12, {"float32": 52e12, "float16": 720e12}).splitlines()
    assert len(lines) == HEIGHT
    assert max(map(len, lines)) <= WIDTH
    for letter in "abcdefgh":
        assert any(letter in line[9:] for line in lines[:-2])
