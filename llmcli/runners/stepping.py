"""`SteppingRunner`: the state machine of rows, written once over what a device can do.

It knows which pages a row has, which prompts begin alike, and what a row's next span may be. The device runs and
chooses tokens: see step_device.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llmcli.differences import first_difference
from llmcli.runners.base import MAX_SPAN, PAGE_TOKENS, AllLogits, Chosen, HiddenStates, Span, Step
from llmcli.runners.interrupts import interrupts_held_back
from llmcli.runners.pages import PagePool, PromptIndex
from llmcli.runners.step_device import SINGLE, StepDevice, Work
from llmcli.sampling.params import Sampler


@dataclass(eq=False)
class _Row:
    slot: int | None
    prompt: list[int]
    num_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    # Its first tokens, as far as the host has seen them. The last span's choice follows them all, once seen.
    seen_token_ids: list[int] = field(default_factory=list)
    chosen_behind: dict[int, int] = field(default_factory=dict)  # by index: read before the choices ahead of them
    num_writable: int = 0  # tokens up to which it may write: it has the pages, alone from its end on; 0 if not known
    num_indexed: int = 0  # pages that were offered to the prompt index
    is_mixed: bool = False  # a new row would compute its prompt with other bits, so its pages are not offered
    num_changes: int = 0  # counts roll-backs, to recognize steps that were queued before them
    has_unread_drafts: bool = False  # a queued span has drafts; how many are kept is not known yet

    def take(self, work: Work) -> None:
        """Add the tokens of a queued span, without its drafts."""
        if (work.token_ids or work.logits is not None) and len(self.seen_token_ids) >= self.num_tokens:
            self.seen_token_ids[self.num_tokens :] = work.token_ids  # in place of what was chosen
        self.num_tokens += work.num_tokens - len(work.drafts)
        self.has_unread_drafts = bool(work.drafts)

    def keep_drafts(self, token_ids: Sequence[int]) -> None:
        """Add the drafts that equal what was chosen."""
        self.has_unread_drafts = False
        self.seen_token_ids += token_ids
        self.num_tokens += len(token_ids)

    def learn(self, token_id: int, place: int) -> None:
        """Note the token that was chosen after the first `place` tokens. The row may hold it already.

        Steps may be read in another order than they ran.
        """
        if len(self.seen_token_ids) > place:
            return
        self.chosen_behind[place] = token_id
        while (known := self.chosen_behind.pop(len(self.seen_token_ids), None)) is not None:
            self.seen_token_ids.append(known)


class _Ran(NamedTuple):
    """A row as it was after a step."""

    row: _Row
    num_tokens: int
    num_changes: int
    has_drafts: bool
    logits_from: int


class SteppingRunner:
    """The `Runner` protocol over a device. See `llmcli.runners.base.Runner` for the contract."""

    def __init__(self, device: StepDevice):
        self.config = device.config
        self.description = device.description
        self.cache_type = device.cache_type
        self.arithmetic = device.arithmetic
        self.limits = device.limits
        self._device = device
        self._pool = PagePool(self.limits.num_pages)
        self._index = PromptIndex(self._pool)
        self._rows: dict[int, _Row] = {}
        self._free_slots = list(range(self.limits.num_rows))
        self._next_row = 0

    @property
    def free_pages(self) -> int:
        """Pages that no open row holds."""
        return self._pool.num_free + self._pool.num_idle

    def open(self, prompt: Sequence[int], sampler: Sampler | None = None, said: Sequence[int] = ()) -> int:
        """Open a row for a prompt; see `Runner.open`."""
        self._check_prompt(prompt)
        self._check_ids(said)
        token_ids = [*prompt, *said]
        with interrupts_held_back():
            row = _Row(self._take_slot(sampler), list(prompt))
            try:
                found = self._index.find(self._stamps(token_ids[:-1], len(prompt)))
                row.num_tokens = len(found) * PAGE_TOKENS
                if row.num_tokens < len(prompt):
                    row.num_tokens = self._device.cut(row.num_tokens, len(prompt))
                row.pages = found[: -(-row.num_tokens // PAGE_TOKENS)]
                row.num_indexed = row.num_tokens // PAGE_TOKENS
                row.seen_token_ids = token_ids[: row.num_tokens]
                if sampler is not None and row.slot is not None:
                    self._device.set_slot(row.slot, sampler, token_ids)
            except BaseException:
                self._give_slot_back(row)
                raise
            for page in row.pages:
                self._pool.hold(page)
            return self._add(row)

    def fork(self, row: int, num_tokens: int, sampler: Sampler | None = None) -> int:
        """Open a row that shares the first tokens of another one; see `Runner.fork`."""
        origin = self._rows[row]
        if not 0 < num_tokens <= min(origin.num_tokens, len(origin.seen_token_ids)):
            raise ValueError(f"fork of {num_tokens} of {origin.num_tokens} tokens")
        with interrupts_held_back():
            token_ids = origin.seen_token_ids[:num_tokens]
            new = _Row(self._take_slot(sampler), origin.prompt[:num_tokens], num_tokens, seen_token_ids=token_ids)
            new.is_mixed = origin.is_mixed or num_tokens < len(origin.prompt)
            try:
                if sampler is not None and new.slot is not None:
                    self._device.set_slot(new.slot, sampler, token_ids)
            except BaseException:
                self._give_slot_back(new)
                raise
            new.pages = origin.pages[: -(-num_tokens // PAGE_TOKENS)]
            new.num_indexed = min(origin.num_indexed, num_tokens // PAGE_TOKENS)
            for page in new.pages:
                self._pool.hold(page)
            origin.num_writable = 0
            return self._add(new)

    def change_prompt(self, row: int, prompt: Sequence[int], sampler: Sampler | None = None) -> None:
        """Give the row another prompt and continue with it; see `Runner.change_prompt`."""
        self._check_prompt(prompt)
        with interrupts_held_back():
            this = self._rows[row]
            if (sampler is None) != (this.slot is None):
                raise ValueError("a row keeps its place among those that choose, or stays without one")
            if sampler is not None and this.slot is not None:
                self._device.set_slot(this.slot, sampler, list(prompt))
            num_common = first_difference(this.seen_token_ids, prompt)
            self._shorten(this, min(num_common, this.num_tokens, len(prompt) - 1))
            this.prompt = list(prompt)
            this.is_mixed = True  # an answer's tokens have other bits than a prompt's

    def set_sampler(self, row: int, sampler: Sampler) -> None:
        """Choose by another sampler from the next step on."""
        slot = self._rows[row].slot
        if slot is None:
            raise ValueError("the row has no sampler")
        self._device.set_sampler(slot, sampler)

    def keep(self, row: int, num_tokens: int) -> None:
        """Roll the row back to its first `num_tokens` tokens."""
        this = self._rows[row]
        if not 0 <= num_tokens <= this.num_tokens:
            raise ValueError(f"keep {num_tokens} of {this.num_tokens} tokens")
        with interrupts_held_back():
            self._shorten(this, num_tokens)

    def offer(self, row: int) -> None:
        """Let later rows find the full pages of the row's prompt and answer; see `Runner.offer`."""
        with interrupts_held_back():
            this = self._rows[row]
            self._offer_pages(this, min(this.num_tokens, len(this.seen_token_ids)))

    def close(self, row: int) -> None:
        """Free the row's pages and its slot."""
        with interrupts_held_back():
            this = self._rows.pop(row)
            self._shorten(this, 0)
            self._give_slot_back(this)

    def token_ids(self, row: int) -> Sequence[int]:
        """The row's first tokens, as far as the host has seen them."""
        this = self._rows[row]
        return this.seen_token_ids[: this.num_tokens]

    def num_tokens(self, row: int) -> int:
        """Tokens that the row holds, or that a queued step runs in it."""
        return self._rows[row].num_tokens

    def span_end(self, row: int, most: int) -> int:
        """Where the next span of the row's prompt ends; see `Runner.span_end`."""
        this = self._rows[row]
        return self._device.span_end(this.num_tokens, most, len(this.prompt))

    def reserve(self, row: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all; see `Runner.reserve`."""
        this = self._rows[row]
        if num_tokens <= this.num_writable or num_tokens <= this.num_tokens:
            return True
        if num_tokens > self.limits.max_seq_len:
            raise ValueError(f"a row has room for {self.limits.max_seq_len} tokens, not for {num_tokens}")
        num_new = max(-(-num_tokens // PAGE_TOKENS) - len(this.pages), 0)
        copies_last = self._ends_in_shared_page(this)
        with interrupts_held_back():
            while self._pool.num_free < num_new + copies_last:
                if not self._index.give_up_one():
                    return False
            if copies_last and self._ends_in_shared_page(this):
                place = this.num_tokens // PAGE_TOKENS
                shared, own = this.pages[place], self._pool.take()
                self._device.copy_page(shared, own)
                self._pool.release(shared)
                this.pages[place] = own
            this.pages += [self._pool.take() for _ in range(num_new)]
            this.num_writable = min(len(this.pages) * PAGE_TOKENS, self.limits.max_seq_len)
            return True

    def queue(self, spans: Sequence[Span]) -> Step:
        """Queue a step; see `Runner.queue`."""
        if len({span.row for span in spans}) != len(spans):
            raise ValueError("a row has one span a step")
        works = [self._work(span) for span in spans]
        step = self._device.run(works)
        with interrupts_held_back():
            return _SteppingStep(step, [self._take(span, work) for span, work in zip(spans, works, strict=True)])

    def hidden_states(self, span: Span, inputs: HiddenStates | None = None) -> HiddenStates:
        """Run a span and return the hidden states between its layers; see `Runner.hidden_states`."""
        if not span.token_ids or span.choose != "none":
            raise ValueError("hidden_states: the span must name its tokens and choose nothing")
        work = self._work(span)
        states = self._device.hidden_states(work, inputs)
        with interrupts_held_back():
            self._take(span, work)
        return states

    def _take(self, span: Span, work: Work) -> _Ran:
        """Add the tokens of a queued span to its row."""
        row = self._rows[span.row]
        row.take(work)
        if work.token_ids:  # those of a prompt are always named
            self._offer_pages(row, min(row.num_tokens, len(row.prompt)))
        return _Ran(row, row.num_tokens, row.num_changes, row.has_unread_drafts, span.logits_from)

    def _work(self, span: Span) -> Work:
        row = self._rows[span.row]
        if span.choose != "none" and row.slot is None:
            raise ValueError("a row without a sampler cannot choose")
        if row.has_unread_drafts:
            raise ValueError("the choices of the row's drafts have not been read")
        if span.drafts:
            self._check_drafts(row, span)
        if span.masks is not None and not self.limits.takes_masks:
            raise ValueError("this runner takes no masks")
        begin, num_prompt = row.num_tokens, len(row.prompt)
        where = row.slot, row.pages, begin
        is_read = not span.token_ids and begin < len(row.seen_token_ids)
        latest = row.seen_token_ids[begin] if is_read else None
        work = Work(
            *where, span.token_ids, SINGLE, span.choose, span.logits, span.drafts, span.masks, latest, span.logits_from
        )
        num_tokens = work.num_tokens
        end = begin + num_tokens
        if num_tokens and begin < num_prompt:
            if end > num_prompt or list(span.token_ids) != row.prompt[begin:end]:
                raise ValueError("the span is not what comes next in the row's prompt")
            if end != self._device.span_end(begin, num_tokens, num_prompt):
                raise ValueError(f"a prompt of {num_prompt} tokens may not be cut at {end}")
            work = work._replace(method=self._device.method(begin, num_prompt))
        elif num_tokens > MAX_SPAN:
            raise ValueError(f"a span of {num_tokens} tokens behind the prompt, {MAX_SPAN} is the most")
        elif span.token_ids:
            self._check_ids(span.token_ids)
        if not self.reserve(span.row, end):
            raise ValueError(f"no page is free for row {span.row}")
        return work

    def _check_drafts(self, row: _Row, span: Span) -> None:
        if span.token_ids or span.logits is not None or span.choose != "last":
            raise ValueError("drafts follow the token that the row chose last, and the last one's successor is chosen")
        if len(row.seen_token_ids) <= row.num_tokens:
            raise ValueError("drafts follow a choice that has been read")
        if len(span.drafts) > self.limits.max_drafts:
            raise ValueError(f"a span of {len(span.drafts)} drafts, {self.limits.max_drafts} is the most")
        self._check_ids(span.drafts)

    def _offer_pages(self, row: _Row, num_tokens: int) -> None:
        """Let other rows find the full pages among the row's first tokens."""
        num_full = num_tokens // PAGE_TOKENS
        if num_full > row.num_indexed and not row.is_mixed:
            stamps = self._stamps(row.seen_token_ids[: num_full * PAGE_TOKENS], len(row.prompt))
            found = self._index.add(stamps, row.pages[:num_full])
            for page in found:
                self._pool.hold(page)
            for page in row.pages[:num_full]:
                self._pool.release(page)
            row.pages = [*found, *row.pages[num_full:]]
            row.num_indexed = num_full

    def _stamps(self, token_ids: Sequence[int], prompt_len: int) -> list[int]:
        vocab_size = self.config.vocab_size
        stamps: list[int] = []
        for begin in range(0, min(len(token_ids), prompt_len), PAGE_TOKENS):  # a page of a prompt has one method
            method = vocab_size * self._device.method(begin, prompt_len)
            stamps += [token_id + method for token_id in token_ids[begin : min(begin + PAGE_TOKENS, prompt_len)]]
        return [*stamps, *(token_id + vocab_size * SINGLE for token_id in token_ids[prompt_len:])]

    def _ends_in_shared_page(self, row: _Row) -> bool:
        """Whether the row's next token goes into a page that others hold."""
        place = row.num_tokens // PAGE_TOKENS
        return place < len(row.pages) and self._pool.num_holders(row.pages[place]) > 1

    def _shorten(self, row: _Row, num_tokens: int) -> None:
        num_pages = -(-num_tokens // PAGE_TOKENS)
        for page in row.pages[num_pages:]:
            self._pool.release(page)
        row.pages = row.pages[:num_pages]
        row.num_tokens = num_tokens
        row.num_changes += 1
        row.num_writable = 0
        row.has_unread_drafts = False
        row.num_indexed = min(row.num_indexed, num_tokens // PAGE_TOKENS)
        del row.seen_token_ids[num_tokens:]
        row.chosen_behind.clear()

    def _add(self, row: _Row) -> int:
        self._next_row += 1
        self._rows[self._next_row] = row
        return self._next_row

    def _take_slot(self, sampler: Sampler | None) -> int | None:
        if sampler is None:
            return None
        if not self._free_slots:
            raise ValueError(f"all {self.limits.num_rows} rows are open; close one first")
        return heapq.heappop(self._free_slots)

    def _give_slot_back(self, row: _Row) -> None:
        if row.slot is not None:
            heapq.heappush(self._free_slots, row.slot)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not 0 < len(prompt) <= self.limits.max_seq_len:
            raise ValueError(f"a prompt has {len(prompt)} tokens, expected 1 to {self.limits.max_seq_len}")
        self._check_ids(prompt)

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.config.vocab_size:
            raise ValueError(f"token id outside the vocabulary of {self.config.vocab_size}")


class _SteppingStep:
    """A step that gives its rows the chosen tokens when they are read."""

    def __init__(self, step: Step, ran: Sequence[_Ran]):
        self._step = step
        self._ran = ran
        self._choices: list[Chosen] | None = None

    def choices(self) -> list[Chosen]:
        """See `Step.choices`."""
        if self._choices is None:
            choices = self._step.choices()
            with interrupts_held_back():
                self._choices = choices
                for ran, chosen in zip(self._ran, choices, strict=True):
                    if ran.num_changes == ran.row.num_changes:
                        _learn(ran, chosen)
        return self._choices

    def logits(self, span: int, first: int = 0) -> AllLogits:
        """See `Step.logits`."""
        earliest = self._ran[span].logits_from
        if first < earliest:
            raise ValueError(f"ask for logits of this span from token {earliest} on, not from {first}")
        return self._step.logits(span, first)

    def prompt_seconds(self) -> float:
        """See `Step.prompt_seconds`."""
        return self._step.prompt_seconds()


def _learn(ran: _Ran, chosen: Chosen) -> None:
    """Give a row what its span has chosen."""
    choices = chosen if isinstance(chosen, tuple) else ()
    num_kept = max(len(choices) - 1, 0) if ran.has_drafts else 0
    if ran.has_drafts:
        ran.row.keep_drafts([choice.token_id for choice in choices[:num_kept]])
    if choices:
        ran.row.learn(choices[-1].token_id, ran.num_tokens + num_kept)
