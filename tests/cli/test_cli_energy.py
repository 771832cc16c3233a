"""Energy on the command line: `bench` and `--stats` with a meter of a simulated card, and without one."""

import csv
import io
import json
import re
import time
from pathlib import Path

import pytest
import torch
from docs_schemas import check_docs_schema
from fake_nvml import WORKING_WATTS, Nvml
from results import Llmcli
from tiny_models import write_tiny_llama

from llmcli.measure.energy import EnergyMeter

QUICK = ("--prompt", 8, "--depth", 8, "--depth", 20, "--tokens", 4, "--repeats", 1)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """A card with a meter, while the model runs on the CPU."""
    library = Nvml(time.perf_counter)
    monkeypatch.setattr("llmcli.measure.energy.open_meter", lambda card: EnergyMeter(library, "second card"))
    monkeypatch.setattr("llmcli.measure.energy.SHORTEST_SECONDS", 0.005)
    monkeypatch.setattr("llmcli.measure.bench._IDLE_SECONDS", 0.02)
    monkeypatch.setattr("llmcli.measure.bench._ENERGY_SECONDS", 0.1)
    return library


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("energy") / "model"
    return write_tiny_llama(folder, with_tokenizer=False, dtype=torch.bfloat16)


def test_bench_table_has_energy(llmcli: Llmcli, model: Path, nvml: Nvml) -> None:
    text = llmcli("bench", model, *QUICK).stdout
    idle = re.search(r"^energy +J/token leaves out the (\d+) W of the idle card, W includes them$", text, re.MULTILINE)
    assert idle is not None
    # The simulated card's power is constant, so nothing is left for the tokens.
    assert int(idle[1]) == pytest.approx(WORKING_WATTS, rel=0.05)
    *_, header, first, second = text.splitlines()
    assert header.split()[-2:] == ["J/token", "W"]
    for line in (first, second):
        joules, watts = map(float, line.split()[-2:])
        assert abs(joules) < 0.05
        assert watts == pytest.approx(WORKING_WATTS, rel=0.05)


def test_bench_json_and_csv_have_energy(llmcli: Llmcli, model: Path, nvml: Nvml) -> None:
    facts = json.loads(llmcli("bench", model, *QUICK, "--json").stdout)
    check_docs_schema("bench", facts)
    assert facts["idle_watts"] == pytest.approx(WORKING_WATTS, rel=0.05)
    assert facts["energy_problem"] is None
    for item in facts["decode"]:
        assert item["average_watts"] == pytest.approx(WORKING_WATTS, rel=0.05)
        assert abs(item["joules_per_token"]) < 0.05
    rows = list(csv.DictReader(io.StringIO(llmcli("bench", model, *QUICK, "--csv").stdout)))
    assert [row["figure"] for row in rows if row["joules_per_token"] != "" and row["average_watts"] != ""] == [
        "decode",
        "decode",
    ]


def test_bench_of_a_card_that_stops_answering(llmcli: Llmcli, model: Path, nvml: Nvml) -> None:
    nvml.is_broken = True
    result = llmcli("bench", model, *QUICK)
    assert result.exit_code == 0
    assert "energy            not available: the counter cannot be read\n" in result.stdout
    assert "J/token" not in result.stdout


def test_stats_tell_the_energy_of_decoding(llmcli: Llmcli, tiny_llama: Path, nvml: Nvml) -> None:
    arguments = ("generate", "Hi", "-m", tiny_llama, "--max-new-tokens", 60, "--ignore-eos", "--seed", 1)
    stderr = llmcli(*arguments, "--stats").stderr
    line = next(line for line in stderr.splitlines() if line.startswith("energy"))
    found = re.fullmatch(r"energy +(\S+) J/token above the 88 W just before the run, (\d+) W in total", line)
    assert found is not None, line
    assert int(found[2]) == pytest.approx(WORKING_WATTS, rel=0.05)
    tokens, seconds = re.search(r"^decode .*\((\d+) tokens in ([\d.]+) s\)", stderr, re.MULTILINE).groups()
    # To two digits; the counter is read a moment after the last token.
    assert float(found[1]) == pytest.approx((WORKING_WATTS - 88) * float(seconds) / int(tokens), rel=0.25)
    nvml.is_broken = True
    assert "energy" not in llmcli(*arguments, "--stats").stderr


def test_a_run_that_is_too_short(llmcli: Llmcli, tiny_llama: Path, nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.measure.energy.SHORTEST_SECONDS", 60.0)
    stderr = llmcli("generate", "Hi", "-m", tiny_llama, "--max-new-tokens", 3, "--stats").stderr
    assert re.search(r"^energy +the run is too short for the card's counter$", stderr, re.MULTILINE)


def test_stats_without_a_card_leave_energy_out(llmcli: Llmcli, tiny_llama: Path) -> None:
    assert "energy" not in llmcli("generate", "Hi", "-m", tiny_llama, "--max-new-tokens", 3, "--stats").stderr
