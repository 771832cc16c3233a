"""Predicts how long a model takes on a card: a dry run lists the launches, and `Pricing` adds up their seconds.

A launch takes the longer of two times: its bytes at a share of the rate at which the card reads, and its operations at
a share of the rate of a large product. Its start is added, without the part that overlaps the launch before it. The
shares stand in one table for each family of cards; `python -m scripts.measure_shares MODEL ...` measures a table.
Nothing here needs CuPy.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

from llmcli.kernels.gemm_wide import WideCost
from llmcli.kernels.launches import CardFacts, Launch
from llmcli.kernels.wide_plan import plan_wide
from llmcli.runners.cuda.plan.memory import MemoryPlan
from llmcli.runners.cuda.predict.dry_run import DryModel, Started


class Shares(NamedTuple):
    """What a kernel reaches: shares of the two rates, and the microseconds of a launch apart from both."""

    reading: float
    multiplying: float
    microseconds: float


OTHERS = ""  # the key of kernels that a table does not name
# By kernel, or by kernel and bits of a weight or cached value. Fitted to whole steps and prompts of an H200, measured
# from 2026-11-25 to 11-27; steps of an H100 agree within 3 %. To be measured: gemv, gemm_narrow and gemm_wide of rows,
# of which only the launches of docs/log/2026-11-28-one-arithmetic.md are known; attention_span, which has what
# attention_decode has; caches of codes; gemm_mma and gemv_float, guesses.
HOPPER: Mapping[str, Shares] = {
    "gemv": Shares(0.97, 0.08, 1.7),
    "gemv 4": Shares(0.9, 0.138, 1.6),
    "gemv_float": Shares(0.8, 1.0, 1.8),
    "gemm_narrow": Shares(0.9, 0.6, 2.5),
    "gemm_narrow 4": Shares(0.6, 0.6, 2.5),
    "gemm_wide": Shares(0.8, 1.0, 2.5),
    "gemm_mma": Shares(0.7, 0.5, 3.0),
    "attention_decode": Shares(0.75, 1.0, 4.0),
    "attention_decode 8": Shares(0.55, 1.0, 4.0),
    "attention_span": Shares(0.75, 1.0, 4.0),
    "attention_rows": Shares(0.75, 1.0, 10.0),
    "attention_rows 8": Shares(0.6, 1.0, 10.0),
    "attention_prefill_wgmma": Shares(1.0, 0.8, 10.0),
    "attention_prefill": Shares(1.0, 0.35, 3.0),
    "sample_token": Shares(0.5, 1.0, 7.0),
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


# Host overhead of a chunk while the card waits, in units of a replayed launch: sending its tokens and cutting its
# arrays. Launches of chunks of the latest lengths are kept. Those of another length are checked and planned first,
# which takes 0.3 ms more; so are a pass's launches for its first or last layer only. Fitted to prompts of 8 to 8,000
# tokens on an H200. Times of models of 1B and less differ by 20 % from one process to the next.
CHUNK_LAUNCHES = 45
# From asking for a token to having it, without the sampling kernel: sending to the card, and launching one graph.
FIRST_TOKEN_SECONDS = 150e-6


class CardPredictor:
    """Predicts times of a planned model on a card with these rates, for at most the plan's rows."""

    def __init__(self, plan: MemoryPlan, rates: Rates, card: CardFacts):
        self._chunk_tokens = plan.chunk_tokens
        self._rates = rates
        self._pricing = Pricing(rates, card)
        self._model = DryModel(plan, card)
        self._step = cache(self._model.step)

    def decode_bytes(self, depth: int, num_rows: int = 1) -> int:
        """Bytes that one step reads (weights, keys, values) for `num_rows` rows of `depth` tokens each."""
        return sum(
            one.count * one.launch.cost().stored_bytes
            for one in self._step(num_rows, depth)
            if one.launch.cost is not None
        )

    def decode_seconds(self, depth: int, num_rows: int = 1) -> float:
        """Seconds of one step of `num_rows` rows of `depth` tokens each."""
        return self._seconds(self._step(num_rows, depth))

    def prefill_seconds(self, num_tokens: int) -> float | None:
        """Seconds until a prompt's last logits; None if the rates have no `flops`."""
        if not self._rates.flops:
            return None
        chunks = sum(self._chunk_seconds(*chunk) for chunk in self._chunks(num_tokens))
        return chunks + self._seconds(self._model.head())

    def first_token_seconds(self, num_tokens: int) -> float | None:
        """Seconds of a prompt and the first token after it; None as `prefill_seconds`."""
        prefill = self.prefill_seconds(num_tokens)
        return None if prefill is None else prefill + FIRST_TOKEN_SECONDS

    def decode_floor_seconds(self, depth: int, num_rows: int = 1) -> float:
        """The longer of a step's bytes at the bandwidth and its operations at the rate of a large product.

        Counts padding lanes (up to 7).
        """
        return self._floor_seconds(depth, num_rows, self._step(num_rows, depth))

    def prefill_floor_seconds(self, num_tokens: int) -> float | None:
        """The same for a prompt, whose weights are read once; None as `prefill_seconds`."""
        if not self._rates.flops:
            return None
        chunks = [self._model.span(count, begin, is_last=is_last) for count, begin, is_last in self._chunks(num_tokens)]
        return self._floor_seconds(0, 1, chain(*chunks, self._model.head()))

    def _floor_seconds(self, depth: int, num_rows: int, started: Iterable[Started]) -> float:
        """The floor for launches whose stored bytes are those of a step."""
        costs = ((one.count, one.launch.cost()) for one in started if one.launch.cost is not None)
        operations = sum(count * cost.flops for count, cost in costs)
        reading = self.decode_bytes(depth, num_rows) / self._rates.read_bytes
        return max(reading, self._pricing.least_seconds(operations))

    def _chunks(self, num_tokens: int) -> Iterator[tuple[int, int, bool]]:
        """Number of tokens and start of each chunk of a prompt, and whether it is the last one."""
        for begin in range(0, num_tokens, self._chunk_tokens):
            count = min(self._chunk_tokens, num_tokens - begin)
            yield count, begin, begin + count == num_tokens

    def _chunk_seconds(self, num_tokens: int, start: int, is_last: bool) -> float:
        started, seconds = self._model.span(num_tokens, start, is_last=is_last), self._rates.launch_seconds
        replayed = sum(one.count - 1 for one in started)
        return CHUNK_LAUNCHES * seconds + max(self._seconds(started), replayed * seconds)

    def _seconds(self, started: Iterable[Started]) -> float:
        return sum(one.count * self._pricing.seconds(one.launch) for one in started)
