"""Texts by the card, and where the host's choices differ; without CuPy, for worker processes."""

import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from llmcli.lab.cases.sample_token import NUM_PROMPT_TOKENS, make_logits
from llmcli.sampling.chain import Choice, choose
from llmcli.sampling.params import Sampler


def go_on(sampler: Sampler, choice: Choice) -> Sampler:
    """The sampler of the token after a choice."""
    return sampler if choice.mirostat_mu is None else replace(sampler, mirostat_mu=choice.mirostat_mu)


@dataclass(frozen=True)
class Text:
    """A row by the card: step i had row (first_logits + i) % len(pool) of the pool of logits.

    Shapes: history [num_tokens] int32, NUM_PROMPT_TOKENS of them the prompt
    """

    sampler: Sampler
    history: np.ndarray
    first_logits: int
    num_pool_rows: int
    vocab_size: int
    pool_seed: int


def first_difference(text: Text) -> str | None:
    """The first place where the host chooses another token than the card, or None."""
    pool = make_logits(text.num_pool_rows, text.vocab_size, text.pool_seed)
    sampler = text.sampler
    for position in range(NUM_PROMPT_TOKENS, len(text.history)):
        logits = pool[(text.first_logits + position - NUM_PROMPT_TOKENS) % len(pool)]
        expected = choose(logits, text.history[:position], sampler)
        if text.history[position] != expected.token_id:
            return f"position {position}: {text.history[position]}, the host {expected.token_id}; {sampler}"
        sampler = go_on(sampler, expected)
    return None


def first_differences(texts: Iterable[Text]) -> list[str]:
    """Every text's first difference, found in parallel: the host's chain takes about a millisecond a token."""
    # A process with a CUDA context must not fork.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        return [found for found in pool.map(first_difference, texts) if found is not None]
