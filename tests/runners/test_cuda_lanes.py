"""The graphs of decoding: one for each number of lanes, and others while the user's kernels are off."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from row_steps import GREEDY, PROMPT
from side_by_side import tell
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.kernels.device import Device
from llmcli.kernels.registry import KERNELS
from llmcli.kernels.sources import flatten
from llmcli.runners.cuda.step.lanes import DecodeLanes


class Stream:
    """Records captures and launches."""

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
        run=lambda lanes: None,
        hidden=np.zeros(8),
        project_logits=lambda hidden, logits: None,
        enqueue=lambda **arrays: None,
        send=lambda target, source: None,
    )
    arrays: Any = SimpleNamespace(
        **dict.fromkeys(
            ("lane_logits", "score_logits", "lane_rows", "lane_positions", "free_rows", "held_rows"), np.zeros(8)
        ),
        slot_token_ids=None,
        page_table=None,
        history=None,
    )
    lanes = DecodeLanes(nothing, nothing, arrays, nothing)
    for uses_own in (True, False, False, True, True):
        device.uses_own = uses_own
        lanes.queue([0], [5], [False])
    assert stream.captured == [True, False]
    assert stream.launched == [True, False, False, True, True]


@pytest.mark.cuda
def test_a_loaded_model_decodes_with_either(tmp_path: Path) -> None:
    """Another, unchecked embedding gives another text; without it the bits are those of any runner."""
    from llmcli.runners.cuda.load.model import load

    model = open_model(write_tiny_llama(tmp_path / "model", with_tokenizer=False))
    ours = flatten("embedding")
    other = ours.replace("id % TILE_ROWS", "(id ^ 1) % TILE_ROWS")
    assert other != ours
    device = Device.open(0, {"embedding": other})
    runner = load(model, max_seq_len=64, device=device)
    expected = tell(load(model, max_seq_len=64, device=Device.open(0)), PROMPT[:10], GREEDY, 12)
    # Ten tokens fill no page, so no way finds what the other has computed.
    own = tell(runner, PROMPT[:10], GREEDY, 12)
    with device.engine_kernels():
        device.prepare("embedding", KERNELS["embedding"].variants)
        assert tell(runner, PROMPT[:10], GREEDY, 12) == expected
    assert own != expected
    assert tell(runner, PROMPT[:10], GREEDY, 12) == own
    assert runner.arithmetic.own_kernels.keys() == {"embedding"}
