"""Predicts how long a model takes on a card. A dry run lists the launches, and pricing adds up their seconds.

Nothing here needs CuPy.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain

from llmcli.kernels.card_facts import CardFacts
from llmcli.runners.cuda.dry_run import PRODUCT, DryModel, Started
from llmcli.runners.cuda.memory import MemoryPlan
from llmcli.runners.cuda.pricing import Pricing, Rates

# Host overhead of a chunk while the card waits, in units of a replayed launch: sending its tokens and cutting its
# arrays. Launches of chunks of the latest lengths are kept. Those of another length are checked and planned first,
# which takes 0.3 ms more; so are a pass's launches for its first or last layer only. Fitted to prompts of 8 to 8,000
# tokens on an H200. Times of models of 1B and less differ by 20 % from one process to the next.
CHUNK_LAUNCHES = 45
# The host's time to replay a product of the matrix library, in the same unit.
LIBRARY_LAUNCHES = 2.7
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
        replayed = sum((one.count - 1) * (LIBRARY_LAUNCHES if one.launch.stem == PRODUCT else 1) for one in started)
        return CHUNK_LAUNCHES * seconds + max(self._seconds(started), replayed * seconds)

    def _seconds(self, started: Iterable[Started]) -> float:
        return sum(one.count * self._pricing.seconds(one.launch) for one in started)
