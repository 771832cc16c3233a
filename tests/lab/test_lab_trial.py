"""Times of launches on a card: from a graph, by stream, overlapping."""

from functools import partial

import pytest

from llmcli.kernels.device import Device
from llmcli.lab.catalogue import make_problem
from llmcli.lab.ladder import load_study, solve
from llmcli.lab.trial import measure


@pytest.mark.cuda
def test_sixty_four_launches_take_longer_than_one(device: Device) -> None:
    study, source = load_study("launch")
    problem = make_problem("launches", {"num_blocks": 1})
    starts = {rung.name: partial(solve, device, rung, source, problem) for rung in study.rungs}
    times = measure(device, problem, starts, by_stream={rung.name for rung in study.rungs if rung.by_stream})
    assert set(times) == set(starts)
    for name in ("sixty_four", "sixty_four_by_stream"):
        assert times[name].median > 10 * times["one"].median
