"""Loosened wording stays English."""

from random import Random

import pytest
from storyteller.grammar import Values
from storyteller.paraphrase import loosen
from storyteller.phrases import POOLS

SLOTS = {"hero": "Ann", "Hero": "Ann", "kind": "fox", "he": "she", "He": "She", "feel": "glad"}


def wordings(text: str) -> set[str]:
    """All wordings in a hundred tellings."""
    random, template = Random(1), POOLS.parse(loosen(text))
    return {Values(SLOTS).fill(template, random.random) for _ in range(100)}


@pytest.mark.parametrize("mark", ["?", "!"])
def test_who_speaks_behind_a_question_has_no_capital(mark: str) -> None:
    assert wordings(f'"Well{mark}" {{hero}} asked.') == {f'"Well{mark}" Ann asked.', f'"Well{mark}" the fox asked.'}


def test_a_sentence_behind_speech_has_a_capital() -> None:
    told = wordings('"Well?" {hero} looked up.')
    assert told >= {'"Well?" Ann looked up.', '"Well?" The fox looked up.'}
    assert not any("the fox" in one for one in told)


def test_two_things_are_joined_only_if_one_does_both() -> None:
    assert "She rested and felt glad." in wordings("{He} rested. {He} felt {feel}.")
    assert not any("fitted and felt" in one for one in wordings("It very nearly fitted. {He} felt {feel}."))
    assert not any("stirred and felt" in one for one in wordings("Nothing stirred. {He} felt {feel}."))


def test_a_synonym_has_a_capital_only_where_the_word_had_one() -> None:
    assert any(one.startswith("It was") for one in wordings("It was very near."))
    assert not any("It was" in one for one in wordings("Now it was very near."))
