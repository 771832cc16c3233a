"""A table of shares: fitted to times, it is the one that made them."""

import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from llmcli.checkpoint.random_weights import shape_model
from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.runners.cuda.plan.memory import plan_memory
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.predict.dry_run import DryModel
from llmcli.runners.cuda.predict.predictor import HOPPER, Demand, Pricing, Rates, Shares
from scripts import measure_shares
from scripts.measure_shares import fit

RATES = Rates(4.5e12, {"float16": 7.2e14, "float32": 5e13})


@pytest.mark.parametrize("shares", [Shares(0.81, 0.3, 2.5), Shares(1.0, 0.09, 0.0), Shares(0.52, 1.0, 9.0)])
def test_the_shares_that_made_the_times_are_found(shares: Shares) -> None:
    generator = random.Random(0)
    times = []
    for _ in range(20):
        asked = Demand("kernel", *(10 ** generator.uniform(-7, -4.4) for _ in range(2)))
        seconds = max(asked.moving / shares.reading, asked.multiplying / shares.multiplying)
        times.append((asked, seconds + 1e-6 * shares.microseconds))
    found, error = fit(times)
    assert found.reading == pytest.approx(shares.reading, rel=0.06)
    assert found.multiplying == pytest.approx(shares.multiplying, rel=0.06)
    assert found.microseconds == pytest.approx(shares.microseconds, abs=0.7)
    assert error < 0.05


def test_a_share_that_no_time_shows_stays_whole() -> None:
    found, _ = fit([(Demand("kernel", 1e-6 * size, 0.0), 2e-6 * size) for size in (1, 10, 20)])
    assert found == Shares(pytest.approx(0.5, rel=0.02), 1.0, pytest.approx(0.0, abs=0.1))


def test_a_card_that_is_as_fast_as_the_table_gives_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every launch of a step takes what it is priced at."""
    stored = StoredModel.of_model(shape_model("Llama-3.1-8B", "int8"))
    pricing = Pricing(RATES, TYPICAL_CARD)

    def measure(subject: Any, lengths: Any, scratch: None) -> Any:
        plan = plan_memory(stored, max_seq_len=lengths.context, num_rows=lengths.rows)
        model = DryModel(plan, TYPICAL_CARD)
        launches = [one.launch for one in model.step(lengths.rows, lengths.depth)]
        launches += [one.launch for one in model.span(lengths.prompt, 0, is_last=True)]
        calls = [SimpleNamespace(launch=launch) for launch in launches]
        times = [SimpleNamespace(median=pricing.seconds(launch)) for launch in launches]
        device = SimpleNamespace(facts=TYPICAL_CARD)
        return device, RATES, [SimpleNamespace(walk=SimpleNamespace(calls=calls), calls=times)]

    subject = SimpleNamespace(model=shape_model("Llama-3.1-8B", "int8"))
    monkeypatch.setattr(measure_shares, "open_subject", lambda name, form: subject)
    monkeypatch.setattr(measure_shares, "measure_subject_kernels", measure)
    monkeypatch.setattr(measure_shares, "SIZES", ((1, 12), (8, 64), (256, 2048)))
    monkeypatch.setattr(sys, "argv", ["measure_shares", "model"])
    measure_shares.main()
    out = capsys.readouterr().out
    found = eval(f"{{{out}}}", {"Shares": Shares})  # as it would stand in pricing.py
    assert {"gemv", "gemm_narrow", "gemm_wide", "attention_decode", "attention_rows", "attention_prefill_wgmma"} < set(
        found
    )
    for name in ("gemv", "gemm_wide", "attention_prefill_wgmma"):
        assert found[name] == tuple(pytest.approx(value, rel=0.1, abs=0.5) for value in HOPPER[name]), name
    assert all(f"within {percent}%" in out for percent in (0, 1))
    assert "within 5%" not in out
