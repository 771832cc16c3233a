"""`SpanSender`: sends the card the tokens of chunks and spans."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmcli.runners.cuda.arena import Mailbox
from llmcli.runners.cuda.passes import Chunk, Lanes, PromptSlice
from llmcli.runners.cuda.prompts import way_of_method
from llmcli.runners.cuda.ways import PromptWays
from llmcli.runners.cuda.workspace import Workspace, cut_spans, spans_size
from llmcli.runners.step_device import SINGLE, Work

# Numbers of tokens and rows whose views of the workspace are kept.
_MOST_KEPT = 256


class SpanSender:
    """Sends the card all it needs for spans of one method, in one copy."""

    def __init__(self, workspace: Workspace[Any], mailbox: Mailbox, prompt_ways: PromptWays):
        self._mailbox = mailbox
        self._prompt_ways = prompt_ways
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
        told = np.zeros(spans_size(count, len(works), self._pages_per_row), np.int32)
        token_ids, rows, positions, pages = cut_spans(told, count, len(works), self._pages_per_row)
        begin = 0
        for row, (part, work) in enumerate(zip(parts, works, strict=True)):
            end = begin + part.num_tokens
            token_ids[begin:end], rows[begin:end] = work.token_ids, row
            positions[begin:end] = np.arange(part.start, part.start + part.num_tokens)
            pages[row, : len(work.pages)] = work.pages
            begin = end
        on_card, token_ids, rows, positions, page_table = self._views_of(count, len(works))
        self._mailbox.send(on_card, told)
        if method == SINGLE:
            return Lanes(token_ids, None, rows, positions, page_table, 1 if count > 1 else None)
        return Chunk(token_ids, rows, positions, page_table, parts, way_of_method(method, self._prompt_ways))
