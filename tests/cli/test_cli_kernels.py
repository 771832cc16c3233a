"""`llmcli kernels compare` without a card: lists, printed sources, compiling and refusals; its tables and sentences."""

import csv
import dataclasses
import io
import json
from pathlib import Path

import pytest
from results import Llmcli, Screen

from llmcli.cli.kernel_report import as_csv, as_json, finding_text, study_text
from llmcli.cli.kernels import _show
from llmcli.lab.compare import Measured, find_claims
from llmcli.lab.study import parse_study, study_names
from llmcli.lab.trial import Times

STUDY = parse_study(
    """\
// add: c = a + b  Source: a book
// Problem: add
// Sizes:   m 1; n 100, 2000
// Claim:   packed < plain at n 100: four at once
// Claim:   packed < plain: there is more to win

// rung plain: one by one.
// launch: add<<<1, 32>>>

// rung packed: four at once.
// launch: add4<<<1, 32>>>
""",
    "add.cu",
)
SECONDS = {("plain", 100): 2e-6, ("packed", 100): 1e-6, ("plain", 2000): 20e-6, ("packed", 2000): 19.8e-6}
MEASURED = [
    Measured(rung, {"m": 1, "n": n}, 12 * n, n, (), Times(seconds, 0.9 * seconds))
    for (rung, n), seconds in SECONDS.items()
]


def test_all_studies_are_listed(llmcli: Llmcli) -> None:
    result = llmcli("kernels", "compare")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == study_names()


def test_a_terminal_gets_tables_and_no_escape_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("llmcli.cli.terminal.columns_of", lambda stream: 80)
    _show(STUDY, "sm_86, " + "words " * 30, MEASURED)
    shown = screen.getvalue()
    assert "\x1b[1m" in shown
    assert "\\x1b" not in shown
    assert max(len(line) for line in shown.split("Microseconds")[0].splitlines()) <= 80


def test_an_architecture_needs_no_card(llmcli: Llmcli) -> None:
    result = llmcli("kernels", "compare", "rmsnorm", "--arch", "sm_86")
    assert result.exit_code == 0, result.stderr
    assert "sm_86, compiled and not measured" in result.stdout
    assert "GB/s" not in result.stdout
    rungs = {
        one["rung"]: one
        for one in json.loads(llmcli("kernels", "compare", "rmsnorm", "--arch", "sm_86", "--json").stdout)["rungs"]
    }
    (kernel,) = rungs["one_warp"]["kernels"]
    assert (kernel["threads"], kernel["blocks"], kernel["limited_by"]) == (32, 1, ["blocks"])
    assert kernel["occupancy"] == pytest.approx(16 * 32 / 1536)  # 16 blocks of a warp, of 1,536 threads


def test_launches_that_are_alike_are_one_line(llmcli: Llmcli) -> None:
    told = json.loads(llmcli("kernels", "compare", "launch", "--arch", "sm_90", "--json").stdout)
    names = {one["rung"]: [kernel["name"] for kernel in one["kernels"]] for one in told["rungs"]}
    assert names["sixty_four"] == ["empty", "finish"]


def test_first_words_are_all_studies_that_begin_with_them(llmcli: Llmcli) -> None:
    names = ["decode_attention", "decode_cache", "decode_mlp"]
    result = llmcli("kernels", "compare", "decode", "--arch", "sm_90")
    assert result.exit_code == 0, result.stderr
    assert [line.partition(":")[0] for line in result.stdout.splitlines() if line.startswith("decode")] == names
    alone = [llmcli("kernels", "compare", name, "--arch", "sm_90").stdout for name in names]
    assert result.stdout == "\n".join(alone)
    for option in (("--json",), ("--csv",), ("--show", "plain"), ("--try", "mine.cu")):
        llmcli("kernels", "compare", "decode", *option).expect_error(2, "decode_attention, decode_cache, decode_mlp")


