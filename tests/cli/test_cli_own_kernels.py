"""`--kernel` as a user gives it: refusals without a card, and whole runs on a card that numpy simulates.

The simulated card's kernels do not change. The tests check the order of events, the messages and what is kept.
"""

import csv
import functools
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from docs_schemas import check_docs_schema
from own_kernel_example import FAULTS, NAME, example, write_example
from results import Llmcli, Result
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.cli import bench as bench_command
from llmcli.cli import device_choice
from llmcli.cli.own_kernels import change_text
from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.kernels.sources import flatten_text, text_digest
from llmcli.lab import verify as own_checks
from llmcli.lab.engine import CASES
from llmcli.lab.trial import Times
from llmcli.lab.verify import KernelVerdict
from llmcli.measure.bench import BenchReport, DecodeFigures, EngineFigures, KernelComparison, PromptFigures, Spread
from llmcli.receipt.receipt import load_receipt
from llmcli.runners.cuda.plan.memory import plan_memory
from llmcli.runners.cuda.plan.stored import StoredModel

PROMPT = "Once upon a time there was"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return write_example(tmp_path)


@pytest.mark.parametrize("command", [("generate", PROMPT), ("bench",)], ids=lambda command: command[0])
def test_without_a_card(llmcli: Llmcli, mine: Path, command: tuple[str, ...]) -> None:
    for flags in ((), ("--device", "auto")):
        result = llmcli(*command, *flags, "--kernel", f"{NAME}={mine}")
        result.expect_error(4, "--kernel is for models on a CUDA card, and no card can be used: ")
    result = llmcli(*command, "--device", "cpu", "--kernel", f"{NAME}={mine}")
    result.expect_error(4, "no card can be used: --device cpu was given")
    llmcli(*command, "--device", "cuda", "--kernel", f"{NAME}={mine}").expect_error(4, "--device cuda: there is no")


@pytest.mark.parametrize("command", [("generate", PROMPT), ("bench",)], ids=lambda command: command[0])
def test_what_cannot_be_is_told_first(llmcli: Llmcli, mine: Path, command: tuple[str, ...]) -> None:
    llmcli(*command, "--kernel", f"add_part={mine}").expect_error(2, "did you mean add_parts?")
    llmcli(*command, "--kernel", f"{NAME}={mine}x").expect_error(2, "mine.cux cannot be read: No such file")


def test_without_cupy(mine: Path) -> None:
    program = "import sys; sys.modules['cupy'] = None; from llmcli.cli.main import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "generate", PROMPT, "--device", "cpu", "--kernel", f"{NAME}={mine}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    Result(result.returncode, result.stdout, result.stderr).expect_error(4, "--device cpu was given")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("own") / "model", hidden_size=256, dtype=torch.bfloat16)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, model: Path) -> list[str]:
    """A simulated card on which every kernel passes its checks; its events, in order."""
    pytest.importorskip("cupy")
    from simulated_card import SimulatedDevice, simulate

    from llmcli.runners.cuda.load.model import load, needed_kernels

    happened: list[str] = []

    class OwnCard(SimulatedDevice):
        uses_own = True

        @contextmanager
        def engine_kernels(self) -> Iterator[None]:
            self.uses_own = False
            yield
            self.uses_own = True

        def prepare_all(self, wanted: Any, on_compile: Any = None) -> None:
            super().prepare_all(wanted)
            happened.append(f"prepare {'own' if self.uses_own else 'engine'} {len(wanted)}")

    stored = StoredModel.of_model(open_model(model))
    plan = plan_memory(stored, max_seq_len=100, num_rows=1, card=TYPICAL_CARD)
    needed = needed_kernels(open_model(model), plan, TYPICAL_CARD)
    plain = simulate(monkeypatch)  # its launchers take no part in a dry run
    monkeypatch.setattr(own_checks, "needed_kernels", lambda *arguments: needed)

    def open_card(index: int, own_sources: dict[str, str]) -> Any:
        happened.append(f"open {','.join(own_sources)}")
        device = OwnCard()
        device.own_sources = own_sources  # type: ignore[misc]
        return device

    def load_here(*arguments: Any, device: Any = None, card: int, **options: Any) -> Any:
        happened.append("load")
        return load(*arguments, device=device or plain, uses_graphs=False, **options)

    def verify(device: Any, cases: Any) -> KernelVerdict:
        happened.append(f"check {cases.stem}")
        return KernelVerdict(cases.stem, 54, 0, 0.5, "")

    monkeypatch.setattr(device_choice, "_card_problem", lambda index: None)
    monkeypatch.setattr("llmcli.kernels.device.Device.open", open_card)
    monkeypatch.setattr("llmcli.runners.cuda.load.model.load", load_here)
    monkeypatch.setattr(own_checks, "verify_kernel", verify)
    times = {"own": Times(2e-6, 1e-6), "engine": Times(3e-6, 2e-6)}
    monkeypatch.setattr(own_checks, "measure", lambda *arguments: times)
    monkeypatch.setattr(own_checks, "release_memory", lambda: happened.append("release"))
    return happened


