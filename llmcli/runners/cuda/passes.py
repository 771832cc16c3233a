"""What one pass of the forward computation runs: lanes, or a chunk of prompts."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from llmcli.runners.cuda.ways import Way


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
    """Tokens of prompts: `parts` of different rows, one after the other, and how their products are computed.

    Shapes: token_ids, rows, positions int32 [num_tokens], rows of the page table; page_table int32 [num_parts,
            pages_per_row]
    """

    token_ids: Any
    rows: Any
    positions: Any
    page_table: Any
    parts: tuple[PromptSlice, ...]
    way: Way
