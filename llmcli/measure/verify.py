"""The same tokens through the same model on two runners: how far apart are their logits, and may they be?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmcli.runners.base import AllLogits, Runner, Span

# The inputs of four products and of attention, keys and values are each rounded to 16 bits once, of which float16
# keeps 11. Rounding errors are independent: their sum grows with the root of their number.
_ROUNDINGS_PER_LAYER = 7
_ROUNDOFF = 2.0**-11
_GROWTH = 2.0  # what later layers may make of an error
_LARGEST = 6.0  # standard deviations: the largest of ten million normal numbers lies within


@dataclass(frozen=True)
class LogitsVerdict:
    """Logits of a text on two runners.

    `largest` is the largest difference and `spread` the standard deviation of that position's logits; `bound` is what
    their ratio may be. The first `num_prompt_tokens` ran together, the others one by one.
    """

    num_tokens: int
    num_prompt_tokens: int
    largest: float
    spread: float
    bound: float
    position: int
    token_id: int
    num_same_choices: int

    @property
    def part_of_bound(self) -> float:
        """The largest difference as a part of what it may be."""
        return self.largest / (self.spread * self.bound)

    @property
    def is_right(self) -> bool:
        """Whether roundings can explain every difference; NaN is not right."""
        return self.part_of_bound <= 1


def compare_logits(runner: Runner, reference: Runner, token_ids: Sequence[int]) -> LogitsVerdict:
    """Run the first half of the tokens as a prompt and the others one by one, on both; compare all logits.

    Raises: ValueError for fewer than two tokens; DeviceError
    """
    if len(token_ids) < 2:
        raise ValueError(f"{len(token_ids)} tokens, needed are 2: one for a prompt, and one alone")
    num_prompt_tokens = len(token_ids) // 2
    found, expected = (_logits(one, token_ids, num_prompt_tokens) for one in (runner, reference))
    spread = expected.std(axis=1, dtype=np.float64)
    difference = np.abs(found.astype(np.float64) - expected)
    ratio = difference / spread[:, None]
    position, token_id = map(int, np.unravel_index(np.argmax(ratio), ratio.shape))  # NaN counts as the largest
    return LogitsVerdict(
        num_tokens=len(token_ids),
        num_prompt_tokens=num_prompt_tokens,
        largest=float(difference[position, token_id]),
        spread=float(spread[position]),
        bound=_bound(runner.config.num_hidden_layers),
        position=position,
        token_id=token_id,
        num_same_choices=int((found.argmax(axis=1) == expected.argmax(axis=1)).sum()),
    )


def _bound(num_layers: int) -> float:
    """How far a logit may be off, as a part of the standard deviation of all."""
    return _LARGEST * _GROWTH * _ROUNDOFF * math.sqrt(_ROUNDINGS_PER_LAYER * num_layers)


def _logits(runner: Runner, token_ids: Sequence[int], num_prompt_tokens: int) -> AllLogits:
    """The logits behind every token. Shapes: result [num_tokens, vocab_size]"""
    prompt, others = tuple(token_ids[:num_prompt_tokens]), token_ids[num_prompt_tokens:]
    row = runner.open(prompt)
    try:
        runner.keep(row, 0)
        parts = []
        while (begin := runner.num_tokens(row)) < num_prompt_tokens:
            end = runner.span_end(row, num_prompt_tokens)
            parts.append(runner.queue([Span(row, prompt[begin:end], "none")]).logits(0))
        parts += [runner.queue([Span(row, (token_id,), "none")]).logits(0) for token_id in others]
        return np.concatenate(parts)
    finally:
        runner.close(row)
