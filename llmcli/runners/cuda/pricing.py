"""Predicts how long one launch takes on a card, from its declared cost. Nothing here needs CuPy.

No constant names a card. Work that waits for memory or for the matrix library is priced as a share of a rate measured
in the same process. Work that a multiprocessor does at its own pace is priced in clocks, or in bytes a clock: slower
memory does not change it. Constants are fitted to an H200 (docs/log/2026-11-27-decode.md), with 132 multiprocessors
at 1.98 GHz and reads of 4.53 TB/s; only the bandwidth share of attention of many rows is fitted to an H100.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from llmcli.kernels.attention_decode import DecodeAttentionCost
from llmcli.kernels.card_facts import CardFacts
from llmcli.kernels.chunks import num_spans
from llmcli.kernels.gemm_wide import WideCost
from llmcli.kernels.gemv import GemvCost
from llmcli.kernels.launches import Launch
from llmcli.kernels.spec import KernelCost
from llmcli.kernels.wide_plan import plan_narrow, plan_wide
from llmcli.runners.cuda.dry_run import PRODUCT

# gemv: its share of the rate at which memory is read, by the bits of a weight; the clocks from the end of the previous
# kernel to its own end, and those that each row after the first adds. Not yet fitted: the share is that of a skeleton
# (docs/log/2026-11-28-one-arithmetic.md), the clocks are those of the product before it.
GEMV_SHARES = {4: 0.85, 8: 1.0, 16: 1.0, 32: 0.8}
GEMV_CLOCKS, GEMV_ROW_CLOCKS = 6360, 220
# Overlapping launches hide part of those clocks: each multiprocessor loads this many bytes of weights before the
# previous kernel ends.
PREFETCHED_BYTES = {8: 55296, 4: 36864, 16: 65536, 32: 0}
# The shortest start, even if all of it is hidden: an empty kernel of 264 blocks takes 0.65 us in a graph.
LEAST_CLOCKS = 1290
# Attention: clocks of the first row, clocks of each further row, and the share of the bandwidth that reads the cache.
# A single row fills the card. Further rows come in waves of blocks that do not read ahead of each other, so their bytes
# take longer.
ATTENTION_CLOCKS, ATTENTION_ROW_CLOCKS = 7600, 560
CACHE_SHARE, CACHE_SHARE_OF_CODES = 0.9, 0.65
FURTHER_ROWS_SLOWNESS = 1.58
# Attention of many rows: clocks of the start and end, clocks of each row, and the share of the bandwidth.
MANY_ROWS_CLOCKS, MANY_ROWS_ROW_CLOCKS = 16000, 110
MANY_ROWS_SHARE, MANY_ROWS_SHARE_OF_CODES = 0.82, 0.65
# Clocks of sampling a token greedily, and of the start and end of any other kernel: of one that waits for all kernels
# before it, and of one that overlaps the previous one.
SAMPLE_CLOCKS, KERNEL_CLOCKS, OVERLAPPING_CLOCKS = 13860, 5940, 3500
# The share of the bandwidth that reads the logits of many rows.
LOGITS_SHARE = 0.5
# A product of the matrix library: its share of the rate of a large product, and its share of the reading rate when
# few tokens wait for their weights. Then the shares of that product's rate for prompts' attention and gemm_packed.
MATMUL_SHARE, MATMUL_READ_SHARE = 0.93, 0.7
ATTENTION_SHARE, PACKED_SHARE = 0.35, 0.16
# gemm_narrow: clocks of its start and end, and the bytes of weights and tokens that L2 gives a multiprocessor a clock.
NARROW_CLOCKS, NARROW_BYTES_A_CLOCK = 6500, 29
# Clocks of a multiprocessor for a span of a tile of int4, and those that each token of a block adds.
NARROW_INT4_CLOCKS, NARROW_INT4_TOKEN_CLOCKS = 110, 0.9
# The constants of gemm_wide's shares are in kernels/wide_plan.py. It asks for weights two steps ahead, which does not
# reach the full bandwidth.
WIDE_SHARE = 0.8
# Prompts' attention with wgmma: the same share, and clocks of its first queries, keys, values and of its last results.
# Fitted to 512 to 8,192 tokens of Llama-3.1-8B at depths up to 30,000.
WGMMA_ATTENTION_SHARE, WGMMA_ATTENTION_CLOCKS = 0.8, 16000
# Work on codes that have been read: bytes read and written a clock of one multiprocessor, by the bits of a code.
WIDENED_BYTES_A_CLOCK = {8: 32.2, 4: 8.93}
PACKED_BYTES_A_CLOCK = {8: 14.77, 4: 6.74}


@dataclass(frozen=True)
class Rates:
    """Rates of a card and its host, measured or from the maker. Without `flops` no prefill is predicted.

    Units: bytes and floating-point operations a second; `flops` by the type of the factors, as config.json names it;
    `launch_seconds`: the host's time to replay a launch of one of our kernels
    """

    read_bytes: float
    flops: Mapping[str, float]
    launch_seconds: float = 0.0


class Pricing:
    """Prices launches in seconds, for a card of these rates."""

    def __init__(self, rates: Rates, card: CardFacts):
        self._rates = rates
        self._card = card

    def seconds(self, launch: Launch) -> float:
        """Seconds from the launch's start to its end, without the part that other launches hide."""
        assert launch.cost is not None
        cost = launch.cost()
        if isinstance(cost, GemvCost):
            return self._gemv(cost)
        if isinstance(cost, WideCost):
            return self._gemm_narrow(cost) if launch.stem == "gemm_narrow" else self._gemm_wide(cost)
        if isinstance(cost, DecodeAttentionCost):
            return self._attention_rows(cost) if launch.stem == "attention_rows" else self._decode_attention(cost)
        if launch.stem == "sample_token":
            return cost.read_bytes / (LOGITS_SHARE * self._rates.read_bytes) + SAMPLE_CLOCKS / self._card.clock_hertz
        clocks = OVERLAPPING_CLOCKS if launch.overlaps and self._card.can_cluster else KERNEL_CLOCKS
        return self._prefill(launch.stem, cost) + clocks / self._card.clock_hertz

    def least_seconds(self, operations: float) -> float:
        """Seconds of `operations` at the rate of a large product of 16-bit floats; 0 if no rate is known."""
        return operations / self._flops("float16") if self._rates.flops else 0.0

    def _gemv(self, cost: GemvCost) -> float:
        card, bits = self._card, cost.element_bits
        reading = cost.layout.num_bytes / (GEMV_SHARES[bits] * self._rates.read_bytes)
        prefetched = PREFETCHED_BYTES[bits] * card.num_multiprocessors if card.can_cluster else 0
        start = GEMV_CLOCKS / card.clock_hertz - prefetched / self._rates.read_bytes
        start = max(start, LEAST_CLOCKS / card.clock_hertz)
        return reading + start + (cost.num_rows - 1) * GEMV_ROW_CLOCKS / card.clock_hertz

    def _gemm_wide(self, cost: WideCost) -> float:
        plan = plan_wide(cost.layout, cost.num_tokens, self._card.num_multiprocessors, cost.num_parts)
        multiplying = plan.library_flops / self._flops("float16")
        moving = (cost.read_bytes + cost.written_bytes) / (WIDE_SHARE * self._rates.read_bytes)
        return max(moving, multiplying) + OVERLAPPING_CLOCKS / self._card.clock_hertz

    def _gemm_narrow(self, cost: WideCost) -> float:
        layout = cost.layout
        form = plan_narrow(layout, cost.num_tokens, self._card.num_multiprocessors, cost.num_parts).form
        fetched = cost.stored_bytes + -(-layout.num_tiles // form.tiles) * 2 * form.tokens * layout.num_inputs
        reading = (cost.read_bytes + cost.written_bytes) / self._rates.read_bytes
        fetching = self._clocks(fetched / NARROW_BYTES_A_CLOCK)
        widening = 0.0
        if cost.element_bits == 4:
            of_span = NARROW_INT4_CLOCKS + NARROW_INT4_TOKEN_CLOCKS * form.tokens
            widening = self._clocks(layout.num_tiles * num_spans(layout) * of_span)
        return max(reading, fetching, widening) + NARROW_CLOCKS / self._card.clock_hertz

    def _decode_attention(self, cost: DecodeAttentionCost) -> float:
        share = CACHE_SHARE_OF_CODES if cost.element_bits == 8 else CACHE_SHARE
        slowness = (1 + (cost.num_rows - 1) * FURTHER_ROWS_SLOWNESS) / cost.num_rows
        start = ATTENTION_CLOCKS + (cost.num_rows - 1) * ATTENTION_ROW_CLOCKS
        return cost.stored_bytes * slowness / (share * self._rates.read_bytes) + start / self._card.clock_hertz

    def _attention_rows(self, cost: DecodeAttentionCost) -> float:
        share = MANY_ROWS_SHARE_OF_CODES if cost.element_bits == 8 else MANY_ROWS_SHARE
        start = MANY_ROWS_CLOCKS + cost.num_rows * MANY_ROWS_ROW_CLOCKS
        return cost.stored_bytes / (share * self._rates.read_bytes) + start / self._card.clock_hertz

    def _prefill(self, stem: str, cost: KernelCost) -> float:
        kind = "float32" if cost.element_bits == 32 else "float16"
        num_bytes = cost.read_bytes + cost.written_bytes
        moving = num_bytes / self._rates.read_bytes
        if stem == PRODUCT:
            return max(moving / MATMUL_READ_SHARE, cost.flops / (MATMUL_SHARE * self._flops(kind)))
        if stem == "attention_prefill":
            return max(moving, cost.flops / (ATTENTION_SHARE * self._flops(kind)))
        if stem == "attention_prefill_wgmma":
            multiplying = cost.flops / (WGMMA_ATTENTION_SHARE * self._flops(kind))
            return max(moving, multiplying) + WGMMA_ATTENTION_CLOCKS / self._card.clock_hertz
        if stem == "gemm_packed":
            multiplying = cost.flops / (PACKED_SHARE * self._flops("float16"))
            return moving + self._clocks(num_bytes / PACKED_BYTES_A_CLOCK[cost.element_bits]) + multiplying
        if stem == "dequantize" and cost.element_bits in WIDENED_BYTES_A_CLOCK:
            return moving + self._clocks(num_bytes / WIDENED_BYTES_A_CLOCK[cost.element_bits])
        return moving

    def _clocks(self, clocks: float) -> float:
        """Seconds of a number of clocks of every multiprocessor."""
        return clocks / (self._card.num_multiprocessors * self._card.clock_hertz)

    def _flops(self, kind: str) -> float:
        flops = self._rates.flops
        return flops[kind] if kind in flops else max(flops.values())
