"""The graphs of decoding: one for each number of lanes, and others while the user's kernels are left aside."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from llmcli.runners.cuda.lanes import DecodeLanes


class Stream:
    """Notes what is captured and launched."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.captured: list[bool] = []
        self.launched: list[bool] = []

    def begin_capture(self) -> None:
        self.captured.append(self._device.uses_own)

    def end_capture(self) -> Any:
        uses_own = self.captured[-1]
        return SimpleNamespace(launch=lambda stream: self.launched.append(uses_own))


def test_a_graph_keeps_the_kernels_it_was_captured_with() -> None:
    device: Any = SimpleNamespace(uses_own=True)
    device.stream = stream = Stream(device)
    nothing: Any = SimpleNamespace(
        device=device,
        hidden=np.zeros((8, 1)),
        run_lanes=lambda lanes: None,
        project_logits=lambda hidden, logits: None,
        enqueue=lambda **arrays: None,
        send=lambda target, source: None,
    )
    arrays: Any = SimpleNamespace(
        **dict.fromkeys(("lane_logits", "lane_rows", "lane_positions"), np.zeros(8)),
        slot_token_ids=None,
        page_table=None,
        history=None,
    )
    lanes = DecodeLanes(nothing, nothing, arrays, nothing)
    for uses_own in (True, False, False, True, True):
        device.uses_own = uses_own
        lanes.queue([0], [5])
    assert stream.captured == [True, False]
    assert stream.launched == [True, False, False, True, True]
