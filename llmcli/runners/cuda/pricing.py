"""How long one launch takes on a card, from what it declares. Nothing here needs CuPy.

No constant names a card. What waits for memory or the matrix library is a share of a rate that was measured in the same
process. What a multiprocessor does at its own pace is told in clocks, and in bytes a clock: it takes as long on a card
with slower memory, where it is a smaller part of the whole. All are fitted to an H200 (docs/performance.md), at 132
multiprocessors of 1.98 GHz and reads of 4.53 TB/s.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from llmcli.kernels.attention_decode import DecodeAttentionCost
from llmcli.kernels.card_facts import CardFacts
from llmcli.kernels.gemv import GemvCost
from llmcli.kernels.launches import Launch
from llmcli.kernels.spec import KernelCost
from llmcli.runners.cuda.dry_run import PRODUCT

# A product of decoding, from the end of the kernel before to its own, without its bytes; and each row but the first.
GEMV_CLOCKS, GEMV_ROW_CLOCKS = 6560, 297
# Part of that is hidden where launches overlap: of the product's weights these bytes a multiprocessor are on their way
# before the kernel in front ends (FIRST_STAGES of gemv.cu, 16 warps, slots of 9 or 8 lines). With them one number of
# clocks fits all types of weights; without, the starts of int8, int4 and float weights seemed to differ by a third, and
# those on an H100, whose slower memory hides more, were 3 to 5 % of a step too long.
PREFETCHED_BYTES = {8: 3 * 16 * 1152, 4: 2 * 16 * 1152, 16: 4 * 16 * 1024, 32: 4 * 16 * 1024}
# No start is hidden further: an empty kernel of 264 blocks takes 0.65 us in a graph.
LEAST_CLOCKS = 1290
# What a multiprocessor fetches of x from L2, or two of a cluster together, while nothing else happens.
FETCHED_BYTES_A_CLOCK = 17.33
# A unit of int4, for any number of rows, and for every 8 columns of the tensor cores (four rows); and each tile,
# whatever its length, of which two are in work. Other weights never take longer than their bytes.
INT4_UNIT_CLOCKS, INT4_COLUMN_CLOCKS, INT4_TILE_CLOCKS = 36, 10, 300
# Attention of one row and of each further one, and the share of the bandwidth at which it reads the cache.
ATTENTION_CLOCKS, ATTENTION_ROW_CLOCKS = 9900, 2574
CACHE_SHARE, CACHE_SHARE_OF_CODES = 0.9, 0.65
# Sampling a token, greedy, and the start and end of any other kernel.
SAMPLE_CLOCKS, KERNEL_CLOCKS = 13860, 5940
# Shares of the rate of a large product of the matrix library, and of reading where few tokens wait for their weights.
MATMUL_SHARE, MATMUL_READ_SHARE = 0.93, 0.7
ATTENTION_SHARE, PACKED_SHARE = 0.35, 0.16
# What a multiprocessor does with codes after it has read them: bytes read and written for each clock, by their bits.
WIDENED_BYTES_A_CLOCK = {8: 32.2, 4: 8.93}
PACKED_BYTES_A_CLOCK = {8: 14.77, 4: 6.74}


@dataclass(frozen=True)
class Rates:
    """What a card and its host reach, measured or as the maker says; without products' rates no prefill is predicted.

    Units: bytes and floating-point operations a second; `flops` by the type of the factors, as config.json names it;
    `launch_seconds` the host takes to start again what it has launched for a layer before
    """

    read_bytes: float
    flops: Mapping[str, float]
    launch_seconds: float = 0.0


class Pricing:
    """Seconds of launches on a card of these rates."""

    def __init__(self, rates: Rates, card: CardFacts):
        self._rates = rates
        self._card = card

    def seconds(self, launch: Launch) -> float:
        """From its start to its end, as far as no other launch hides it."""
        assert launch.cost is not None
        cost = launch.cost()
        if isinstance(cost, GemvCost):
            return self._gemv(cost)
        if isinstance(cost, DecodeAttentionCost):
            return self._decode_attention(cost)
        if launch.stem == "sample_token":
            return SAMPLE_CLOCKS / self._card.clock_hertz
        return self._prefill(launch.stem, cost) + KERNEL_CLOCKS / self._card.clock_hertz

    def _gemv(self, cost: GemvCost) -> float:
        card, layout, plan = self._card, cost.layout, cost.plan
        reading = layout.num_bytes / self._rates.read_bytes
        num_fetches = plan.num_blocks // plan.cluster
        fetched = 4 * plan.num_rows * layout.num_inputs * num_fetches
        fetching = fetched / (FETCHED_BYTES_A_CLOCK * card.num_multiprocessors)
        computing = 0.0
        if cost.element_bits == 4:
            clocks = layout.num_units * (INT4_UNIT_CLOCKS + INT4_COLUMN_CLOCKS * plan.column_tiles) + INT4_TILE_CLOCKS
            computing = -(-layout.num_tiles // num_fetches) / plan.cluster * clocks / card.clock_hertz
        prefetched = PREFETCHED_BYTES[cost.element_bits] * card.num_multiprocessors if card.can_cluster else 0
        start = GEMV_CLOCKS / card.clock_hertz - prefetched / self._rates.read_bytes
        start = max(start, LEAST_CLOCKS / card.clock_hertz)
        rows = (plan.num_rows - 1) * GEMV_ROW_CLOCKS
        return max(reading, computing) + start + (fetching + rows) / card.clock_hertz

    def _decode_attention(self, cost: DecodeAttentionCost) -> float:
        share = CACHE_SHARE_OF_CODES if cost.element_bits == 8 else CACHE_SHARE
        start = ATTENTION_CLOCKS + (cost.num_rows - 1) * ATTENTION_ROW_CLOCKS
        return cost.stored_bytes / (share * self._rates.read_bytes) + start / self._card.clock_hertz

    def _prefill(self, stem: str, cost: KernelCost) -> float:
        kind = "float32" if cost.element_bits == 32 else "float16"
        num_bytes = cost.read_bytes + cost.written_bytes
        moving = num_bytes / self._rates.read_bytes
        if stem == PRODUCT:
            return max(moving / MATMUL_READ_SHARE, cost.flops / (MATMUL_SHARE * self._flops(kind)))
        if stem == "attention_prefill":
            return max(moving, cost.flops / (ATTENTION_SHARE * self._flops(kind)))
        if stem == "gemm_packed":
            multiplying = cost.flops / (PACKED_SHARE * self._flops("float16"))
            return moving + self._clocks(num_bytes / PACKED_BYTES_A_CLOCK[cost.element_bits]) + multiplying
        if stem == "dequantize" and cost.element_bits in WIDENED_BYTES_A_CLOCK:
            return moving + self._clocks(num_bytes / WIDENED_BYTES_A_CLOCK[cost.element_bits])
        return moving

    def _clocks(self, clocks: float) -> float:
        """Seconds of so many clocks that all multiprocessors share."""
        return clocks / (self._card.num_multiprocessors * self._card.clock_hertz)

    def _flops(self, kind: str) -> float:
        flops = self._rates.flops
        return flops[kind] if kind in flops else max(flops.values())
