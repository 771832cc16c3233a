"""`llmcli bench` and `llmcli plan`: their output, refusals and leftovers."""

import csv
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from docs_schemas import check_docs_schema
from results import Llmcli
from tiny_models import CONFIG, write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.cli.cards import CARDS

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 320}
QUICK = ("--prompt", 20, "--prompt", 50, "--depth", 30, "--tokens", 4, "--repeats", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "model"
    return write_tiny_llama(folder, with_tokenizer=False, dtype=torch.bfloat16, **SIZES)


@pytest.fixture
def shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "configs" / "models").mkdir(parents=True)
    config = {**CONFIG, **SIZES, "dtype": "bfloat16"}
    (tmp_path / "configs" / "models" / "Tiny.json").write_text(json.dumps(config))
    monkeypatch.setattr("llmcli.checkpoint.random_weights.resource_folder", lambda name: tmp_path / name)
    return "Tiny"


def test_bench_table(llmcli: Llmcli, model: Path) -> None:
    result = llmcli("bench", model, *QUICK)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"model +model, bfloat16, KV cache float32, context 86", lines[0])
    assert re.fullmatch(r"device +CPU, float32, numpy, reads [\d.,]+ GB/s", lines[1])
    assert re.fullmatch(r"checked +4 tokens, the same as generate's", lines[2])
    assert lines[3] == "energy            not available: only NVIDIA cards can be measured"
    assert " ".join(lines[5].split()) == "prompt tokens/s spread predicted of floor first token predicted runs"
    assert [line.split()[0] for line in lines[6:8]] == ["20", "50"]
    assert " ".join(lines[9].split()) == "depth rows tokens/s spread predicted GB/s of floor runs"
    assert lines[10].split()[:2] == ["30", "1"]
    assert len(lines) == 11
    assert all(line.endswith(" 2") for line in (*lines[6:8], lines[10]))
    assert [line.split(":")[0] for line in result.stderr.splitlines()][-1] == "model"


def test_bench_json_agrees_with_itself(llmcli: Llmcli, model: Path) -> None:
    facts = json.loads(llmcli("bench", model, *QUICK, "--rows", 3, "--json").stdout)
    check_docs_schema("bench", facts)
    assert set(facts) == {
        *("model", "precision", "device", "cache_type", "context", "read_bytes_per_second", "load_seconds"),
        "num_checked_tokens",
        *("idle_watts", "energy_problem", "prompts", "decode"),
    }
    assert [item["num_tokens"] for item in facts["prompts"]] == [20, 50]
    for item in facts["prompts"]:
        assert item["tokens_per_second"] == pytest.approx(item["num_tokens"] / item["seconds"]["median"])
        assert item["first_token_seconds"]["fastest"] > 0  # of other prompts than `seconds`
        assert item["predicted_first_token_seconds"] > 0
        assert item["predicted_tokens_per_second"] > 0
    (item,) = facts["decode"]
    assert (item["depth"], item["num_rows"], item["num_new_tokens"], item["step_seconds"]["num_runs"]) == (30, 3, 4, 2)
    seconds = item["step_seconds"]["median"]
    assert item["step_seconds"]["fastest"] <= seconds <= item["step_seconds"]["slowest"]
    assert item["tokens_per_second"] == pytest.approx(3 / seconds)
    assert item["gbps"] == pytest.approx(item["bytes_per_step"] / seconds / 1e9)
    # Rows are run one after the other on the CPU; what is held in float32 is read once for each.
    num_weights = 2 * (128 * 128 * 2 + 128 * 32 * 2 + 3 * 128 * 256 + 2 * 128) + 128 + 320 * 128 + 128
    keys_and_values = 2 * 2 * 2 * 16
    assert item["bytes_per_step"] == 3 * 4 * (num_weights + 32 * keys_and_values)
    least = 4 * (num_weights + 3 * 32 * keys_and_values)  # rows could share the weights
    assert item["floor_seconds"] == pytest.approx(least / facts["read_bytes_per_second"])
    assert item["floor_share"] == pytest.approx(item["floor_seconds"] / seconds)
    assert all(item["floor_seconds"] is item["floor_share"] is None for item in facts["prompts"])


