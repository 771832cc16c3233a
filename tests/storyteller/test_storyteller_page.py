"""The page that adds asides to passages that are always worded the same, and the facts read back out of a story."""

from storyteller.evaluate import questions_about_own
from storyteller.grammar import Pools, Values
from storyteller.page import LEAST_BITS, MOST_ASIDES, Page
from storyteller.retold import facts_of

FIXED = "The small dog ran over the green hill and came home again before the sun went down. " * 4


def test_choices_are_weighed_by_their_share():
    pools = Pools()
    text, marks = Values().trace(pools.parse("[a|a|a|b] [c|d]"), lambda: 0.9)
    assert text == "b d"
    assert [(at, bits) for at, bits, _ in marks] == [(1, 2.0), (3, 1.0)]


def test_a_slot_of_the_story_is_weighed_by_its_value():
    values = Values({"kind": "fox"})
    values.bits["kind"] = 7
    assert values.trace(Pools().parse("The {kind}"), lambda: 0.0) == ("The fox", [(7, 7, "kind")])


def test_fixed_text_gets_asides_and_they_stand_apart():
    page = Page()
    page.add(FIXED.strip(), [])
    page.enrich(lambda: ("ASIDE aside.", [(12, 20.0, "")]))
    text = page.text()
    assert text.count("ASIDE") == MOST_ASIDES
    assert "aside. ASIDE" not in text
    assert text.replace("ASIDE aside. ", "") == FIXED.strip()


def test_rich_text_and_conversations_get_none():
    rich, talk = Page(), Page()
    rich.add(FIXED.strip(), [(at, LEAST_BITS, "") for at in range(0, len(FIXED), 20)])
    talk.add('"' + FIXED.strip() + '"', [])
    for page in (rich, talk):
        page.enrich(lambda: ("ASIDE aside.", []))
        assert "ASIDE" not in page.text()


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
        {"request": "A story.", "story": s.text, "name": s.facts["name"], "things": [s.facts["thing"]]}
        for s in stories[:20]
    ]
    questions = questions_about_own(records, 0)
    assert len(questions) > 34
    assert all(messages[-1]["content"] == turn.user and turn.value for messages, turn in questions)
