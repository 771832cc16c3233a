"""Launches from a graph, by stream, overlapping: how a study requests them, and times on a card."""

from functools import partial
from typing import Any

import pytest

from llmcli.kernels.card_facts import TYPICAL_CARD
from llmcli.kernels.device import Device
from llmcli.lab import compare
from llmcli.lab.catalogue import make_problem
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.study import load_study, solve
from llmcli.lab.trial import Times, measure


def test_overlapping_launches_are_bound_as_such() -> None:
    study, source = load_study("launch")
    problem = make_problem("launches", {"num_blocks": 3})
    for rung in study.rungs:
        notes = Notes()
        solve(notes, rung, source, problem, phantoms_of(problem))
        assert {launch.overlaps for launch in notes.launches} == {rung.name == "overlapping"}
        assert {launch.grid for launch in notes.launches} == {(3,)}


def test_rungs_by_stream_are_measured_by_stream(monkeypatch: pytest.MonkeyPatch, nvrtc: None) -> None:
    asked = []

    def note(device: Any, problem: Any, starts: Any, by_stream: Any) -> dict[str, Times]:
        asked.append(set(by_stream))
        return dict.fromkeys(starts, Times(1e-6, 1e-6))

    class Card(Notes):
        arch, facts = "sm_90", TYPICAL_CARD

    monkeypatch.setattr(compare, "measure", note)
    monkeypatch.setattr(compare, "check", lambda *arguments: None)
    study, source = load_study("launch")
    sources = dict.fromkeys((rung.name for rung in study.rungs), source)
    compare.compare_rungs(Card(), study, sources, study.rungs)  # type: ignore[arg-type]
    assert asked == [{"eight_by_stream", "sixty_four_by_stream"}] * len(study.sizes)


@pytest.mark.cuda
@pytest.mark.whole_card
def test_sixty_four_launches_take_longer_than_one(device: Device) -> None:
    study, source = load_study("launch")
    problem = make_problem("launches", {"num_blocks": 1})
    starts = {rung.name: partial(solve, device, rung, source, problem) for rung in study.rungs}
    times = measure(device, problem, starts, by_stream={rung.name for rung in study.rungs if rung.by_stream})
    assert set(times) == set(starts)
    for name in ("sixty_four", "sixty_four_by_stream"):
        assert times[name].median > 10 * times["one"].median