def test_bench_of_steps_with_drafts(llmcli: Llmcli, model: Path) -> None:
    facts = json.loads(llmcli("bench", model, *QUICK, "--draft", 2, "--json").stdout)
    check_docs_schema("bench", facts)
    steps = facts["draft_steps"]
    assert [(item["depth"], item["num_drafts"], item["step_seconds"]["num_runs"]) for item in steps] == [
        (30, 0, 2),
        (30, 1, 2),
        (30, 2, 2),
    ]
    for item in steps:
        assert item["steps_of_one"] == pytest.approx(item["step_seconds"]["median"] / item["plain_seconds"])
    assert steps[2]["gain"]["0.8"] == pytest.approx(2.44 / steps[2]["steps_of_one"])
    rows = list(csv.DictReader(io.StringIO(llmcli("bench", model, *QUICK, "--draft", 1, "--csv").stdout)))
    assert [(row["figure"], row["length"], row["drafts"]) for row in rows[3:]] == [
        ("draft step", "30", "0"),
        ("draft step", "30", "1"),
    ]
    lines = llmcli("bench", model, *QUICK, "--draft", 1).stdout.splitlines()
    assert lines[-3].split()[:4] == ["depth", "drafts", "step", "steps"]
    assert [line.split()[:2] for line in lines[-2:]] == [["30", "0"], ["30", "1"]]
    llmcli("bench", model, *QUICK, "--draft", 8).expect_error(2)


def test_bench_csv(llmcli: Llmcli, model: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(llmcli("bench", model, *QUICK, "--csv").stdout)))
    assert [(row["figure"], row["length"], row["rows"]) for row in rows] == [
        ("prompt", "20", "1"),
        ("prompt", "50", "1"),
        ("decode", "30", "1"),
    ]
    for row in rows:
        slowest, median, fastest = (float(row[f"{word}tokens_per_second"]) for word in ("slowest_", "", "fastest_"))
        assert 0 < slowest <= median <= fastest
        assert float(row["predicted_tokens_per_second"]) > 0
        assert (row["gbps"] == "") == (row["figure"] == "prompt") == (row["first_token_seconds"] != "")
        assert row["joules_per_token"] == row["average_watts"] == ""


@pytest.mark.parametrize(("form", "precision"), [("int4", "int4 group 128"), ("bf16", "bfloat16")])
def test_a_shape_is_written_measured_and_removed(
    llmcli: Llmcli, shape: str, form: str, precision: str, tmp_path: Path
) -> None:
    result = llmcli("bench", shape, "--format", form, *QUICK, "--scratch", tmp_path / "scratch", "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert (facts["model"], facts["precision"]) == (f"Tiny {form}", precision)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_kept_shape_is_taken_again(llmcli: Llmcli, shape: str, tmp_path: Path) -> None:
    arguments = ("bench", shape, *QUICK, "--scratch", tmp_path)
    kept = tmp_path / "Tiny-int8"
    assert f"kept {kept}" in llmcli(*arguments, "--keep").stderr
    assert str(open_model(kept).tensors.packed["model.layers.0.mlp.up_proj"].scheme) == "int8, groups of 128"
    before = (kept / "model.safetensors").stat().st_mtime_ns
    assert f"using {kept}" in llmcli(*arguments).stderr
    assert (kept / "model.safetensors").stat().st_mtime_ns == before


def test_what_a_killed_run_left_is_removed(llmcli: Llmcli, shape: str, tmp_path: Path) -> None:
    finished = subprocess.Popen(["true"])
    finished.wait()
    abandoned = (f"Llama-2-7B-int8.{finished.pid}", f".Tiny-int4.{finished.pid}.partial-0123456789abcdef")
    others = (f"Tiny-int8.{os.getppid()}", "Tiny-int4", "notes.txt")
    for name in (*abandoned, *others):
        (tmp_path / "scratch" / name).mkdir(parents=True)
    assert llmcli("bench", shape, *QUICK, "--scratch", tmp_path / "scratch").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "scratch").iterdir()) == sorted(others)


