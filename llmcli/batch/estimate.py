"""How long a batch takes, by what `plan` predicts of prompts and decode steps."""

from collections import Counter
from collections.abc import Sequence

from llmcli.measure.plan import Predictor


def estimate_seconds(predictor: Predictor, prompts: Sequence[tuple[int, int]], num_rows: int) -> float | None:
    """The time of a run in which every text gets as long as it may; None where prompts cannot be predicted.

    `prompts` are the tokens of each prompt and of its text. The sum of the prompts' times, and of the decode steps of
    `num_rows` rows at the mean depth: what rows wait for each other is left out.
    """
    total = 0.0
    for length, count in Counter(length for length, _ in prompts).items():
        seconds = predictor.prefill_seconds(length)
        if seconds is None:
            return None
        total += count * seconds
    num_decoded = sum(new - 1 for _, new in prompts)  # prefill gives the first
    if not num_decoded:
        return total
    depth = sum((new - 1) * (length + new / 2) for length, new in prompts) / num_decoded
    steps = max(num_decoded / num_rows, max(new - 1 for _, new in prompts))
    return total + steps * predictor.decode_seconds(round(depth), num_rows)
