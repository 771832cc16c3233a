"""`Sampler`: everything that decides a draw apart from logits and history, as one plain value."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmcli.errors import UsageError
from llmcli.sampling.order import DEFAULT_ORDER, check_order
from llmcli.sampling.params import SamplingParams

SEED_BITS = 64
SAMPLE_INDEX_BITS = 32


@dataclass(frozen=True)
class Sampler:
    """The parameters, the seed, which sample this is, and what the chain must know of prompt and tokenizer.

    - `num_prompt_tokens`: how much of the history is prompt. The presence and frequency penalties and min_new_tokens
      count from there.
    - `eos_token_ids`: the tokens that end a text. min_new_tokens bans them for a while, `ignore_eos` always, as
      llama.cpp's flag does: vLLM's lets the model choose one and goes on behind it, but what a model writes after
      reading the end of a text is no continuation of that text. XTC spares them.
    - `logit_bias`: added to a token's logit; -inf bans it. Ids outside the vocabulary change nothing.
    - `sequence_bias`: sequences of token ids, each with what is added to the logit of its last token where the text
      ends in the others; -inf bans it there. What several sequences add to one token adds up.
    - `begin_suppress_token_ids`: tokens that are banned as the first of the generated ones.
    - `forced_eos_token_ids`: at position `forced_eos_position` one of these is chosen, whatever the logits say.
    - `dry_breaker_token_ids`: no repetition that DRY sees reaches across these tokens. Right for a string such as a
      newline are all tokens whose text contains it, as in llama.cpp.
    - `order`: the filters that run, in their order, named as in `chain.FILTERS`.
    - `mirostat_mu`: mirostat's state before this draw, in bits; None at the first token of a text, for 2 * tau.

    Raises: UsageError for a seed outside [0, 2^64), a sample index outside [0, 2^32), a bias that is NaN
    or +inf, or of a negative token id, a sequence without tokens; for an order as `check_order`.
    """

    params: SamplingParams
    seed: int
    sample_index: int = 0
    num_prompt_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    begin_suppress_token_ids: frozenset[int] = frozenset()
    forced_eos_token_ids: frozenset[int] = frozenset()
    forced_eos_position: int | None = None
    dry_breaker_token_ids: frozenset[int] = frozenset()
    order: tuple[str, ...] = DEFAULT_ORDER
    mirostat_mu: float | None = None

    def __post_init__(self) -> None:
        for name, bits in (("seed", SEED_BITS), ("sample_index", SAMPLE_INDEX_BITS)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**bits:
                raise UsageError(f"{name} is {value!r}, expected an integer >= 0 and < 2^{bits}")
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or math.isnan(bias) or bias == math.inf:
                raise UsageError(
                    f"the logit bias of token {token_id} is {bias}, "
                    "expected a token id >= 0 and a finite number or -inf"
                )
        for token_ids, bias in self.sequence_bias:
            if not token_ids or min(token_ids) < 0 or math.isnan(bias) or bias == math.inf:
                raise UsageError(
                    f"the bias of the sequence {list(token_ids)} is {bias}, "
                    "expected token ids >= 0 and a finite number or -inf"
                )
        check_order(self.order, self.params)