def test_what_show_prints_can_be_tried(llmcli: Llmcli, tmp_path: Path) -> None:
    mine = tmp_path / "mine.cu"
    shown = llmcli("kernels", "compare", "rmsnorm", "--show", "packed").stdout
    mine.write_text(shown.replace("rung packed", "rung mine"))
    result = llmcli("kernels", "compare", "rmsnorm", "--arch", "sm_90", "--try", mine, "--json")
    rungs = {one["rung"]: one["kernels"] for one in json.loads(result.stdout)["rungs"]}
    assert rungs["mine"] == rungs["packed"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nothing",), "run llmcli kernels compare to see them"),
        (("rmsnorm", "--show", "fastest"), "one_warp"),
        (("rmsnorm", "--json", "--csv"), "combined"),
        (("rmsnorm", "--try", "none.cu"), "none.cu"),
        (("rmsnorm", "--arch", "sm_12"), "sm_12"),
        (("rmsnorm", "--arch", "ampere"), "ampere"),
    ],
)
def test_what_is_not_there_is_refused(llmcli: Llmcli, arguments: tuple[str, ...], named: str) -> None:
    llmcli("kernels", "compare", *arguments).expect_error(2, named)


def test_a_file_that_is_no_rung_is_refused(llmcli: Llmcli, tmp_path: Path) -> None:
    mine = tmp_path / "mine.cu"
    mine.write_text("__global__ void f() {}\n")
    llmcli("kernels", "compare", "rmsnorm", "--arch", "sm_90", "--try", mine).expect_error(2, "has 0 rungs")


def test_an_error_in_the_reader_s_file_names_its_line(llmcli: Llmcli, tmp_path: Path) -> None:
    text = "// rung mine: mine\n// launch: f<<<1, 32>>>\n__global__ void f(float* x) {\n    x[0] = y;\n}\n"
    (tmp_path / "mine.cu").write_text(text)
    result = llmcli("kernels", "compare", "rmsnorm", "--arch", "sm_90", "--try", tmp_path / "mine.cu")
    result.expect_error(4, 'mine.cu(4): error: identifier "y" is undefined')


def test_without_a_card_the_way_out_is_named(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.kernels.device.find_problem", lambda: "there is no card")
    llmcli("kernels", "compare", "rmsnorm").expect_error(4, "there is no card", "--arch sm_86")


def test_sentences_have_the_numbers_and_the_verdict() -> None:
    first, second = map(finding_text, find_claims(STUDY, MEASURED))
    assert first == "packed is 2.00 times as fast as plain (1.00 us, 2.00 us) at m 1, n 100: four at once."
    assert second == (
        "Not here, though there is more to win: packed is 1.01 times as fast as plain (19.80 us, 20.00 us) at m 1, "
        "n 2,000."
    )


def test_tables_have_one_column_for_each_choice_of_sizes() -> None:
    lines = study_text(STUDY, MEASURED).splitlines()
    assert lines[0] == "Microseconds, m 1, by n"
    assert [line.split() for line in lines[1:4]] == [
        ["RUNG", "100", "2,000"],
        ["plain", "2.00", "20.00"],
        ["packed", "1.00", "19.80"],
    ]
    assert lines[5] == "At m 1, n 2,000: 0.1 operations for each byte that has to be moved"
    assert lines[7].split()[:3] == ["plain", "1.2", "0.1"]  # 24,000 bytes and 2,000 operations in 20 us


def test_a_study_of_launches_has_no_rates() -> None:
    """If next to nothing is moved or computed, rates are noise."""
    nothing = [dataclasses.replace(one, num_bytes=4, num_operations=0) for one in MEASURED]
    table = study_text(STUDY, nothing).splitlines()[5:]
    assert table[0] == "At m 1, n 2,000"
    assert table[1].split()[:2] == ["RUNG", "BLOCKS"]


def test_csv_and_json_have_seconds() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(MEASURED))))
    assert [(row["rung"], int(row["n"])) for row in rows] == list(SECONDS)
    assert [float(row["median_seconds"]) for row in rows] == list(SECONDS.values())
    told = json.loads(json.dumps(as_json(STUDY, "a card", "sm_90", MEASURED, find_claims(STUDY, MEASURED))))
    assert [one["holds"] for one in told["claims"]] == [True, False]
    assert told["rungs"][0]["fastest_seconds"] == pytest.approx(1.8e-6)
