"""A `DraftSource` that knows how texts continue, and is sometimes wrong."""

import random
from collections.abc import Callable, Sequence

from llmcli.errors import LLMCliError
from llmcli.sampling.params import Sampler

VOCAB_SIZE = 256
NextToken = Callable[[Sequence[int], Sampler], int]


class ScriptedSource:
    """Each draft is the result of `next_token` with the given chance, else another token."""

    is_free = True

    def __init__(self, next_token: NextToken, chance: float, seed: int = 0):
        self.next_token = next_token
        self.chance = chance
        self.rng = random.Random(seed)
        self.num_open = 0

    def begin(self, prompt: Sequence[int], sampler: Sampler) -> "ScriptedGuesses":
        self.num_open += 1
        return ScriptedGuesses(self, prompt, sampler)


class ScriptedGuesses:
    def __init__(self, source: ScriptedSource, prompt: Sequence[int], sampler: Sampler):
        self.source = source
        self.history = list(prompt)
        self.sampler = sampler

    def extend(self, token_ids: Sequence[int]) -> None:
        self.history += token_ids

    def kind(self) -> int:
        return 0

    def guess(self, count: int) -> tuple[int, ...]:
        history, rng = list(self.history), self.source.rng
        for _ in range(count):
            try:
                token_id = self.source.next_token(history, self.sampler)
            except LLMCliError:
                token_id = 0
            is_right = rng.random() < self.source.chance
            history.append(token_id if is_right else (token_id + rng.randint(1, VOCAB_SIZE - 1)) % VOCAB_SIZE)
        return tuple(history[len(self.history) :])

    def close(self) -> None:
        self.source.num_open -= 1
