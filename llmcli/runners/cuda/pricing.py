"""Predicts how long one launch takes on a card, from its declared cost. Nothing here needs CuPy.

A launch takes the longer of two times: its bytes at a share of the rate at which the card reads, and its operations at
a share of the rate of a large product. Its start is added, without the part that overlaps the launch before it. The
shares stand in one table for each family of cards; `python -m scripts.measure_shares MODEL ...` measures a table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from llmcli.kernels.card_facts import CardFacts
from llmcli.kernels.gemm_wide import WideCost
from llmcli.kernels.launches import Launch
from llmcli.kernels.wide_plan import plan_wide
from llmcli.runners.cuda.dry_run import PRODUCT


class Shares(NamedTuple):
    """What a kernel reaches: shares of the two rates, and the microseconds of a launch apart from both."""

    reading: float
    multiplying: float
    microseconds: float


OTHERS = ""  # the key of kernels that a table does not name
# By kernel, or by kernel and bits of a weight or cached value. Fitted to whole steps and prompts of an H200, measured
# from 2026-11-25 to 11-27; steps of an H100 agree within 3 %. To be measured: gemv, gemm_narrow and gemm_wide of rows,
# of which only the launches of docs/log/2026-11-28-one-arithmetic.md are known; attention_span, which has what
# attention_decode has; caches of codes; gemm_packed and dequantize, by older figures; gemv_float, a guess.
HOPPER: Mapping[str, Shares] = {
    "gemv": Shares(0.97, 0.08, 1.7),
    "gemv 4": Shares(0.9, 0.138, 1.6),
    "gemv_float": Shares(0.8, 1.0, 1.8),
    "gemm_narrow": Shares(0.9, 0.6, 2.5),
    "gemm_narrow 4": Shares(0.6, 0.6, 2.5),
    "gemm_wide": Shares(0.8, 1.0, 2.5),
    "attention_decode": Shares(0.75, 1.0, 4.0),
    "attention_decode 8": Shares(0.55, 1.0, 4.0),
    "attention_span": Shares(0.75, 1.0, 4.0),
    "attention_rows": Shares(0.75, 1.0, 10.0),
    "attention_rows 8": Shares(0.6, 1.0, 10.0),
    "attention_prefill_wgmma": Shares(1.0, 0.8, 10.0),
    "attention_prefill": Shares(1.0, 0.35, 3.0),
    "sample_token": Shares(0.5, 1.0, 7.0),
    "gemm_packed 8": Shares(0.46, 0.14, 3.0),
    "gemm_packed 4": Shares(0.28, 0.14, 3.0),
    "dequantize 8": Shares(0.65, 1.0, 3.0),
    "dequantize 4": Shares(0.34, 1.0, 3.0),
    PRODUCT: Shares(0.7, 0.93, 3.0),
    OTHERS: Shares(1.0, 1.0, 2.0),
}
# Cards without wgmma. All of it is to be measured: it is what an H200 does without wgmma, and without overlaps, which
# costs a launch 1 to 2 us.
BEFORE_HOPPER: Mapping[str, Shares] = {
    **HOPPER,
    "gemv": Shares(0.97, 0.08, 3.3),
    "gemv 4": Shares(0.9, 0.138, 3.2),
    OTHERS: Shares(1.0, 1.0, 3.0),
}
# The operations that a card makes in the time of reading a byte, where its rate of products is not known: about those
# of cards from the A100 to the H200.
OPERATIONS_A_BYTE = 160.0


@dataclass(frozen=True)
class Rates:
    """Rates of a card and its host, measured or from the maker. Without `flops` no prefill is predicted.

    Units: bytes and floating-point operations a second; `flops` by the type of the factors, as config.json names it;
    `launch_seconds`: the host's time to replay a launch of one of our kernels
    """

    read_bytes: float
    flops: Mapping[str, float]
    launch_seconds: float = 0.0

    def flops_of(self, kind: str) -> float:
        """Operations a second with factors of this type; of the fastest type if it is not known."""
        return self.flops.get(kind) or max(self.flops.values(), default=OPERATIONS_A_BYTE * self.read_bytes)


class Demand(NamedTuple):
    """What a launch takes at the full rates: seconds for its bytes and for its operations. `entry`: its shares."""

    entry: str
    moving: float
    multiplying: float


def demand_of(launch: Launch, rates: Rates, card: CardFacts) -> Demand:
    """The demand of a launch that declares its cost.

    The blocks of gemm_wide wait for the busiest: its plan says which operations would take the matrix library as long.
    """
    assert launch.cost is not None
    cost = launch.cost()
    operations: float = cost.flops
    if isinstance(cost, WideCost) and launch.stem == "gemm_wide":
        operations = plan_wide(cost.layout, cost.num_tokens, card.num_multiprocessors, cost.num_parts).library_flops
    rate = rates.flops_of("float32" if cost.element_bits == 32 else "float16")
    entry = entry_of(launch.stem, cost.element_bits, table_of(card))
    return Demand(entry, (cost.read_bytes + cost.written_bytes) / rates.read_bytes, operations / rate)


def table_of(card: CardFacts) -> Mapping[str, Shares]:
    """The table of a card's family."""
    return HOPPER if card.can_wgmma else BEFORE_HOPPER


def entry_of(stem: str, bits: int, table: Mapping[str, Shares]) -> str:
    """The table's entry for a kernel: with the bits of its weights, else without, else that of others."""
    return next(key for key in (f"{stem} {bits}", stem, OTHERS) if key in table)


class Pricing:
    """Prices launches in seconds, for a card of these rates."""

    def __init__(self, rates: Rates, card: CardFacts):
        self._rates = rates
        self._card = card
        self._table = table_of(card)

    def seconds(self, launch: Launch) -> float:
        """Seconds from the launch's start to its end, without the part that other launches hide."""
        entry, moving, multiplying = demand_of(launch, self._rates, self._card)
        shares = self._table[entry]
        return max(moving / shares.reading, multiplying / shares.multiplying) + 1e-6 * shares.microseconds

    def least_seconds(self, operations: float) -> float:
        """Seconds of `operations` at the rate of a large product of 16-bit floats; 0 if no rate is known."""
        return operations / self._rates.flops_of("float16") if self._rates.flops else 0.0
