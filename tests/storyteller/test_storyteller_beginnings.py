"""Texts that do not begin as a story does: what was typed is not learned, and the way back is plain English."""

import re
from collections import Counter
from itertools import islice
from random import Random

import pytest
from storyteller.beginnings import middle_beginning, name_beginning, page, strange_beginning
from storyteller.checkers import is_ended
from storyteller.corpus import documents
from storyteller.outside import OUTSIDE_PROMPTS
from storyteller.phrases import read_text


@pytest.mark.parametrize("make", [strange_beginning, middle_beginning, name_beginning])
def test_what_is_given_is_not_told(make):
    random = Random(1)
    for _ in range(300):
        ((given_role, given), (told_role, told)), story = make(random, "train")
        assert (given_role, told_role) == ("given", "")
        assert given
        assert told
        assert story.text.endswith(told[-200:])
        assert is_ended(told) or told.count('"') % 2 == 1  # cut inside speech
        assert told.isascii()
        assert not re.search(r"[{}@\[\]|¶]", told)


def test_beginnings_end_anywhere():
    random = Random(2)
    ends = Counter(made[0][0][1][-1:].isalpha() for made in (middle_beginning(random, "train") for _ in range(300)))
    inside = sum(
        made[0][0][1][-1:].isalpha() and made[0][1][1][:1].isalpha()
        for made in (middle_beginning(random, "train") for _ in range(300))
    )
    assert min(ends.values()) > 10
    assert inside > 20  # the model must finish a word that was begun


def test_strange_text_is_of_many_kinds():
    random = Random(3)
    given = [strange_beginning(random, "train")[0][0][1] for _ in range(1000)]
    assert len(set(given)) > 700
    assert sum(not text.isascii() for text in given) > 50
    assert sum(text.endswith("?") for text in given) > 100
    assert sum(" " not in text for text in given) > 50


def test_what_goes_on_never_sticks_to_what_was_given():
    random = Random(3)
    for _ in range(1000):
        ((_, given), (_, told)), _ = strange_beginning(random, "train")
        assert not re.match(r"\w", told) or given[-1] == " ", f"{given}{told}"
        assert not (given[-1] == " " and told[0] == " "), f"{given}{told}"
        assert "  " not in told[:200], told
        assert not re.match(r"[,.!?]", told) or given[-1] != ",", f"{given}{told}"


def test_a_clause_follows_a_joining_word():
    random = Random(5)
    documents = (strange_beginning(random, "train")[0] for _ in range(3000))
    told = [told for (_, given), (_, told) in documents if given.endswith(" and")]
    assert len(told) > 50
    assert all(re.match(r' ["A-Za-z]', text) for text in told)


def test_pages_are_letters_and_diaries():
    random = Random(4)
    texts = [page(random, "train")[0][0][1] for _ in range(200)]
    starts = Counter(text.split()[0] for text in texts)
    assert starts["Dear"] > 100
    assert all("\n\n" in text and "¶" not in text and "{" not in text for text in texts)
    assert len({text.split("\n\n")[1] for text in texts}) > 190


def test_the_corpus_holds_every_kind():
    roles = Counter(tuple(dict.fromkeys(role for role, _ in document)) for document in islice(documents(6, 0), 600))
    assert roles[("given", "")] > 60
    assert roles[("",)] > 60
    assert sum(count for kinds, count in roles.items() if "assistant" in kinds) > 250


def test_the_examination_asks_what_was_not_trained():
    trained = {
        line for name in ("fragments", "foreign", "questions") for line in read_text(f"strange/{name}.txt").splitlines()
    }
    assert not trained & set(OUTSIDE_PROMPTS)
