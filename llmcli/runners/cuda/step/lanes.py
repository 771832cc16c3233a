"""Steps in lanes: `DecodeLanes` queues them, one token a row or rows with drafts; `StepGraphs` starts them.

Each number of lanes is captured once, as a graph. A lane works for a slot. The card keeps each lane's slot and
position, and advances the position itself. The host sends them again only when the lanes change; the card need not
stop for that.

With drafts each token has a lane, and all run in one pass over the weights. Then the choices follow one by one: each
checks the next draft and removes the lanes after a wrong one. So a row's history, sampler and last token are those that
single steps leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np

from llmcli.errors import CheckpointError, UsageError
from llmcli.kernels.device import Device, device_errors
from llmcli.runners.base import MAX_SPAN, Chosen
from llmcli.runners.cuda.plan.workspace import Workspace, num_lanes
from llmcli.runners.cuda.step.arena import Mailbox, copy
from llmcli.runners.cuda.step.batch import Batch
from llmcli.runners.cuda.step.forward import Forward
from llmcli.runners.cuda.step.sampling import DeviceSampler, WorkMasks
from llmcli.runners.interrupts import interrupts_held_back
from llmcli.runners.step_device import Work
from llmcli.sampling.chain import Choice

S = TypeVar("S")


class StepGraphs:
    """Starts the launches of steps. `uses_graphs=False` launches them anew each time.

    A step's kind and shape are everything that decides its launches; the shape is such as the number of lanes.

    It keeps no reference to its caller: a cycle would keep an unused model on the card.
    """

    def __init__(self, device: Device, *, uses_graphs: bool):
        self._device = device
        self._uses_graphs = uses_graphs
        self._graphs: dict[Hashable, Any] = {}  # by whether own kernels are in them, kind and shape

    def start(self, kind: str, shape: S, launch: Callable[[S], None]) -> None:
        """Queue what `launch` launches for a shape; each call with that kind and shape must launch the same."""
        if not self._uses_graphs:
            launch(shape)
            return
        key = self._device.uses_own, kind, shape
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(shape, launch)
        with device_errors():
            graph.launch(self._device.stream)

    def _capture(self, shape: S, launch: Callable[[S], None]) -> Any:
        stream = self._device.stream
        with device_errors():
            stream.begin_capture()
            try:
                launch(shape)
            finally:
                graph = stream.end_capture()
        return graph


class DecodeLanes:
    """Queues steps. `uses_graphs=False` launches the same kernels one by one.

    Attributes: logits float32 [lanes, vocab_size], from the latest step; draft_logits, from the latest one with drafts
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
        self.logits, self.draft_logits = workspace.lane_logits, workspace.score_logits[:MAX_SPAN]
        self._forward = forward
        self._sampler = sampler
        self._workspace = workspace
        self._mailbox = mailbox
        self._graphs = StepGraphs(forward.device, uses_graphs=uses_graphs)
        self._slots: list[int] = []  # each lane's slot, as the card has it
        self._held: list[bool] = []  # whether its choice has a mask
        self._positions: list[int] = []

    def queue(self, slots: Sequence[int], positions: Sequence[int], held: Sequence[bool]) -> None:
        """Run each slot's latest token at its position, and choose the next one where no mask is needed."""
        count = num_lanes(len(slots))
        self._place(list(slots), list(positions), list(held), count)
        self._positions = [position + 1 for position in positions]
        self._graphs.start("lanes", count, self._launch)

    def choose_held(self) -> None:
        """Choose for the lanes that need a mask, once the slots have theirs."""
        rows = self._workspace.held_rows
        self._graphs.start("held", num_lanes(len(self._slots)), lambda count: self._choose(rows[:count], count))

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
        self._forward.run(Batch(workspace.slot_token_ids, rows, positions, workspace.page_table, count, by_row=True))
        self._forward.project_logits(self._forward.hidden[:count], self.logits[:count])
        self._choose(workspace.free_rows[:count], count)

    def _choose(self, rows: Any, count: int) -> None:
        positions = self._workspace.lane_positions[:count]
        self._sampler.enqueue(logits=self.logits[:count], rows=rows, positions=positions)

    def queue_drafts(self, works: Sequence[Work], masks: Sequence[WorkMasks]) -> None:
        """Run each row's latest token and its drafts, MAX_SPAN tokens at most, and choose.

        The slots already hold the page tables, and first tokens that `latest` does not name. Masks are made while the
        card works.
        """
        token_ids: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        firsts = []
        for work in works:
            assert work.slot is not None
            firsts.append(len(slots))
            token_ids += (work.latest or 0, *work.drafts)
            slots += [work.slot] * work.num_tokens
            positions += range(work.position, work.position + work.num_tokens)
        count = len(slots)
        lanes = np.zeros((3, MAX_SPAN), np.int32)
        lanes[:, :count] = token_ids, slots, positions
        self._mailbox.send(self._workspace.drafted, lanes)
        for first, work in zip(firsts, works, strict=True):
            if work.latest is None:  # the host has not read it, but the card has it
                of_lane, of_slot = self._workspace.drafted[0, first : first + 1], slice(slots[first], slots[first] + 1)
                copy(self._forward.device, of_lane, self._workspace.slot_token_ids[of_slot])
        self._graphs.start("drafts", (count, len(works)), self._launch_drafts)
        for first, work, made in zip(firsts, works, masks, strict=True):
            self._choose_drafts(first, work, made)

    def _launch_drafts(self, shape: tuple[int, int]) -> None:
        count, num_rows = shape
        token_ids, rows, positions = (self._workspace.drafted[place, :count] for place in range(3))
        self._forward.run(Batch(token_ids, rows, positions, self._workspace.page_table, num_rows))
        self._forward.project_logits(self._forward.hidden[:count], self.draft_logits[:count])

    def _choose_drafts(self, first: int, work: Work, masks: WorkMasks) -> None:
        assert work.slot is not None
        num_drafts = len(work.drafts)
        token_ids, rows, positions = (self._workspace.drafted[place] for place in range(3))
        for lane in range(first, first + num_drafts + 1):
            this, following = slice(lane, lane + 1), slice(lane + 1, lane + 2)
            has_draft = lane < first + num_drafts
            self._sampler.allow(work.slot, masks.mask(lane - first))
            self._sampler.enqueue(
                logits=self.draft_logits[this],
                rows=rows[this],
                positions=positions[this],
                next_row=rows[following] if has_draft else None,
                draft=token_ids[following] if has_draft else None,
            )


