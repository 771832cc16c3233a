"""`Sampler`: everything that decides a draw apart from logits and history, as one plain value."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmcli.errors import UsageError
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
    - `dry_breaker_token_ids`: no repetition that DRY sees reaches across these tokens. Right for a string such as a
      newline are all tokens whose text contains it, as in llama.cpp.

    Raises: UsageError for a seed outside [0, 2^64), a sample index outside [0, 2^32), a bias that is NaN
    or +inf, or of a negative token id.
    """

    params: SamplingParams
    seed: int
    sample_index: int = 0
    num_prompt_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    dry_breaker_token_ids: frozenset[int] = frozenset()

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