@pytest.fixture
def generate(llmcli: Llmcli, model: Path) -> Llmcli:
    fixed = ("generate", PROMPT, "-m", model, "--seed", 3, "--max-new-tokens", 6, "--context", 100)
    return functools.partial(llmcli, *fixed)


def test_a_run_with_an_own_kernel(generate: Llmcli, card: list[str], mine: Path) -> None:
    plain = generate()
    card.clear()
    result = generate("--kernel", f"{NAME}={mine}")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == plain.stdout
    assert card[:2] == [f"open {NAME}", "prepare own 1"]
    assert re.fullmatch(r"prepare engine \d\d", card[2])  # all that the model launches
    assert card[3:6] == [f"check {NAME}", "release", "load"]
    first, alone, *_, prompt, step = result.stderr.splitlines()
    assert first == f"checking add_parts from {mine}: {len(list(CASES[NAME].checks()))} cases"
    assert alone == (
        "add_parts alone (num_parts 3, num_rows 256, num_columns 4,096): 2.00 us, llmcli's 3.00 us, 1.50 times as fast"
    )
    form = r"\d+\.\d{3} ms with yours, \d+\.\d{3} ms with llmcli's kernels, speed \(?[+-]\d+\.\d%\)?"
    assert re.fullmatch(rf"a prompt of 27 tokens: {form}", prompt)
    assert re.fullmatch(rf"a step of decoding: {form}", step)
    quiet = generate("--kernel", f"{NAME}={mine}", "--quiet")
    assert (quiet.stdout, quiet.stderr) == (plain.stdout, "")


