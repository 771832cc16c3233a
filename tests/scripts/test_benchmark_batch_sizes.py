"""Speeds by size: what is measured, and the tables and the picture of it."""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from scripts import benchmark_batch_sizes
from scripts.benchmark_batch_sizes import draw, main, tables

SVG = "{http://www.w3.org/2000/svg}"


def figures(rate: float, share: float | None, predicted: float, **size: int) -> dict[str, Any]:
    return {"tokens_per_second": rate, "floor_share": share, "predicted_tokens_per_second": predicted, **size}


REPORTS: dict[str, list[Any]] = {
    "rows": [
        {"decode": [figures(462, 0.84, 450, num_rows=1)]},
        {"decode": [figures(14_750, 0.28, 15_000, num_rows=256)]},
    ],
    "prompts": [
        {
            "model": "model",
            "precision": "int8, groups of 128",
            "device": "Card (cuda:0), float16",
            "prompts": [
                figures(2_840, 0.5, 2_700, num_tokens=12),
                figures(37_600, 0.7, 41_000, num_tokens=2048),
            ],
        }
    ],
}


def test_every_size_is_measured_once_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command)
        return type("Done", (), {"stdout": json.dumps({"number": len(calls)})})

    monkeypatch.setattr(benchmark_batch_sizes.subprocess, "run", run)
    out = tmp_path / "sizes.json"
    sizes = ["--rows", "1", "8", "16", "--prompts", "12", "2048"]
    monkeypatch.setattr(
        sys, "argv", ["batch_sizes", "measure", "model", "--out", str(out), *sizes, "--", "--repeats", "3"]
    )
    main()
    found = json.loads(out.read_text())
    numbers = {name: [report["number"] for report in reports] for name, reports in found.items()}
    assert numbers == {"rows": [1, 2, 3], "prompts": [4]}
    begin = [sys.executable, "-m", "llmcli", "bench", "model", "--json", "--quiet"]
    decoding = ["--prompt", "128", "--tokens", "64", "--repeats", "3"]
    assert calls == [
        [*begin, "--rows", "1", *decoding],
        [*begin, "--rows", "8", *decoding],
        [*begin, "--rows", "16", *decoding],
        [*begin, "--prompt", "12", "--prompt", "2048", "--depth", "128", "--repeats", "3"],
    ]


def test_the_tables_say_how_far_the_plan_is_off() -> None:
    of_rows, of_prompts = tables(REPORTS, "vLLM", {256: 22_897}).split("\n\n")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in of_rows.splitlines()]
    assert lines[0][:4] == ["rows", "tokens/s", "of floor", "plan"]
    assert lines[2] == ["1", "462", "84%", "-3%", ""]
    assert lines[3] == ["256", "14,750", "28%", "+2%", "22,897"]
    assert of_prompts.splitlines()[-1] == "| 2,048 | 37,600 | 70% | +9% |"
    assert "vLLM" not in tables(REPORTS, None, {})


def test_the_picture_is_the_same_for_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps(REPORTS))
    monkeypatch.setattr(sys, "argv", ["batch_sizes", "draw", str(file), "--peer", "vLLM", "8=1764", "256=22897"])
    main()
    picture = file.with_suffix(".svg")
    root = ElementTree.parse(picture).getroot()
    assert root.tag == f"{SVG}svg"
    first = picture.read_bytes()
    unknown = {**REPORTS["prompts"][0], "prompts": [figures(100, None, 90, num_tokens=12)]}
    draw(picture, {**REPORTS, "prompts": [unknown]}, None, {})
    assert tables({**REPORTS, "prompts": [unknown]}, None, {}).endswith("| 12 | 100 | - | -10% |\n")
    draw(picture, REPORTS, "vLLM", {8: 1764, 256: 22_897})
    assert picture.read_bytes() == first
    draw(picture, REPORTS, None, {})
    assert picture.read_bytes() != first
