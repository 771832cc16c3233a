"""`logit_bias` as OpenAI's bodies have it."""

import math
from typing import Any

from llmcli.differences import shown


def read_logit_bias(value: Any) -> dict[int, float]:
    """Token ids and what is added to their logits. JSON's keys are texts, so ids come as such.

    Raises: ValueError, whose text goes on behind the key's name
    """
    problem = ValueError(f'{shown(value)}, expected token ids and numbers, such as {{"50256": -100}}')
    if not isinstance(value, dict):
        raise problem
    biases = {}
    for key, bias in value.items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool) and math.isfinite(bias)
        if not (key.isascii() and key.isdecimal() and len(key) < 19 and is_number):
            raise problem
        biases[int(key)] = float(bias)
    return biases
