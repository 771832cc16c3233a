"""Predicts how long a model takes on a card. A dry run lists the launches, and pricing adds up their seconds.

Nothing here needs CuPy.
"""

from collections.abc import Iterable
from functools import cache

from llmcli.kernels.card_facts import CardFacts
from llmcli.runners.cuda.dry_run import DryModel, Started, num_launches
from llmcli.runners.cuda.memory import MemoryPlan
from llmcli.runners.cuda.pricing import Pricing, Rates

# Host overhead of a chunk while the card waits, in units of a replayed launch: its tokens are sent, and its arrays are
# cut. Launches of chunks of the latest lengths are kept. Those of another length are checked and planned first, which
# takes 0.3 ms more. Fitted to prompts of 12 to 2,048 tokens. Times of models of 1B and less differ by 20 % from one
# process to the next.
CHUNK_LAUNCHES = 100
# From asking for a token to having it, without the sampling kernel: sending to the card, and launching one graph.
FIRST_TOKEN_SECONDS = 150e-6


class CardPredictor:
    """Predicts times of a planned model on a card of these rates, for at most the plan's rows."""

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
        begins = range(0, num_tokens, self._chunk_tokens)
        chunks = (self._chunk_seconds(min(self._chunk_tokens, num_tokens - begin), begin) for begin in begins)
        return sum(chunks) + self._seconds(self._model.head())

    def first_token_seconds(self, num_tokens: int) -> float | None:
        """Seconds of a prompt and the first token after it; None as `prefill_seconds`."""
        prefill = self.prefill_seconds(num_tokens)
        return None if prefill is None else prefill + FIRST_TOKEN_SECONDS

    def _chunk_seconds(self, num_tokens: int, start: int) -> float:
        started, seconds = self._model.span(num_tokens, start), self._rates.launch_seconds
        return CHUNK_LAUNCHES * seconds + max(self._seconds(started), (num_launches(started) - len(started)) * seconds)

    def _seconds(self, started: Iterable[Started]) -> float:
        return sum(one.count * self._pricing.seconds(one.launch) for one in started)
