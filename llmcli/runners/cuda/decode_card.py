"""How long the kernels of a decode step take on a card. Nothing here needs CuPy.

A product takes the longer of reading its matrix and computing, then what no kernel overlaps: starting, and fetching the
activations, which every multiprocessor reads from L2, or every two of them together, as fast as memory is read.
Constants are measured on one H200 (docs/performance.md).
"""

from dataclasses import dataclass

from llmcli.kernels.card_facts import CardFacts
from llmcli.kernels.gemv import GemvPlan, plan_gemv
from llmcli.kernels.tiles import TileLayout

# Embedding and sampling a token, greedy.
STEP_SECONDS = 10e-6
# A product, by the type of its weights, and each of its rows but the first.
GEMV_SECONDS = {"int8": 1.7e-6, "int4": 2.3e-6, "float16": 1.35e-6, "bfloat16": 1.35e-6, "float32": 1.35e-6}
GEMV_ROW_SECONDS = 0.15e-6
# Clocks of a multiprocessor for a unit of int4: for any number of rows, and for every 8 columns of the tensor cores
# (four rows); and for each tile, whatever its length, of which two are in work. Other weights never take longer than
# their bytes.
INT4_UNIT_CLOCKS, INT4_COLUMN_CLOCKS, INT4_TILE_CLOCKS = 36, 10, 300
# Attention of one row and of each further one, and the share of the bandwidth at which it reads the cache.
ATTENTION_SECONDS, ATTENTION_ROW_SECONDS = 5.0e-6, 1.3e-6
CACHE_SHARE, CACHE_SHARE_OF_CODES = 0.9, 0.65


@dataclass(frozen=True)
class DecodeCard:
    """What of a card decides how long decoding takes. Units: bytes a second."""

    read_bytes: float
    facts: CardFacts

    def gemv_plans(self, layout: TileLayout, num_rows: int) -> list[GemvPlan]:
        """The launches of one product: where shared memory is short, fewer rows go into one."""
        plans, left = [], num_rows
        while left > 0:
            plans.append(
                plan_gemv(
                    layout,
                    left,
                    num_multiprocessors=self.facts.num_multiprocessors,
                    shared_bytes_per_block=self.facts.shared_bytes_per_block,
                    can_cluster=self.facts.can_cluster,
                )
            )
            left -= plans[-1].num_rows
        return plans

    def gemv_seconds(self, layout: TileLayout, num_rows: int) -> float:
        """All launches of one product."""
        return sum(self._launch_seconds(layout, plan) for plan in self.gemv_plans(layout, num_rows))

    def attention_seconds(self, cache_bytes: int, num_rows: int, has_codes: bool) -> float:
        """Attention of one layer, where each row reads `cache_bytes` of keys and values."""
        share = CACHE_SHARE_OF_CODES if has_codes else CACHE_SHARE
        reading = num_rows * cache_bytes / (share * self.read_bytes)
        return reading + ATTENTION_SECONDS + (num_rows - 1) * ATTENTION_ROW_SECONDS

    def _launch_seconds(self, layout: TileLayout, plan: GemvPlan) -> float:
        reading = layout.num_bytes / self.read_bytes
        num_fetches = plan.num_blocks // plan.cluster
        fetching = 4 * plan.num_rows * layout.num_inputs * num_fetches / self.read_bytes
        computing = 0.0
        if layout.weight_type == "int4":
            clocks = layout.num_units * (INT4_UNIT_CLOCKS + INT4_COLUMN_CLOCKS * plan.column_tiles) + INT4_TILE_CLOCKS
            computing = -(-layout.num_tiles // num_fetches) / plan.cluster * clocks / self.facts.clock_hertz
        start = GEMV_SECONDS[layout.weight_type] + (plan.num_rows - 1) * GEMV_ROW_SECONDS
        return max(reading, computing) + fetching + start
