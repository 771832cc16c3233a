"""How long the kernels of a decode step take on a card. Nothing here needs CuPy.

A product takes the longer of reading its matrix and computing, then what no kernel overlaps: starting, and fetching the
activations, which every multiprocessor reads from L2, or every two of them together. Constants are measured on one H200
(docs/performance.md).
"""

from dataclasses import dataclass

from llmcli.kernels.gemv import Epilogue, GemvPlan, plan_gemv
from llmcli.kernels.tiles import TileLayout

# Embedding and sampling a token, greedy.
STEP_SECONDS = 10e-6
GEMV_SECONDS = 1.6e-6
# L2 delivers activations to all multiprocessors together at this share of the rate of reading memory.
L2_SHARE = 0.65
# Clocks of a multiprocessor for a unit of codes: for any number of rows, and for every 8 columns of the tensor cores
# (four rows); and for each tile, whatever its length. Other weights never take longer than their bytes.
UNIT_CLOCKS = {"int8": (31.0, 10.5), "int4": (34.0, 18.0)}
TILE_CLOCKS = 660
# Attention of one row and of each further one; codes are read at a share of the bandwidth.
ATTENTION_SECONDS = 5.4e-6
ATTENTION_ROW_SECONDS = 1.5e-6
CODES_SHARE = 0.7


@dataclass(frozen=True)
class DecodeCard:
    """What of a card decides how long decoding takes. Units: bytes, bytes a second, hertz."""

    read_bytes: float
    num_multiprocessors: int
    shared_bytes_per_block: int
    can_cluster: bool
    clock_hertz: float

    def gemv_plans(self, layout: TileLayout, epilogue: Epilogue, num_rows: int) -> list[GemvPlan]:
        """The launches of one product: where shared memory is short, fewer rows go into one."""
        plans, left = [], num_rows
        while left > 0:
            plans.append(
                plan_gemv(
                    layout,
                    left,
                    epilogue,
                    num_multiprocessors=self.num_multiprocessors,
                    shared_bytes_per_block=self.shared_bytes_per_block,
                    can_cluster=self.can_cluster,
                )
            )
            left -= plans[-1].num_rows
        return plans

    def gemv_seconds(self, layout: TileLayout, epilogue: Epilogue, num_rows: int) -> float:
        """All launches of one product."""
        return sum(self._launch_seconds(layout, plan) for plan in self.gemv_plans(layout, epilogue, num_rows))

    def attention_seconds(self, cache_bytes: int, num_rows: int, has_codes: bool) -> float:
        """Attention of one layer, where each row reads `cache_bytes` of keys and values."""
        reading = num_rows * cache_bytes / (self.read_bytes * (CODES_SHARE if has_codes else 1.0))
        return reading + ATTENTION_SECONDS + (num_rows - 1) * ATTENTION_ROW_SECONDS

    def _launch_seconds(self, layout: TileLayout, plan: GemvPlan) -> float:
        reading = layout.num_bytes / self.read_bytes
        num_fetches = plan.num_blocks / plan.cluster
        fetching = 4 * plan.num_rows * layout.num_inputs * num_fetches / (L2_SHARE * self.read_bytes)
        computing = 0.0
        if layout.weight_type in UNIT_CLOCKS:
            for_unit, for_columns = UNIT_CLOCKS[layout.weight_type]
            clocks = layout.num_units * (for_unit + for_columns * plan.column_tiles) + TILE_CLOCKS
            computing = -(-layout.num_tiles // plan.num_blocks) * clocks / self.clock_hertz
        return max(reading, computing) + fetching + GEMV_SECONDS
