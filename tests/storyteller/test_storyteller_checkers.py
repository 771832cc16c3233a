import json
import re
from random import Random

import pytest
from storyteller.checkers import Wish, is_right, judge_story, num_images, stumbles
from storyteller.corpus import document_with_stories, shard_random
from storyteller.dialogue import fact_turns
from storyteller.originality import closest_shares, training_words, words_in
from storyteller.sentences import masked_sentences, sentences_of, shared_sentences
from storyteller.story import tell

OTHER = {"she": "he", "her": "his", "hers": "his", "herself": "himself", "he": "she", "him": "her", "his": "her",
         "himself": "herself", "it": "she", "its": "her", "they": "he", "their": "his", "them": "him"}  # fmt: skip


def swap_name(random, story):
    return story.text.replace(story.facts["name"], "Rumpeldox")


def swap_pronoun(random, story):
    forms = {"she": "she|her|herself", "he": "he|him|his|himself", "it": "its|itself", "they": "they|them|their"}[
        story.facts["pronoun"]
    ]
    places = list(re.finditer(rf"\b(?:{forms})\b", story.text))
    if not places:  # a short story may have none
        return ""
    match = random.choice(places)
    return story.text[: match.start()] + OTHER.get(match.group(), "she") + story.text[match.end() :]


def repeat_sentence(random, story):
    sentence = random.choice([s for s in sentences_of(story.text) if s.count(" ") >= 4 and s[-1] == "."])
    return story.text + " " + sentence


def cut_end(random, story):
    return story.text[: random.randrange(len(story.text) // 2, len(story.text) - 2)]


def double_word(random, story):
    words = story.text.split(" ")
    places = [at for at, word in enumerate(words) if word.isalpha() and word not in ("had", "that", "Had", "That")]
    at = random.choice(places)
    return " ".join([*words[: at + 1], *words[at:]])


def add_images(random, story):
    return story.text + " He ran like a hare, as quick as a fox, as if he were late, like the wind."


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
    [
        (swap_name, "wish"),
        (swap_pronoun, "pronouns"),
        (repeat_sentence, "no repeats"),
        (cut_end, "ended"),
        (double_word, "no stumbles"),
        (add_images, "few images"),
    ],
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
    text = 'Ember lost her red kite. "Then Ember\'s kite," said Bo, "flew off on Monday." Oh no!'
    assert masked_sentences(text, "kite") == ["name lost her thing", "then name thing said name flew off on monday"]
    other = (
        text.replace("Ember", "Zoe").replace("Bo,", "Mr Quill,").replace("red kite", "tin zonk").replace("kite", "zonk")
    )
    assert masked_sentences(other, "zonk") == masked_sentences(text, "kite")


def test_shared_sentences_are_those_of_another_story():
    stories = [["a b c d", "e f g h", "e f g h"], ["a b c d"], ["x y z w"]]
    assert shared_sentences(stories) == [["a b c d"], ["a b c d"], []]


def test_copies_are_found_in_text_told_again(tmp_path):
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"seed": 9, "documents": [20, 20]}))
    random = shard_random(9, 1, "train")
    told = [story for _ in range(20) for story in document_with_stories(random, "train")[1]]
    story, thing = told[-1], told[-1].facts["thing"]
    # Another name and another thing do not hide the copy; half a copy is half a copy.
    copied = story.text.replace(story.facts["name"], "Wimblo").replace(thing, "zonk")
    masked = masked_sentences(story.text, thing)
    half = sorted(set(masked))[: len(set(masked)) // 2]
    fresh = [f"nobody said word {i} before" for i in range(len(half))]
    shares = closest_shares([masked, masked_sentences(copied, "zonk"), half + fresh, fresh], manifest)
    assert shares[0] == 1.0
    assert shares[1] > 0.8
    assert shares[2] == pytest.approx(0.5)
    assert shares[3] == 0.0


def test_known_words_are_those_of_training():
    words = training_words(seed=9, num_documents=200)
    assert {"the", "there", "felt", "lived"} <= words
    assert not {"snurk", "photosynthesis"} & words
    assert words_in("Don't stop, Zoë: 3 re-reads!") == ["don", "t", "stop", "zo", "re", "reads"]


@pytest.mark.parametrize(
    ("text", "found"),
    [("She has seen seen it.", ["seen seen"]), ("He had had it, and that that was.", []), ("No, no, no.", [])],
)
def test_stumbles(text, found):
    assert stumbles(text) == found


@pytest.mark.parametrize(
    ("text", "count"),
    [("He ran like a hare, as quick as a fox, as if late.", 3), ("He liked a hare, as well as tea.", 0)],
)
def test_images_are_counted(text, count):
    assert num_images(text) == count