def test_a_wrong_kernel_ends_the_run_before_weights_are_read(
    generate: Llmcli, card: list[str], mine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = KernelVerdict(NAME, 54, 2, 9.0, "scale, num_rows 6: out[1, 3] is 2, expected 1 within 0.1; 1 of 9 are")
    monkeypatch.setattr(own_checks, "verify_kernel", lambda device, cases: wrong)
    receipt = tmp_path / "receipt.json"
    result = generate("--kernel", f"{NAME}={mine}", "--receipt", receipt, "--quiet")
    result.expect_error(4, f"add_parts from {mine} is wrong in 2 of 54 cases: scale, num_rows 6: out[1, 3] is 2")
    assert "load" not in card
    assert not receipt.exists()


def test_the_receipt_names_the_source(
    llmcli: Llmcli, generate: Llmcli, card: list[str], mine: Path, tmp_path: Path
) -> None:
    plain, own = tmp_path / "plain.json", tmp_path / "own.json"
    told = generate("--receipt", plain)
    generate("--receipt", own, "--kernel", f"{NAME}={mine}")
    program = load_receipt(own).receipt.program
    assert program[f"kernel {NAME}"] == f"sha256 {text_digest(flatten_text(example(), 'another name'))}"
    assert {key: value for key, value in program.items() if key != f"kernel {NAME}"} == load_receipt(
        plain
    ).receipt.program
    result = llmcli("replay", own)
    assert (result.exit_code, result.stdout) == (0, told.stdout)
    differing = [line for line in result.stderr.splitlines() if line.startswith("warning: differs: ")]
    assert len(differing) == 1
    assert re.fullmatch(r"warning: differs: kernel add_parts 'sha256 [0-9a-f]{64}', now unset", differing[0])
    assert "Model, program and machine are as in the receipt" in llmcli("replay", plain).stderr


def test_another_source_has_another_digest(mine: Path) -> None:
    texts = [example(), example().replace(*FAULTS["a sign"]), f"\n{example()}"]
    digests = {text_digest(flatten_text(text, mine.name)) for text in texts}
    assert len(digests) == 3


def test_a_change_that_may_be_chance_stands_in_parentheses() -> None:
    own, engine = Spread(2.0, 1.9, 2.1, 5), Spread(3.0, 2.8, 3.2, 5)
    assert change_text(own, engine) == "+50.0%"
    assert change_text(engine, own) == "-33.3%"
    assert change_text(own, Spread(2.1, 2.05, 2.3, 5)) == "(+5.0%)"


def prompt_figures(seconds: float) -> PromptFigures:
    return PromptFigures(100, Spread(seconds, seconds, seconds, 3), Spread(1, 1, 1, 3), None, None, None)


def decode_figures(seconds: float) -> DecodeFigures:
    return DecodeFigures(50, 2, 8, Spread(seconds, 0.9, 1.1, 3), 10**9, 1.0, 0.5, None, None)


def report_of(engine: EngineFigures | None) -> BenchReport:
    figures = (prompt_figures(0.5),), (decode_figures(1.0),)
    return BenchReport("model", "int8", "card", "float16", 100, 1e12, 1.0, 32, None, "no meter", *figures, engine)


ENGINE = EngineFigures({NAME: "mine.cu"}, (prompt_figures(1.0),), (decode_figures(1.05),))


@pytest.fixture
def bench(llmcli: Llmcli, model: Path, card: list[str], mine: Path, monkeypatch: pytest.MonkeyPatch) -> Llmcli:
    """`bench` on the simulated card with made-up figures; `card` gets the kernels that are said to run."""

    def measure_subject(subject: Any, target: Any, planned: Any, runner: Any, *rest: Any) -> BenchReport:
        comparison: KernelComparison | None = rest[-1]
        if comparison is None:
            return report_of(None)
        with comparison.engine_kernels():
            card.append(f"compare {sorted(comparison.own_kernels)} on {runner.arithmetic.own_kernels.keys()}")
        return report_of(ENGINE)

    target = SimpleNamespace(description="A card", read_bytes=1e12)
    monkeypatch.setattr(bench_command, "open_target", lambda options, subject: target)
    monkeypatch.setattr("llmcli.measure.subject.plan_bench", lambda *given, **named: SimpleNamespace(num_rows=2))
    monkeypatch.setattr("llmcli.measure.energy.open_meter", lambda card: "no meter")
    monkeypatch.setattr("llmcli.measure.subject.measure_subject", measure_subject)
    return functools.partial(llmcli, "bench", model, "--prompt", 100, "--depth", 50, "--tokens", 8, "--rows", 2)


def test_bench_has_both_and_the_change(bench: Llmcli, card: list[str], mine: Path) -> None:
    result = bench("--kernel", f"{NAME}={mine}")
    assert result.exit_code == 0, result.stderr
    assert card.index(f"check {NAME}") < card.index("load")
    assert card[-1] == f"compare ['{NAME}'] on dict_keys(['{NAME}'])"
    lines = result.stdout.splitlines()
    assert f"your kernels      {NAME} from mine.cu; the checks of each are passed" in lines
    header, ours, yours = lines[lines.index("") + 1 :][:3]
    assert header.split()[-2:] == ["kernels", "change"]
    assert (ours.split()[1], ours.split()[-1]) == ("100.0", "llmcli")
    assert (yours.split()[1], *yours.split()[-2:]) == ("200.0", "yours", "+100.0%")
    assert lines[-3].split()[-2:] == ["yours", "(+5.0%)"]
    assert lines[-1] == "A change in parentheses may be chance: the runs of both overlap."

    facts = json.loads(bench("--kernel", f"{NAME}={mine}", "--json").stdout)
    check_docs_schema("bench", facts)
    assert facts["own_kernels"] == {NAME: "mine.cu"}
    assert "engine" not in facts
    (prompt,), (decode,) = facts["prompts"], facts["decode"]
    assert (prompt["tokens_per_second"], prompt["llmcli"]["tokens_per_second"], prompt["change"]) == (200, 100, 1.0)
    assert (decode["change"], decode["llmcli"]["step_seconds"]["median"]) == (pytest.approx(0.05), 1.05)
    rows = list(csv.DictReader(io.StringIO(bench("--kernel", f"{NAME}={mine}", "--csv").stdout)))
    found = [(row["figure"], row["kernels"], float(row["tokens_per_second"])) for row in rows]
    assert found[:2] == [("prompt", "llmcli", 100.0), ("decode", "llmcli", pytest.approx(2 / 1.05))]
    assert found[2:] == [("prompt", NAME, 200.0), ("decode", NAME, 2.0)]


def test_bench_without_the_option_is_as_ever(bench: Llmcli, card: list[str]) -> None:
    facts = json.loads(bench("--json").stdout)
    assert {"own_kernels", "engine"}.isdisjoint(facts)
    assert {"llmcli", "change"}.isdisjoint({*facts["prompts"][0], *facts["decode"][0]})
    text = bench().stdout
    assert "kernels" not in text
    rows = list(csv.DictReader(io.StringIO(bench("--csv").stdout)))
    assert [row["kernels"] for row in rows] == ["llmcli", "llmcli"]
    assert card == ["load"] * 3


def run_llmcli(*arguments: object) -> Any:
    """In a process of its own, on the machine as it is."""
    command = (sys.executable, "-m", "llmcli", *map(str, arguments))
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.cuda
def test_on_a_card_the_text_is_the_same_and_the_receipt_is_not(model: Path, mine: Path, tmp_path: Path) -> None:
    fixed = ("generate", PROMPT, "-m", model, "--seed", 3, "--max-new-tokens", 40, "--device", "cuda")
    plain = run_llmcli(*fixed, "--receipt", tmp_path / "plain.json")
    assert plain.returncode == 0, plain.stderr
    own = run_llmcli(*fixed, "--receipt", tmp_path / "own.json", "--kernel", f"{NAME}={mine}")
    assert own.returncode == 0, own.stderr
    assert own.stdout == plain.stdout  # it rounds as ours does
    assert f"checking add_parts from {mine}: " in own.stderr
    assert "add_parts alone (" in own.stderr
    assert "a step of decoding: " in own.stderr
    first, second = (load_receipt(tmp_path / f"{name}.json").receipt.program for name in ("plain", "own"))
    assert second.keys() - first.keys() == {f"kernel {NAME}"}
    again = run_llmcli("replay", tmp_path / "own.json")
    assert again.returncode == 0, again.stderr
    assert "differs: kernel add_parts 'sha256 " in again.stderr


@pytest.mark.cuda
def test_on_a_card_bench_measures_both(model: Path, mine: Path) -> None:
    lengths = ("--prompt", 100, "--depth", 50, "--tokens", 16, "--repeats", 3, "--device", "cuda")
    result = run_llmcli("bench", model, *lengths, "--kernel", f"{NAME}={mine}", "--json")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["own_kernels"] == {NAME: str(mine)}
    for item in (*facts["prompts"], *facts["decode"]):
        assert item["tokens_per_second"] > 0
        assert item["llmcli"]["tokens_per_second"] > 0
        assert abs(item["change"]) < 0.9
