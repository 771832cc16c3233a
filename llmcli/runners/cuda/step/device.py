"""`CudaDevice`: the `StepDevice` of one card. It queues a step on the card's stream; the results are read later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli.config.llama import LlamaConfig
from llmcli.errors import LLMCliError
from llmcli.kernels.device import Moment
from llmcli.runners.base import PAGE_TOKENS, AllLogits, Arithmetic, Chosen, HiddenStates, Limits
from llmcli.runners.cuda.plan.workspace import Workspace
from llmcli.runners.cuda.step.arena import Mailbox, fetch, send
from llmcli.runners.cuda.step.batch import SpanSender, method_of, prompt_passes
from llmcli.runners.cuda.step.forward import Forward
from llmcli.runners.cuda.step.lanes import DecodeLanes, DraftChoices, with_drafts
from llmcli.runners.cuda.step.sampling import DeviceSampler, SamplerRun, WorkMasks
from llmcli.runners.interrupts import interrupts_held_back
from llmcli.runners.step_device import SINGLE, Work
from llmcli.sampling.candidates import TokenMask
from llmcli.sampling.params import Sampler


class CudaDevice:
    """See `StepDevice`. It computes a prompt in chunks of `chunk_tokens`. Their length decides how they are multiplied.

    A token's product has the same bits with any number of others. So a chunk may be cut at every page, other prompts
    may share its beginning, and prompts multiplied in the same way share passes.
    """

    def __init__(
        self,
        forward: Forward,
        sampler: DeviceSampler,
        workspace: Workspace[Any],
        mailbox: Mailbox,
        *,
        uses_graphs: bool,
        limits: Limits,
        cache_type: str,
        description: str,
        arithmetic: Arithmetic,
    ):
        self.config: LlamaConfig = forward.config
        self.description = description
        self.cache_type = cache_type
        self.arithmetic = arithmetic
        self.limits = limits
        self.num_steps = 0  # that have been queued
        self._forward = forward
        self._lanes = DecodeLanes(forward, sampler, workspace, mailbox, uses_graphs=uses_graphs)
        self._sampler = sampler
        self._workspace = workspace
        self._mailbox = mailbox
        self._span_sender = SpanSender(workspace, mailbox)
        self._tables: list[list[int]] = [[] for _ in range(limits.num_rows)]  # each slot's pages, as the card has them
        self._no_masks = WorkMasks(None, self.config.vocab_size)
        self._drafted: dict[int, DraftChoices] = {}  # each slot's latest, if its latest run had drafts

    def method(self, position: int, prompt_len: int) -> int:
        """The method for the token's chunk, by its length: token by token, as rows, or in one chunk of inputs."""
        return method_of(min(self._forward.chunk_tokens, prompt_len - self._chunk_begin(position)))

    def cut(self, position: int, prompt_len: int) -> int:
        """The start of the page."""
        return position // PAGE_TOKENS * PAGE_TOKENS

    def span_end(self, position: int, most: int, prompt_len: int) -> int:
        """The end of a page about `most` tokens on, or the end of the chunk."""
        end = min(self._chunk_begin(position) + self._forward.chunk_tokens, prompt_len)
        if position + most >= end or self.method(position, prompt_len) == SINGLE:
            return end
        return min(max((position + most) // PAGE_TOKENS, position // PAGE_TOKENS + 1) * PAGE_TOKENS, end)

    def copy_page(self, source: int, target: int) -> None:
        """Copy the keys and values of a page."""
        self._forward.copy_page(source, target)

    def set_slot(self, slot: int, sampler: Sampler, token_ids: Sequence[int]) -> None:
        """Give a slot its sampler and the first tokens of its row."""
        self._count_drafted(slot)
        self._sampler.set_sampler(slot, sampler)
        self._send_history(slot, 0, token_ids)

    def set_sampler(self, slot: int, sampler: Sampler) -> None:
        """Give a slot another sampler."""
        self._count_drafted(slot)
        self._sampler.set_sampler(slot, sampler)

    def run(self, works: Sequence[Work]) -> CudaStep:
        """Queue a step: all lanes in one pass, those with drafts in passes of their own, then prompts in theirs."""
        if any(work.choose == "none" and not work.token_ids for work in works):
            raise ValueError("a span that does not choose names its tokens")
        # Card and host must agree on the number of runs and on positions, or the next step would be misread.
        with interrupts_held_back():
            return self._run(works)

    def hidden_states(self, work: Work, inputs: HiddenStates | None) -> HiddenStates:
        """Run a work layer by layer; see `StepDevice.hidden_states`."""
        with interrupts_held_back():
            self.num_steps += 1
            layers = self._forward.by_layer(self._span_sender.send([work]))
            self._send_history(work.slot, work.position, work.token_ids)
        states = []
        for index, hidden in enumerate(layers):
            states.append(fetch(self._forward.device, hidden))
            if inputs is not None:
                send(self._forward.device, hidden, inputs[index])
        return np.stack(states)

    def _run(self, works: Sequence[Work]) -> CudaStep:
        self.num_steps += 1
        runs: list[Sequence[SamplerRun]] = [()] * len(works)
        masks = [self._masks_of(work) for work in works]
        # Sorted by slot: the lanes then change only when rows join or leave.
        lanes = [place for place, work in enumerate(works) if _is_lane(work)]
        others = sorted(set(range(len(works))).difference(lanes))
        lanes.sort(key=lambda place: works[place].slot or 0)
        lanes, passes = with_drafts(works, lanes)
        if lanes:
            self._run_lanes([works[place] for place in lanes], [masks[place] for place in lanes])
            for place in lanes:
                runs[place] = (self._count_run(works[place], works[place].position + 1),)
        for place in others:
            work = works[place]
            if work.logits is not None:
                self._choose_from(work, work.logits, masks[place])
                runs[place] = (self._count_run(work, work.position),)
        drafted: dict[int, DraftChoices] = {}
        for places in passes:
            drafted |= self._run_drafts({place: works[place] for place in places}, masks)
        spans = [place for place in others if works[place].logits is None and not works[place].drafts]
        last, timed = passes[-1] if passes else [], None
        if spans:  # timing takes the host some microseconds, and decoding is not timed
            begin = self._forward.device.now()
            for last in prompt_passes(works, spans, self._forward.chunk_tokens):
                found = self._run_spans([works[place] for place in last], [masks[place] for place in last])
                for place, of_work in zip(last, found, strict=True):
                    runs[place] = of_work
            timed = begin, self._forward.device.now()
        read = self._read_span if spans else self._read_drafted
        return CudaStep(self, works, runs, drafted, masks, lanes, last, read, timed, self.num_steps)

    def _run_lanes(self, works: Sequence[Work], masks: Sequence[WorkMasks]) -> None:
        slots = [self._prepare_slot(work) for work in works]
        held = [work.masks is not None for work in works]
        self._sampler.allow_any([slot for slot, is_held in zip(slots, held, strict=True) if not is_held])
        self._lanes.queue(slots, [work.position for work in works], held)
        if any(held):
            made = {slot: one.mask(0) for slot, one in zip(slots, masks, strict=True)}  # the card works meanwhile
            self._sampler.allow_all({slot: mask for slot, mask in made.items() if mask is not None})
            self._lanes.choose_held()

    def _run_drafts(self, works: Mapping[int, Work], masks: Sequence[WorkMasks]) -> dict[int, DraftChoices]:
        """Queue one pass of lanes with drafts, and their choices; returns these by the work's index."""
        drafted = {}
        for place, work in works.items():
            slot = self._prepare_slot(work)
            drafted[place] = self._drafted[slot] = DraftChoices(self._sampler, work)
        self._lanes.queue_drafts(list(works.values()), [masks[place] for place in works])
        return drafted

    def _prepare_slot(self, work: Work) -> int:
        """Give a slot its pages and the token that runs next; returns the slot."""
        assert work.slot is not None
        self._count_drafted(work.slot)
        self._send_table(work.slot, work.pages)
        if work.token_ids:
            token_ids = np.array(work.token_ids, np.int32)
            self._mailbox.send(self._workspace.slot_token_ids[work.slot : work.slot + 1], token_ids)
            self._send_history(work.slot, work.position, work.token_ids)
        return work.slot

    def _masks_of(self, work: Work) -> WorkMasks:
        return self._no_masks if work.masks is None else WorkMasks(work.masks, self.config.vocab_size)

    def _run_spans(self, works: Sequence[Work], masks: Sequence[WorkMasks]) -> list[list[SamplerRun]]:
        """Queue a pass of spans whose tokens the host knows, and their choices; returns the runs of each span."""
        run = self._span_sender.send(works)
        ends = list(accumulate(work.num_tokens for work in works))
        read = (_read_behind(work, end) for work, end in zip(works, ends, strict=True))
        self._forward.run(run, list(chain.from_iterable(read)))
        for work in works:  # sampling reads it, layers do not
            self._send_history(work.slot, work.position, work.token_ids)
        behind = [_choices_behind(work, end) for work, end in zip(works, ends, strict=True)]
        places = list(chain.from_iterable(behind))
        logits = self._workspace.score_logits[: len(places)]
        if places:
            self._forward.project_logits(self._forward.outputs_of(places), logits)
        lasts = accumulate(len(of_work) for of_work in behind)
        return [
            self._choose_behind(work, of_work, logits[last - len(of_work) : last], made, run.positions)
            for work, of_work, last, made in zip(works, behind, lasts, masks, strict=True)
        ]

    def _choose_behind(
        self, work: Work, places: range, logits: Any, masks: WorkMasks, positions: Any
    ) -> list[SamplerRun]:
        """Queue a span's choices after its last tokens; `places` are the indices of these tokens in the pass."""
        runs = []
        for number, place in enumerate(places):
            # One by one: a choice reads the tokens before it. The span's next token then replaces the chosen one.
            mask, end = masks.mask(number), work.position + work.num_tokens - len(places) + number + 1
            self._sample(work, logits[number : number + 1], positions[place : place + 1], mask)
            runs.append(self._count_run(work, end))
            if number + 1 < len(places) and work.slot is not None:
                self._send_history(work.slot, end, work.token_ids[end - work.position :][:1])
        return runs

    def _choose_from(self, work: Work, logits: Any, masks: WorkMasks) -> None:
        on_card, position = self._workspace.score_logits[:1], self._workspace.spans[:1]
        self._mailbox.send(on_card, np.asarray(logits, np.float32).reshape(1, -1))
        self._mailbox.send(position, np.array([work.position - 1], np.int32))
        self._sample(work, on_card, position, masks.mask(0))

    def _sample(self, work: Work, logits: Any, positions: Any, mask: TokenMask | None) -> None:
        assert work.slot is not None
        self._count_drafted(work.slot)
        self._sampler.allow(work.slot, mask)
        slot = self._workspace.slot_numbers[work.slot : work.slot + 1]
        self._sampler.enqueue(logits=logits, rows=slot, positions=positions)

    def _count_drafted(self, slot: int) -> None:
        """Wait for a slot's choices after drafts: their number decides the number of its next run."""
        drafted = self._drafted.pop(slot, None)
        if drafted is not None:
            drafted.read()

    def _count_run(self, work: Work, position: int) -> SamplerRun:
        assert work.slot is not None
        return SamplerRun(work.slot, self._sampler.count_run(work.slot), position)

    def _send_table(self, slot: int, pages: list[int]) -> None:
        """Send the pages that the card does not have yet: usually none, or the last one."""
        held = self._tables[slot]
        if held == pages:
            return
        begin = len(held) if pages[: len(held)] == held else 0
        held[begin:] = pages[begin:]
        if begin < len(pages):
            new = np.array(pages[begin:], np.int32)
            self._mailbox.send(self._workspace.page_table[slot, begin : len(pages)], new)

    def _send_history(self, slot: int | None, position: int, token_ids: npt.ArrayLike) -> None:
        if slot is None:
            return
        values = np.asarray(token_ids, np.int32)
        self._mailbox.send(self._workspace.history[slot, position : position + len(values)], values)

    def _chunk_begin(self, position: int) -> int:
        return position // self._forward.chunk_tokens * self._forward.chunk_tokens

    def _read_drafted(self, first: int, count: int) -> AllLogits:
        """The logits of lanes of the latest pass with drafts. Shapes: result [count, vocab_size]"""
        return fetch(self._forward.device, self._lanes.draft_logits[first : first + count])

    def _read_span(self, first: int, count: int) -> AllLogits:
        """The logits after each of `count` tokens of the latest pass of spans. Shapes: result [count, vocab_size]"""
        return self._forward.logits_of_span(first, first + count)

    # Called by CudaStep to read results

    def read_choices(self, runs: Sequence[Sequence[SamplerRun]]) -> list[Chosen]:
        """The choices of each work's sampler runs, or the error of its first run that failed."""
        found = self._sampler.choices([run for of_work in runs for run in of_work])
        rest = iter(found)
        chosen: list[Any] = [tuple(islice(rest, len(of_work))) for of_work in runs]
        if any(isinstance(one, LLMCliError) for one in found):
            self._lanes.forget_positions()
            chosen = [next((one for one in of_work if isinstance(one, LLMCliError)), of_work) for of_work in chosen]
        return chosen

    def wait(self) -> None:
        """Wait for all queued work."""
        self._forward.device.synchronize()

    def read_lane(self, lane: int) -> AllLogits:
        """The logits of a lane of the latest step. Shapes: result [1, vocab_size]"""
        return fetch(self._forward.device, self._lanes.logits[lane : lane + 1])


@dataclass(eq=False)
class CudaStep:
    """A step that has been queued.

    Attributes: runs: each work's sampler runs; drafted: the choices of those with drafts, by index; lanes: indices of
    the works that are lanes; last: those of the last pass of others; read_last: reads some of its logits; timed: the
    moments before and after the passes of spans, None if there are none
    """

    device: CudaDevice
    works: Sequence[Work]
    runs: Sequence[Sequence[SamplerRun]]
    drafted: Mapping[int, DraftChoices]
    masks: Sequence[WorkMasks]
    lanes: list[int]
    last: list[int]
    read_last: Callable[[int, int], AllLogits]
    timed: tuple[Moment, Moment] | None
    number: int
    _chosen: list[Chosen] | None = None  # once they are read

    def choices(self) -> list[Chosen]:
        """See `Step.choices`. Waits even for a step that chooses nothing."""
        if not any(self.runs) and not self.drafted:
            self.device.wait()
        if self._chosen is None:
            chosen = self.device.read_choices(self.runs)
            for place, drafted in self.drafted.items():
                chosen[place] = drafted.read()
            self._chosen = [made.error or found for made, found in zip(self.masks, chosen, strict=True)]
        return self._chosen

    def logits(self, span: int, first: int = 0) -> AllLogits:
        """See `Step.logits`. Raises: ValueError if they have been overwritten"""
        work = self.works[span]
        if work.logits is not None:
            return work.logits.reshape(1, -1)
        if self.number != self.device.num_steps or span not in (*self.lanes, *self.last):
            raise ValueError("the logits of this span have been overwritten")
        if span in self.lanes:
            return self.device.read_lane(self.lanes.index(span))
        before = sum(self.works[place].num_tokens for place in self.last[: self.last.index(span)])
        return self.read_last(before + first, work.num_tokens - first)

    def prompt_seconds(self) -> float:
        """See `Step.prompt_seconds`."""
        if self.timed is None:
            return 0.0
        begin, end = self.timed
        return begin.seconds_until(end)


def _choices_behind(work: Work, end: int) -> range:
    """After which tokens of a pass a span chooses. Its last token is the one before `end`."""
    if work.choose == "none":
        return range(0)
    return range(end - (work.num_tokens if work.choose == "every" else 1), end)


def _read_behind(work: Work, end: int) -> range:
    """After which tokens of a pass a span's logits are read, by the host or for a choice."""
    first, chosen = end - work.num_tokens + work.logits_from, _choices_behind(work, end)
    return range(min(first, chosen.start) if chosen else first, end)


def _is_lane(work: Work) -> bool:
    """Whether a work can be a decoding lane: one token of a slot, after which the next one is chosen."""
    if work.slot is None or work.logits is not None or work.choose == "none":
        return False
    return len(work.token_ids) <= 1 and not work.drafts and work.method == SINGLE