class DraftChoices:
    """The choices of a row with drafts. Their number is known once they are read.

    Make it when the step is queued.
    """

    def __init__(self, sampler: DeviceSampler, work: Work):
        assert work.slot is not None
        self._sampler = sampler
        self._slot = work.slot
        self._position = work.position
        self._drafts = work.drafts
        self._first_run = sampler.num_runs(work.slot) + 1
        self._queued_at = time.perf_counter()
        self._chosen: Chosen | None = None

    def read(self) -> Chosen:
        """Wait for the choices and count the sampler's runs; a choice that fails after a kept draft is left out.

        Read them before the slot runs again.
        """
        if self._chosen is None:
            chosen, num_runs = self._read()
            with interrupts_held_back():
                for _ in range(num_runs):
                    self._sampler.count_run(self._slot)
                self._chosen = chosen
        return self._chosen

    def _read(self) -> tuple[Chosen, int]:
        choices: list[Choice] = []
        for place, draft in enumerate((*self._drafts, None)):
            try:
                run, position = self._first_run + place, self._position + place + 1
                choice = self._sampler.choice(self._slot, run, position, queued_at=self._queued_at)
            except (CheckpointError, UsageError) as error:
                return tuple(choices) or error, place + 1
            choices.append(choice)
            if choice.token_id != draft:
                break
        return tuple(choices), len(choices)


def with_drafts(works: Sequence[Work], lanes: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """The lanes that run alone, and the passes of works with drafts. Lanes join a pass if all fit in one.

    Works are named by index.
    """
    drafted = [place for place, work in enumerate(works) if work.drafts]
    if drafted and sum(works[place].num_tokens for place in (*drafted, *lanes)) <= MAX_SPAN:
        return [], [[*drafted, *lanes]]
    passes: list[list[int]] = []
    room = 0
    for place in drafted:
        if works[place].num_tokens > room:
            passes.append([])
            room = MAX_SPAN
        passes[-1].append(place)
        room -= works[place].num_tokens
    return list(lanes), passes