def test_an_interrupt_leaves_nothing(
    llmcli: Llmcli, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        assert len(list((tmp_path / "scratch").iterdir())) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr("llmcli.measure.bench.Bench.measure_decode", interrupt)
    result = llmcli("bench", shape, *QUICK, "--scratch", tmp_path / "scratch")
    assert (result.exit_code, result.stdout) == (130, "")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_bench_refuses(llmcli: Llmcli, model: Path, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llmcli("bench", model, "--format", "int8").expect_error(2, "--format is for a shape")
    llmcli("bench", shape, "--format", "int5").expect_error(2, "'int5', expected one of int8, int4, awq, fp8, bf16")
    llmcli("bench", "Llama-9").expect_error(
        2, "'Llama-9' is neither a model folder nor a known shape; the shapes are Tiny"
    )
    llmcli("bench", model, "--json", "--csv").expect_error(2, "--json and --csv cannot be combined")
    llmcli("bench", model, "--tokens", 511).expect_error(
        2, "--tokens 511 leaves no room for a prompt: the context limit of model is 512 tokens"
    )
    llmcli("bench", model, "--depth", 500, "--tokens", 20).expect_error(2, "--depth is 500", "use at most 460")
    monkeypatch.setattr("llmcli.runners.host.memory.available_memory", lambda num_threads: 100_000)
    result = llmcli("bench", shape, "--scratch", "/proc/none")  # refused before anything is written there
    result.expect_error(4, "Tiny at float32 with context 512 needs", "follows from --prompt, --depth and --tokens")


@pytest.mark.parametrize("command", ["bench", "plan"])
def test_rows_that_no_runner_has(llmcli: Llmcli, model: Path, command: str) -> None:
    for rows in ("0", "257", "1000000000000", "2.5", "two", "AUTO", "\N{SUPERSCRIPT TWO}", ""):
        result = llmcli(command, model, "--rows", rows)
        result.expect_error(2, f"--rows is {rows!r}, expected a number from 1 to 256, or auto")


def test_auto_rows_are_as_many_as_the_memory_of_a_card_has_room_for(llmcli: Llmcli) -> None:
    def rows_of(*arguments: object) -> int:
        facts = json.loads(llmcli("plan", "Llama-2-7B", *card, "--json", *arguments).stdout)
        assert {item["num_rows"] for item in facts["decode"]} == {facts["num_rows"]}
        return facts["num_rows"]

    card = ("--memory", 24, "--bandwidth", 1008, "--context", 1024)
    found = rows_of("--rows", "auto")
    assert 8 < found < 256
    assert rows_of("--rows", found) == found
    llmcli("plan", "Llama-2-7B", *card, "--rows", found + 1).expect_error(4, "of the card's memory")
    card = ("--memory", 1000, "--bandwidth", 1008, "--context", 128)
    assert rows_of("--rows", "auto") == 256
    assert rows_of() == 1


def test_auto_rows_are_one_on_the_cpu(llmcli: Llmcli, model: Path) -> None:
    assert json.loads(llmcli("plan", model, "--rows", "auto", "--json").stdout)["num_rows"] == 1
    facts = json.loads(llmcli("bench", model, *QUICK, "--rows", "auto", "--json").stdout)
    assert [item["num_rows"] for item in facts["decode"]] == [1]


def test_bench_on_a_full_or_forbidden_disk(llmcli: Llmcli, shape: str) -> None:
    result = llmcli("bench", shape, *QUICK, "--scratch", "/proc/none", "--quiet")
    result.expect_error(5, "/proc/none/Tiny-int8.", "cannot be written", "--scratch")


def test_plan_table(llmcli: Llmcli, model: Path) -> None:
    result = llmcli("plan", model)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    layer = 2 * 128 * 128 + 2 * 128 * 32 + 3 * 128 * 256 + 2 * 128
    assert lines[0].split(maxsplit=1) == ["model", f"model, bfloat16, {2 * layer + 2 * 320 * 128 + 128:,} parameters"]
    assert re.fullmatch(r"device +CPU, float32, numpy, reads [\d.,]+ GB/s \(measured\)", lines[1])
    assert re.search(r"\+ KV cache [\d.]+ [KM]iB \(float32\) \+", lines[3])
    assert re.fullmatch(r"context +512 tokens \(the maximum\)", lines[4])
    assert lines[6].split() == ["depth", "read", "per", "step", "tokens/s"]
    assert [line.split()[0] for line in lines[7:9]] == ["128", "511"]
    assert lines[10].split() == ["prompt", "tokens/s", "first", "token"]
    assert [line.split()[0] for line in lines[11:13]] == ["128", "511"]


def test_plan_json_has_what_the_files_hold(llmcli: Llmcli, model: Path) -> None:
    facts = json.loads(llmcli("plan", model, "--context", 300, "--rows", 2, "--json", "--dtype", "bfloat16").stdout)
    memory = facts["memory"]
    data_bytes = sum(info.num_bytes for info in open_model(model).checkpoint.tensors.values())
    assert memory["weight_bytes"] == data_bytes
    assert memory["cache_bytes"] == 2 * 304 * 2 * 2 * 2 * 16 * 2  # whole pages of 16 tokens
    assert memory["cache_type"] == "bfloat16"
    parts = ("weight_bytes", "cache_bytes", "workspace_bytes")
    assert memory["total_bytes"] == sum(memory[part] for part in parts)
    assert [item["depth"] for item in facts["decode"]] == [128, 299]
    assert all(item["num_rows"] == 2 and item["tokens_per_second"] > 0 for item in facts["decode"])
    assert all(math.isfinite(item["first_token_seconds"]) for item in facts["prompts"])


def test_plan_for_a_card_that_is_not_here(llmcli: Llmcli) -> None:
    arguments = ("plan", "Llama-2-7B", "--memory", 24, "--bandwidth", 1008, "--json")
    facts = json.loads(llmcli(*arguments).stdout)
    linear, head = 32 * (4 * 4096**2 + 3 * 4096 * 11008), 32000 * 4096
    norms, a_row = 65 * 4096 * 4, 4096 * 2
    cache = 2 * 32 * 4096 * 2
    assert facts["num_parameters"] == 6_738_415_616
    assert facts["decode"][0]["bytes_per_step"] == linear * 130 // 128 + 2 * head + norms + a_row + 128 * cache
    assert facts["memory"]["cache_bytes"] == 4096 * cache
    most = 1008e9 / facts["decode"][0]["bytes_per_step"]
    assert 0.5 * most < facts["decode"][0]["tokens_per_second"] < most
    assert facts["prompts"][0]["first_token_seconds"] is None
    table = llmcli(*arguments[:-1]).stdout
    assert "a card of 24 GiB, reads 1,008.0 GB/s (as given)" in table
    assert "first token" not in table


def test_plan_for_a_card_that_is_not_here_needs_no_cupy(llmcli: Llmcli) -> None:
    """A user who asks about a card may have none, and then no CuPy either."""
    arguments = ("plan", "Llama-2-7B", "--memory", "24", "--bandwidth", "1008", "--json")
    program = "import sys; sys.modules['cupy'] = None; from llmcli.cli.main import run; sys.exit(run(sys.argv[1:]))"
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == json.loads(llmcli(*arguments).stdout)


def test_plan_of_a_draft_model(llmcli: Llmcli, model: Path) -> None:
    def facts(*arguments: Any) -> Any:
        return json.loads(llmcli("plan", *arguments, "--json").stdout)

    card = ("--memory", 24, "--bandwidth", 1008)
    both = facts("Llama-3.1-8B", "--context", 8192, *card, "--draft", "Llama-3.2-1B")
    alone = [facts(name, "--context", 8192, *card) for name in ("Llama-3.1-8B", "Llama-3.2-1B")]
    draft = both.pop("draft")
    assert both == alone[0]
    total = sum(one["memory"]["total_bytes"] for one in alone)
    assert draft == {"model": "Llama-3.2-1B int8", "memory": alone[1]["memory"], "bytes_of_both": total}
    for gib, fits in ((total / 2**30 + 0.1, True), (total / 2**30 - 0.1, False)):
        tight = ("Llama-3.1-8B", "--context", 8192, "--memory", gib, "--bandwidth", 1008, "--draft", "Llama-3.2-1B")
        assert ("which is not free" in llmcli("plan", *tight).stdout) != fits
    here = [facts(model, "--draft", model)["draft"]["memory"], facts(model)["memory"]]
    assert all(memory.pop("available_bytes") > 0 for memory in here)  # changes while others run
    assert here[0] == here[1]
    other = llmcli("plan", "Llama-2-7B", *card, "--draft", "Llama-3.1-8B")
    assert "Llama-3.1-8B has another vocabulary than Llama-2-7B: 128256 tokens, not 32000" in other.stderr
    llmcli("plan", model, "--draft", "nothing").expect_error(2, "neither a model folder nor a known shape")


def test_plan_with_a_cache_of_codes(llmcli: Llmcli, model: Path) -> None:
    card = ("plan", "Llama-2-7B", "--memory", 24, "--bandwidth", 1008, "--json")
    for arguments, num_vectors, head_dim in ((card, 32 * 4096 * 32, 128), (("plan", model, "--json"), 2 * 512 * 2, 16)):
        memory = json.loads(llmcli(*arguments, "--kv-cache", "int8").stdout)["memory"]
        assert memory["cache_type"] == "int8"
        assert memory["cache_bytes"] == 2 * num_vectors * (head_dim + 4)


def test_the_context_that_a_refusal_names_is_accepted(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = ("plan", "Llama-2-13B", "--format", "int4", "--memory", 9, "--bandwidth", 500)
    host = ("plan", model)
    needed = json.loads(llmcli(*host, "--json").stdout)["memory"]["total_bytes"]
    monkeypatch.setattr("llmcli.runners.host.memory.available_memory", lambda num_threads: needed - 1_000_000)
    for arguments, longest in ((card, 4096), (host, 512)):
        result = llmcli(*arguments, "--context", longest)
        result.expect_error(4, "is available: use --context ")
        context = int(re.search(r"use --context (\d+) or less", result.stderr)[1])
        assert 128 <= context < longest
        facts = json.loads(llmcli(*arguments, "--context", context, "--json").stdout)
        assert facts["memory"]["largest_context"] == context
        assert facts["memory"]["total_bytes"] <= facts["memory"]["available_bytes"]
        llmcli(*arguments, "--context", context + 1).expect_error(4, f"use --context {context} or less")


@pytest.mark.parametrize("name", ["RTX 4090", "rtx-4090", "4090", "NVIDIA GeForce RTX 4090"])
def test_a_card_by_its_name_is_that_of_its_figures(llmcli: Llmcli, name: str) -> None:
    plan = ("plan", "Llama-2-7B", "--json")
    named = json.loads(llmcli(*plan, "--card", name).stdout)
    described = json.loads(llmcli(*plan, "--memory", 24, "--bandwidth", 1008).stdout)
    assert (named["device"], described["device"]) == ("RTX 4090", "a card of 24 GiB")
    assert {**named, "device": ""} == {**described, "device": ""}
    assert "RTX 4090, reads 1,008.0 GB/s (by its data sheet)" in llmcli("plan", "Llama-2-7B", "--card", name).stdout


# Bits of the bus, and Gbit/s of each of its lines.
BUSES = {
    "RTX 3060": (192, 15), "RTX 3060 Ti": (256, 14), "RTX 3070": (256, 14), "RTX 3070 Ti": (256, 19),
    "RTX 3080": (320, 19), "RTX 3080 Ti": (384, 19), "RTX 3090": (384, 19.5), "RTX 3090 Ti": (384, 21),
    "RTX 4060": (128, 17), "RTX 4060 Ti": (128, 18), "RTX 4070": (192, 21), "RTX 4070 Ti SUPER": (256, 21),
    "RTX 4080": (256, 22.4), "RTX 4080 SUPER": (256, 23), "RTX 4090": (384, 21), "RTX 5060": (128, 28),
    "RTX 5070": (192, 28), "RTX 5070 Ti": (256, 28), "RTX 5080": (256, 30), "RTX 5090": (512, 28),
    "RTX A4000": (256, 14), "RTX A5000": (384, 16), "RTX A6000": (384, 16), "RTX 6000 Ada": (384, 20),
    "RTX PRO 6000": (512, 28), "A10": (384, 12.5), "A40": (384, 14.5), "L4": (192, 12.5), "L40S": (384, 18),
}  # fmt: skip


def test_bandwidths_are_those_of_the_cards_buses() -> None:
    for name, (bits, rate) in BUSES.items():
        assert CARDS[name][1] == pytest.approx(bits * rate / 8), name


def test_plan_refuses(llmcli: Llmcli, model: Path) -> None:
    llmcli("plan", model, "--context", 513).expect_error(
        2, "--context 513 is over the context limit of model, 512 tokens"
    )
    llmcli("plan", model, "--memory", 8).expect_error(2, "--memory and --bandwidth describe a card together")
    llmcli("plan", model, "--memory", "inf", "--bandwidth", 100).expect_error(2, "--memory")
    llmcli("plan", model, "--memory", 8, "--bandwidth", "1e300").expect_error(2, "--bandwidth")
    llmcli("plan", "llama3.2:1b").expect_error(2, "the hub id of that model is meta-llama/Llama-3.2-1B-Instruct")
    llmcli("plan", model, "--card", "A100").expect_error(2, "--card is 'A100'; did you mean A100 40GB or A100 80GB?")
    llmcli("plan", model, "--card", "GTX 1080").expect_error(2, "known are RTX 3060, ", "--memory and --bandwidth")
    llmcli("plan", model, "--card", "").expect_error(2, "known are")
    llmcli("plan", model, "--card", "L4", "--device", "cpu").expect_error(2, "leave out --device and --threads")
    both = ("--memory", 8, "--bandwidth", 100)
    llmcli("plan", model, "--card", "L4", *both).expect_error(2, "give either the name or the figures")
    llmcli("plan", model, *both, "--device", "cpu").expect_error(2, "leave out --device and --threads")
    llmcli("plan", model, *both, "--dtype", "int8").expect_error(2, "--dtype is 'int8'")
    llmcli("plan", model, "--device", "cuda").expect_error(4, "there is no NVIDIA driver")
    llmcli("plan", "no/such", "--memory", 8).expect_error(2, "together")


def test_plan_reads_no_weights(llmcli: Llmcli, model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    content = (model / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    (copy / "config.json").write_bytes((model / "config.json").read_bytes())
    with (copy / "model.safetensors").open("wb") as file:
        file.write(content[: 8 + header_bytes])
        file.truncate(len(content))  # zeros that nothing reads
    assert llmcli("plan", copy).exit_code == 0


@pytest.mark.parametrize("flags", [("--keep",), ("--scratch", "folder")])
def test_what_is_for_shapes_is_refused_for_a_model(llmcli: Llmcli, model: Path, flags: tuple[str, ...]) -> None:
    told = llmcli("bench", model, *QUICK, *flags)
    told.expect_error(2, f"leave out {flags[0]}: it is for a shape's random weights, and model has its own files")
