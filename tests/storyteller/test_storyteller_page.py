"""The page that adds details to passages that are always worded the same, and the facts read back out of a story."""

from itertools import islice
from random import Random

import numpy as np
from storyteller.corpus import documents
from storyteller.evaluate import questions_about_own
from storyteller.grammar import Pools, Values
from storyteller.overlap import RUN_WORDS, masked_words, run_hashes
from storyteller.page import LEAST_BITS, Page
from storyteller.retold import facts_of
from storyteller.story import tell

FIXED = "The small dog ran over the green hill and came home again before the sun went down. " * 4


def test_choices_are_weighed_by_their_share():
    pools = Pools()
    text, marks = Values().trace(pools.parse("[a|a|a|b] [c|d]"), lambda: 0.9)
    assert text == "b d"
    assert [(at, bits) for at, bits, _ in marks] == [(1, 2.0), (3, 1.0)]


def test_a_slot_of_the_story_is_weighed_by_its_value():
    values = Values({"kind": "fox", "who": "shy fox"})
    values.bits.update(kind=7, trait=6)
    values.parts["who"] = ("trait", "kind")
    assert values.trace(Pools().parse("The {kind}"), lambda: 0.0) == ("The fox", [(7, 7, "kind")])
    # The kind is the same one in both: a run that has both counts it once.
    text, marks = values.trace(Pools().parse("{kind} {who} " + "and so " * 12), lambda: 0.0)
    page = Page()
    page.add(text, marks)
    assert max(page.run_bits()) == 13


def test_fixed_text_gets_details_until_every_run_is_rich():
    page = Page()
    page.add(FIXED.strip(), [])
    assert max(page.run_bits()) == 0
    page.enrich(
        lambda kind: (", DETAIL, ", [(8, LEAST_BITS, "")]) if kind != "aside" else ("DETAIL. ", [(6, 99.0, "")])
    )
    assert min(page.run_bits()[20:]) >= LEAST_BITS
    assert "DETAIL" not in page.text()[:60]
    assert " ".join(page.text().replace("DETAIL. ", "").replace(", DETAIL, ", "").split()) == FIXED.strip()


def test_rich_text_gets_no_details():
    page = Page()
    page.add(FIXED.strip(), [(at, LEAST_BITS, "") for at in range(0, len(FIXED), 20)])
    page.enrich(lambda kind: ("DETAIL ", []))
    assert page.text() == FIXED.strip()


def test_what_is_fixed_stays_in_one_piece():
    page = Page()
    page.add(FIXED.strip(), [])
    page.enrich(lambda kind: (", DETAIL, ", [(8, 1.0, "")]), fixed=[FIXED.strip()[:-1]], opening_words=0)
    assert FIXED.strip()[:-1] in page.text()


def test_nearly_every_run_of_a_story_has_the_bits_it_needs(pages):
    bits = np.concatenate([page.run_bits() for page in pages])
    assert np.percentile(bits, 1) > 28
    assert np.percentile(bits, 10) > LEAST_BITS
    assert np.median(bits) > 44


def test_held_out_stories_share_no_run_with_the_training_text():
    random = Random(8)
    told = [tell(random, "test") for _ in range(60)]
    wanted = np.unique(
        np.concatenate([run_hashes(masked_words(story.text, (story.facts["thing"],))) for story in told])
    )
    found = [
        run_hashes(masked_words(text))
        for document in islice(documents(9, 0), 1500)
        for role, text in document
        if role in ("", "assistant") and text.count(" ") > RUN_WORDS
    ]
    assert len(wanted) > 15_000
    assert not np.isin(np.concatenate(found), wanted).any()


def test_facts_are_read_back_as_they_were_told(stories):
    read = [
        (key, value, story.facts[key])
        for story in stories[::5]
        for key, value in facts_of(story.text, story.facts["name"], story.facts["thing"]).items()
    ]
    assert len(read) > 4 * len(stories[::5])
    # A hero of an invented kind may be taken for somebody else who is described.
    assert sum(value != told for _, value, told in read) <= 0.01 * len(read), [row for row in read if row[1] != row[2]]


def test_own_stories_are_asked_about(stories):
    records = [
        {"request": "A story.", "story": s.text, "name": s.facts["name"], "thing": s.facts["thing"]}
        for s in stories[:20]
    ]
    questions = questions_about_own(records, 0)
    assert len(questions) > 34
    assert all(messages[-1]["content"] == turn.user and turn.value for messages, turn in questions)
