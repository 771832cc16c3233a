"""The n-gram index against a search through the whole text."""

import random
from collections.abc import Sequence

import pytest

from llmcli.engine.draft_sources import NgramIndex, NgramSource
from llmcli.sampling.params import Sampler, SamplingParams

SAMPLER = Sampler(SamplingParams(), seed=0)


def longest_match(token_ids: Sequence[int], most: int = 32) -> tuple[int, int]:
    """The latest place after the longest earlier repetition of the text's end; (0, 0) if it is shorter than 2."""
    best = (0, 0)
    for place in range(1, len(token_ids)):
        length = 0
        while length < min(place, most) and token_ids[place - 1 - length] == token_ids[-1 - length]:
            length += 1
        if length >= max(best[1], 2):
            best = (place, length)
    return best


@pytest.mark.parametrize("num_words", [2, 4, 30, 1000])
def test_finds_the_longest_match(num_words: int) -> None:
    """The longest of the latest 16 with the same end; a text of few tokens has more, and the length may be less."""
    rng = random.Random(num_words)
    phrases = [[rng.randrange(num_words) for _ in range(rng.randint(1, 40))] for _ in range(5)]
    index, token_ids, num_matches = NgramIndex(), [], 0
    while len(token_ids) < 400:
        phrase = rng.choice(phrases)[: rng.randint(1, 40)]
        for token_id in phrase:
            token_ids.append(token_id)
            index.extend([token_id])
            expected, found = longest_match(token_ids), index.match()
            if num_words >= 30:
                assert found == expected
            assert found[1] <= expected[1]
            assert (found[1] == 0) == (expected[1] == 0)
            if found[1]:
                place, length = found
                assert token_ids[place - length : place] == token_ids[-length:]
                num_matches += 1
    assert num_matches > 100


def test_the_tokens_behind_a_match() -> None:
    index = NgramIndex([1, 2, 3, 4, 5, 6, 1, 2])
    assert index.match() == (2, 2)
    assert index.behind(2, 4) == (3, 4, 5, 6)
    loop = NgramIndex([9, 1, 2, 1, 2, 1, 2])
    assert loop.match() == (5, 4)
    assert loop.behind(5, 7) == (1, 2, 1, 2, 1, 2, 1)


def test_a_shortened_index_is_that_of_the_shorter_text() -> None:
    rng = random.Random(1)
    token_ids = [rng.randrange(5) for _ in range(300)]
    for length in (299, 120, 3, 1, 0):
        index = NgramIndex(token_ids)
        index.shorten(length)
        more = [rng.randrange(5) for _ in range(20)]
        index.extend(more)
        fresh = NgramIndex([*token_ids[:length], *more])
        assert index.token_ids == fresh.token_ids
        assert index.match() == fresh.match()


class CountedList(list[int]):
    """Counts accesses to single items."""

    reads = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        CountedList.reads += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("num_words", [1, 2, 50])
def test_a_token_of_a_long_text_costs_what_one_of_a_short_text_costs(num_words: int) -> None:
    rng = random.Random(1)
    reads = {}
    for length in (1_000, 100_000):
        index = NgramIndex([rng.randrange(num_words) for _ in range(length)])
        index.token_ids = CountedList(index.token_ids)
        CountedList.reads = 0
        for _ in range(20):
            index.extend([rng.randrange(num_words)])
            index.match()
        reads[length] = CountedList.reads
    assert reads[100_000] <= max(1.5 * reads[1_000], 20 * 2 * 16 * 2 * 33)
    assert reads[100_000] <= 20 * 16 * 2 * 2 * 33


def test_the_next_turn_finds_what_the_turn_before_looked_up() -> None:
    source = NgramSource()
    prompt, answer = [5, 6, 7, 8], [1, 2, 3]
    guesses = source.begin(prompt, SAMPLER)
    guesses.extend(answer)
    guesses.close()
    for turn in ([*prompt, *answer, 9, 6, 7], [5, 6, 7, 4, 6, 7], [6, 7, 6, 7]):
        again, fresh = source.begin(turn, SAMPLER), NgramSource().begin(turn, SAMPLER)
        assert (again.kind(), again.guess(2)) == (fresh.kind(), fresh.guess(2))
        again.close()


def test_nothing_matches_nothing() -> None:
    for token_ids in ((), (1,), (1, 2), (1, 2, 3)):
        assert NgramSource().begin(token_ids, SAMPLER).kind() is None
