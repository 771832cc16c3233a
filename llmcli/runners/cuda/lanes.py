"""`DecodeLanes`: a decoding step in many lanes. Each number of lanes is captured once, as a graph.

A lane works for a slot. The card keeps each lane's slot and position, and advances the position itself. The host sends
them again only when the lanes change; the card need not stop for that.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmcli.runners.cuda.arena import Mailbox
from llmcli.runners.cuda.forward import Forward
from llmcli.runners.cuda.graphs import StepGraphs
from llmcli.runners.cuda.passes import Lanes
from llmcli.runners.cuda.sampling import DeviceSampler
from llmcli.runners.cuda.workspace import Workspace, num_lanes


class DecodeLanes:
    """Queues steps. `uses_graphs=False` launches the same kernels one by one.

    Attributes: logits float32 [lanes, vocab_size], from the latest step
    """

    def __init__(
        self,
        forward: Forward,
        sampler: DeviceSampler,
        workspace: Workspace[Any],
        mailbox: Mailbox,
        *,
        uses_graphs: bool = True,
    ):
        self.logits = workspace.lane_logits
        self._forward = forward
        self._sampler = sampler
        self._workspace = workspace
        self._mailbox = mailbox
        self._graphs: StepGraphs[int] = StepGraphs(forward.device, uses_graphs=uses_graphs)
        self._held_graphs: StepGraphs[int] = StepGraphs(forward.device, uses_graphs=uses_graphs)
        self._slots: list[int] = []  # each lane's slot, as the card has it
        self._held: list[bool] = []  # whether its choice has a mask
        self._positions: list[int] = []

    def queue(self, slots: Sequence[int], positions: Sequence[int], held: Sequence[bool]) -> None:
        """Run each slot's latest token at its position, and choose the next one where no mask is needed."""
        count = num_lanes(len(slots))
        self._place(list(slots), list(positions), list(held), count)
        self._positions = [position + 1 for position in positions]
        self._graphs.start(count, self._launch)

    def choose_held(self) -> None:
        """Choose for the lanes that need a mask, once the slots have theirs."""
        self._held_graphs.start(num_lanes(len(self._slots)), self._launch_held)

    def forget_positions(self) -> None:
        """Send the positions again with the next step: the card does not advance a row that failed to choose."""
        self._positions = []

    def _place(self, slots: list[int], positions: list[int], held: list[bool], count: int) -> None:
        workspace = self._workspace
        if slots != self._slots or held != self._held:
            rows, is_held = np.full(count, -1, np.int32), np.zeros(count, np.bool_)
            rows[: len(slots)], is_held[: len(slots)] = slots, held
            self._mailbox.send(workspace.lane_rows[:count], rows)
            self._mailbox.send(workspace.free_rows[:count], np.where(is_held, np.int32(-1), rows))
            self._mailbox.send(workspace.held_rows[:count], np.where(is_held, rows, np.int32(-1)))
        if slots != self._slots or positions != self._positions:
            places = np.zeros(count, np.int32)
            places[: len(slots)] = positions
            self._mailbox.send(workspace.lane_positions[:count], places)
        self._slots, self._held = slots, held

    def _launch(self, count: int) -> None:
        workspace = self._workspace
        rows, positions = workspace.lane_rows[:count], workspace.lane_positions[:count]
        self._forward.run(Lanes(workspace.slot_token_ids, rows, rows, positions, workspace.page_table))
        self._forward.project_logits(self._forward.hidden[:count], self.logits[:count])
        self._choose(workspace.free_rows[:count], count)

    def _launch_held(self, count: int) -> None:
        self._choose(self._workspace.held_rows[:count], count)

    def _choose(self, rows: Any, count: int) -> None:
        workspace = self._workspace
        self._sampler.enqueue(
            logits=self.logits[:count],
            rows=rows,
            positions=workspace.lane_positions[:count],
            token_ids=workspace.slot_token_ids,
            history=workspace.history,
        )
