"""`DraftLanes`: a step of a few rows in which some have drafts. Each token has a lane; the card decides which to keep.

All lanes run in one pass over the weights. Then the choices follow one by one: each checks the next draft and removes
the lanes after a wrong one. So a row's history, sampler and last token are those that single steps leave.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmcli.errors import CheckpointError, UsageError
from llmcli.runners.base import MAX_SPAN, Chosen
from llmcli.runners.cuda.arena import Mailbox, copy
from llmcli.runners.cuda.forward import Forward
from llmcli.runners.cuda.graphs import StepGraphs
from llmcli.runners.cuda.passes import Lanes
from llmcli.runners.cuda.sampling import DeviceSampler
from llmcli.runners.cuda.step_masks import WorkMasks
from llmcli.runners.cuda.workspace import Workspace
from llmcli.runners.interrupts import interrupts_held_back
from llmcli.runners.step_device import Work
from llmcli.sampling.chain import Choice


class DraftLanes:
    """Queues such steps. `uses_graphs=False` launches the same kernels one by one.

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
        self.logits = workspace.score_logits[:MAX_SPAN]
        self._forward = forward
        self._sampler = sampler
        self._workspace = workspace
        self._mailbox = mailbox
        self._graphs: StepGraphs[tuple[int, int]] = StepGraphs(forward.device, uses_graphs=uses_graphs)

    def queue(self, works: Sequence[Work], masks: Sequence[WorkMasks]) -> None:
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
        self._graphs.start((count, len(works)), self._launch)
        for first, work, made in zip(firsts, works, masks, strict=True):
            self._choose(first, work, made)

    def _launch(self, shape: tuple[int, int]) -> None:
        count, num_rows = shape
        token_ids, rows, positions = (self._workspace.drafted[place, :count] for place in range(3))
        page_table = self._workspace.page_table
        self._forward.run(Lanes(token_ids, None, rows, positions, page_table, num_spans=num_rows))
        self._forward.project_logits(self._forward.hidden[:count], self.logits[:count])

    def _choose(self, first: int, work: Work, masks: WorkMasks) -> None:
        assert work.slot is not None
        workspace, num_drafts = self._workspace, len(work.drafts)
        token_ids, rows, positions = (workspace.drafted[place] for place in range(3))
        for lane in range(first, first + num_drafts + 1):
            this, following = slice(lane, lane + 1), slice(lane + 1, lane + 2)
            has_draft = lane < first + num_drafts
            self._sampler.allow(work.slot, masks.mask(lane - first))
            self._sampler.enqueue(
                logits=self.logits[this],
                rows=rows[this],
                positions=positions[this],
                token_ids=workspace.slot_token_ids,
                history=workspace.history,
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
