import json
import re
from random import Random

import numpy as np
import pytest
from storyteller.checkers import Wish, is_right, judge_story
from storyteller.corpus import document_with_stories, shard_random
from storyteller.dialogue import fact_turns
from storyteller.overlap import masked_words, run_hashes, shared_runs
from storyteller.story import sentences_of, tell

OTHER = {"she": "he", "her": "his", "hers": "his", "herself": "himself", "he": "she", "him": "her", "his": "her",
         "himself": "herself", "it": "she", "its": "her", "they": "he", "their": "his", "them": "him"}  # fmt: skip


def swap_name(random, story):
    return story.text.replace(story.facts["name"], "Rumpeldox")


def swap_pronoun(random, story):
    forms = {"she": "she|her|herself", "he": "he|him|his|himself", "it": "its|itself", "they": "they|them|their"}[
        story.facts["pronoun"]
    ]
    places = list(re.finditer(rf"\b(?:{forms})\b", story.text))
    if not places:  # a short story may do without
        return ""
    match = random.choice(places)
    return story.text[: match.start()] + OTHER.get(match.group(), "she") + story.text[match.end() :]


def repeat_sentence(random, story):
    sentence = random.choice([s for s in sentences_of(story.text) if s.count(" ") >= 4 and s[-1] == "."])
    return story.text + " " + sentence


def cut_end(random, story):
    return story.text[: random.randrange(len(story.text) // 2, len(story.text) - 2)]


@pytest.fixture(scope="module")
def clean():
    random = Random("clean")
    return [tell(random, "test") for _ in range(200)]


def wish_for(story):
    return Wish(story.facts["name"], story.facts["thing"], story.facts["pronoun"])


def test_clean_stories_pass(clean):
    alarms = [story.shape for story in clean if not all(judge_story(story.text, wish_for(story)).values())]
    assert len(alarms) <= 2, alarms


@pytest.mark.parametrize(
    ("corrupt", "check"),
    [(swap_name, "wish"), (swap_pronoun, "pronouns"), (repeat_sentence, "no repeats"), (cut_end, "ended")],
)
def test_corrupted_stories_are_found(clean, corrupt, check):
    random = Random(5)
    damaged = [(story, text) for story in clean if (text := corrupt(random, story))][:100]
    assert len(damaged) == 100
    found = sum(not judge_story(text, wish_for(story))[check] for story, text in damaged)
    assert found >= 95


def test_wrong_answers_are_found(clean):
    random = Random(6)
    right = wrong = total = 0
    for story, other in zip(clean[:100], clean[100:], strict=True):
        turn, stranger = fact_turns(random, story)[0], fact_turns(random, other)
        same = next((t for t in stranger if t.key == turn.key and t.value != turn.value), stranger[0])
        total += 1
        right += is_right(turn.assistant, turn.value)
        wrong += is_right(same.assistant, turn.value)
    assert right == total
    assert wrong <= 0.05 * total


def test_an_unfinished_story_is_not_ended(clean):
    assert not judge_story(clean[0].text, wish_for(clean[0]), is_finished=False)["ended"]


def test_an_open_pronoun_must_only_be_kept(clean):
    story = next(story for story in clean if story.facts["pronoun"] == "she")
    assert judge_story(story.text, Wish())["pronouns"]
    assert not judge_story(story.text + " He smiled.", Wish())["pronouns"]


def test_masking_hides_names_and_things():
    words = masked_words(
        "Ember lost her red kite. Then Ember's kite, said Bo, flew off on Monday.", ("red kite", "kite")
    )
    assert words == [
        "name",
        "lost",
        "her",
        "thing",
        "then",
        "name",
        "thing",
        "said",
        "name",
        "flew",
        "off",
        "on",
        "monday",
    ]


def test_run_hashes_depend_only_on_the_run():
    words = [f"w{i}" for i in range(60)]
    hashes = run_hashes(words)
    assert len(hashes) == 36
    assert len(set(hashes.tolist())) == 36
    assert np.array_equal(run_hashes(words[10:40]), hashes[10:16])
    assert len(run_hashes(words[:24])) == 0


def test_shared_runs_are_found_in_text_told_again(tmp_path):
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"seed": 9, "documents": [20, 20]}))
    random = shard_random(9, 1, "train")
    told = [story for _ in range(20) for story in document_with_stories(random, "train")[1]]
    story = told[-1]
    things = (story.facts["thing"], story.facts["thing_full"])
    # Another name and another thing do not hide the copy.
    copied = (
        story.text.replace(story.facts["name"], "Wimblo")
        .replace(story.facts["thing_full"], "blue zonk")
        .replace(story.facts["thing"], "zonk")
    )
    fresh = " ".join(f"word{i}" for i in range(80))
    shared = shared_runs([(story.text, things), (copied, ("blue zonk", "zonk")), (fresh, ())], manifest)
    assert len(shared[0]) > 100
    assert len(shared[1]) > 50
    assert shared[2] == []
