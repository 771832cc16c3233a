"""What one pass computes: lanes, or a chunk of prompts. How prompts share passes, and how tokens are sent."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from llmcli.runners.base import MAX_SPAN
from llmcli.runners.cuda.plan.workspace import MAX_TOGETHER, MOST_PARTS, Workspace, cut_spans, spans_size
from llmcli.runners.cuda.step.arena import Mailbox
from llmcli.runners.step_device import SINGLE, Work


@dataclass(frozen=True)
class Lanes:
    """Tokens of one pass, each with the bits of a step of its own. All arrays lie on the card.

    `num_spans`, if given, is the number of rows: the lanes of a row are adjacent and hold consecutive tokens. Without
    it every lane has another row. With `token_rows`, which equals `rows`, token_ids is indexed by row; without it by
    lane.
    Shapes: rows, positions int32 [num_lanes], row -1 for an unused lane; page_table int32 [num_rows, pages_per_row];
            token_ids int32 [num_rows] with `token_rows`, else [num_lanes]
    """

    token_ids: Any
    token_rows: Any
    rows: Any
    positions: Any
    page_table: Any
    num_spans: int | None = None


class PromptSlice(NamedTuple):
    """Consecutive tokens of one row's prompt, from position `start` on."""

    num_tokens: int
    start: int


@dataclass(frozen=True)
class Chunk:
    """Tokens of prompts: `parts` of different rows, one after the other.

    With `in_chunks` they are multiplied as the rows of decoding are; else all inputs are in one chunk.
    Shapes: token_ids, rows, positions int32 [num_tokens], rows of the page table; page_table int32 [num_parts,
            pages_per_row]
    """

    token_ids: Any
    rows: Any
    positions: Any
    page_table: Any
    parts: tuple[PromptSlice, ...]
    in_chunks: bool


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

    def send(self, works: Sequence[Work]) -> Lanes | Chunk:
        """Send what these works need; returns the lanes or the chunk to run."""
        parts = tuple(PromptSlice(work.num_tokens, work.position) for work in works)
        count, method = sum(part.num_tokens for part in parts), works[0].method
        sent = np.zeros(spans_size(count, len(works), self._pages_per_row), np.int32)
        token_ids, rows, positions, pages = cut_spans(sent, count, len(works), self._pages_per_row)
        begin = 0
        for row, (part, work) in enumerate(zip(parts, works, strict=True)):
            end = begin + part.num_tokens
            token_ids[begin:end], rows[begin:end] = work.token_ids, row
            positions[begin:end] = np.arange(part.start, part.start + part.num_tokens)
            pages[row, : len(work.pages)] = work.pages
            begin = end
        on_card, token_ids, rows, positions, page_table = self._views_of(count, len(works))
        self._mailbox.send(on_card, sent)
        if method == SINGLE:
            return Lanes(token_ids, None, rows, positions, page_table, 1 if count > 1 else None)
        return Chunk(token_ids, rows, positions, page_table, parts, in_chunks=method == SHORT)
