"""What one pass computes: a `Batch`. How prompts share passes, and how their tokens are sent."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from llmcli.runners.base import MAX_SPAN
from llmcli.runners.cuda.plan.workspace import MAX_TOGETHER, MOST_PARTS, Workspace, cut_spans, spans_size
from llmcli.runners.cuda.step.arena import Mailbox
from llmcli.runners.step_device import SINGLE, Work


class Slice(NamedTuple):
    """Consecutive tokens of one prompt: its row in the page table, the first token in the batch, and its position."""

    row: int
    first: int
    num_tokens: int
    start: int


@dataclass(frozen=True)
class Batch:
    """All tokens of a pass, whoever they belong to. The arrays lie on the card.

    The tokens of a row are adjacent and consecutive. They differ in attention, and only long prompts in their products:

    - Without `slices` each token is a lane, with the bits of a step of its own. Only the card knows rows and positions,
      so the same launches serve every step. Row -1 is an unused lane. With fewer rows than lanes some have several.
    - With `slices` they are tokens of prompts, each slice of another row.

    With `by_row` token_ids is indexed by row, else by token. `in_chunks=False`: products have all inputs in one chunk.
    Shapes: rows, positions int32 [num_tokens]; page_table int32 [at least num_rows, pages_per_row]; token_ids int32
            [num_tokens], or [rows of page_table] with `by_row`
    """

    token_ids: Any
    rows: Any
    positions: Any
    page_table: Any
    num_rows: int
    slices: tuple[Slice, ...] | None = None
    by_row: bool = False
    in_chunks: bool = True

    def only(self, places: Sequence[int]) -> Batch:
        """The batch with slices of these tokens only, named by index; the others only get keys and values."""
        some = []
        for row, first, num_tokens, start in self.slices or ():
            inside = [place for place in places if first <= place < first + num_tokens]
            if inside:  # adjacent
                some.append(Slice(row, inside[0], len(inside), start + inside[0] - first))
        return replace(self, slices=tuple(some))


# The most tokens of a prompt that is multiplied as rows are. Alone, one of up to some 200 would be faster so. Many
# together would be slower, as long ones share all of a chunk.
MAX_SHORT_TOKENS = 64

# Methods of prompts, after SINGLE: as rows, and with all inputs in one chunk. Each has its own order of sums.
SHORT, LONG = SINGLE + 1, SINGLE + 2


def method_of(num_tokens: int) -> int:
    """The method of a prompt's chunk of `num_tokens` tokens."""
    if num_tokens <= MAX_SPAN:
        return SINGLE
    return SHORT if num_tokens <= MAX_SHORT_TOKENS else LONG


def prompt_batch(method: int, arrays: Sequence[Any], slices: Sequence[Slice]) -> Batch:
    """Slices of different rows, computed by one method. `arrays`: as `cut_spans` cuts them."""
    token_ids, rows, positions, page_table = arrays
    of_prompts = None if method == SINGLE else tuple(slices)
    return Batch(token_ids, rows, positions, page_table, len(slices), of_prompts, in_chunks=method != LONG)


def prompt_passes(works: Sequence[Work], places: Iterable[int], chunk_tokens: int) -> list[list[int]]:
    """The passes of the works at these indices: those computed in the same way share a pass, as far as they fit.

    A token has the same bits in any of them. A work that chooses after every token runs alone: there is no room for
    the logits of more.
    """

    def method_at(place: int) -> int:
        return works[place].method

    passes: list[list[int]] = []
    for method, some in groupby(sorted(places, key=method_at), method_at):
        most = chunk_tokens if method == LONG else min(MAX_TOGETHER, chunk_tokens)
        room = 0
        for place in some:
            joins = method != SINGLE and works[place].choose != "every"
            if not joins or works[place].num_tokens > room or len(passes[-1]) == MOST_PARTS:
                passes.append([])
                room = most if joins else 0
            passes[-1].append(place)
            room -= works[place].num_tokens
    return passes


# Numbers of tokens and rows whose views of the workspace are kept.
_MOST_KEPT = 256


class SpanSender:
    """Sends the card all it needs for spans of one method, in one copy."""

    def __init__(self, workspace: Workspace[Any], mailbox: Mailbox):
        self._mailbox = mailbox
        self._pages_per_row = pages_per_row = workspace.page_table.shape[1]

        # Cutting them takes the host longer than all else here. The function must not refer to `self` (see Forward).
        @functools.lru_cache(_MOST_KEPT)
        def views_of(num_tokens: int, num_rows: int) -> tuple[Any, ...]:
            on_card = workspace.spans[: spans_size(num_tokens, num_rows, pages_per_row)]
            return on_card, *workspace.of_spans(num_tokens, num_rows)

        self._views_of = views_of

    def send(self, works: Sequence[Work]) -> Batch:
        """Send what these works need; returns the batch to run."""
        count, slices = sum(work.num_tokens for work in works), []
        sent = np.zeros(spans_size(count, len(works), self._pages_per_row), np.int32)
        token_ids, rows, positions, pages = cut_spans(sent, count, len(works), self._pages_per_row)
        begin = 0
        for row, work in enumerate(works):
            end = begin + work.num_tokens
            token_ids[begin:end], rows[begin:end] = work.token_ids, row
            positions[begin:end] = np.arange(work.position, work.position + work.num_tokens)
            pages[row, : len(work.pages)] = work.pages
            slices.append(Slice(row, begin, work.num_tokens, work.position))
            begin = end
        on_card, *arrays = self._views_of(count, len(works))
        self._mailbox.send(on_card, sent)
        return prompt_batch(works[0].method, arrays, slices)
