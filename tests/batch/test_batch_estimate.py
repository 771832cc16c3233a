"""The estimate of a batch's time: the sum of the prompts and of the decode steps, on a machine of round numbers."""

import pytest

from llmcli.batch.run import estimate_seconds


class RoundMachine:
    """A prompt takes a second a token, a step 10 seconds and a second for every 100 tokens of depth."""

    def decode_bytes(self, depth: int, num_rows: int = 1) -> int:
        return 0

    def decode_seconds(self, depth: int, num_rows: int = 1) -> float:
        return 10 + depth / 100

    def prefill_seconds(self, num_tokens: int) -> float | None:
        return float(num_tokens)

    def first_token_seconds(self, num_tokens: int) -> float | None:
        return float(num_tokens)


@pytest.mark.parametrize(
    ("prompts", "num_rows", "seconds"),
    [
        ([(5, 1)], 1, 5),  # the first token comes with the prompt
        ([(5, 1), (5, 1), (7, 1)], 2, 17),
        ([(50, 101)], 1, 50 + 100 * 11),  # depth 100 on average
        ([(50, 101)] * 4, 4, 4 * 50 + 100 * 11),
        ([(50, 101)] * 4, 2, 4 * 50 + 200 * 11),
        ([(50, 101)], 8, 50 + 100 * 11),  # one text's steps follow each other
    ],
)
def test_sums(prompts: list[tuple[int, int]], num_rows: int, seconds: float) -> None:
    assert estimate_seconds(RoundMachine(), prompts, num_rows) == pytest.approx(seconds, rel=1e-2)


def test_unknown_rates_are_no_estimate() -> None:
    class Unknown(RoundMachine):
        def prefill_seconds(self, num_tokens: int) -> float | None:
            return None

    assert estimate_seconds(Unknown(), [(5, 5)], 1) is None


def test_nothing_to_run_takes_no_time() -> None:
    assert estimate_seconds(RoundMachine(), [], 1) == 0
