from random import Random

from storyteller.checkers import has_phrase, is_right
from storyteller.dialogue import converse, ending_turn, fact_turns, small_talk, story_turn
from storyteller.evaluate import held_out_questions, held_out_requests
from storyteller.outside import OUTSIDE_REQUESTS
from storyteller.split import is_held_out


def test_answers_stand_in_the_story(stories):
    random = Random(1)
    kinds = set()
    for story in stories[::5]:
        turns = fact_turns(random, story)
        assert len(turns) >= 6, story.shape
        for turn in turns:
            kinds.add(turn.key)
            assert is_right(turn.assistant, turn.value), (turn.user, turn.assistant, turn.value)
            assert is_right(story.text, turn.value), (story.shape, turn.key)
            assert "{" not in turn.user + turn.assistant
    assert len(kinds) > 60


def test_requests_name_what_the_story_has():
    random = Random(2)
    turns = [story_turn(random) for _ in range(800)]
    assert len({turn.user for turn in turns}) > 780
    with_name = [turn for turn in turns if has_phrase(turn.user, turn.story.facts["name"])]
    with_thing = [turn for turn in turns if has_phrase(turn.user, turn.story.facts["thing"])]
    assert len(with_name) > 450
    assert len(with_thing) > 350
    assert all(has_phrase(turn.assistant, turn.story.facts["name"]) for turn in with_name)
    assert all(has_phrase(turn.assistant, turn.story.facts["thing"]) for turn in with_thing)


def test_conversations_have_two_to_six_exchanges_and_every_kind():
    random = Random(3)
    dialogues = [converse(random) for _ in range(600)]
    kinds = {turn.kind for dialogue in dialogues for turn in dialogue.turns}
    assert kinds >= {"story", "fact", "ending", "sequel", "unknown", "greet", "thank", "who", "offtopic"}
    assert max(len(dialogue.turns) for dialogue in dialogues) == 6
    for dialogue in dialogues:
        roles = [role for role, _ in dialogue.messages() if role != "system"]
        assert roles == ["user", "assistant"] * len(dialogue.turns)
        assert all(text.strip() for _, text in dialogue.messages())
    assert {turn.kind for _ in range(60) for turn in small_talk(random).turns} <= {"greet", "who", "offtopic", "thank"}


def test_other_endings_keep_to_the_characters(stories):
    random = Random(4)
    for story in stories[::7]:
        ending = ending_turn(random, story).assistant
        assert any(has_phrase(ending, value) for value in story.facts.values() if value), ending


def test_evaluation_asks_only_for_what_is_held_out():
    requests = held_out_requests(60, 0)
    assert all(is_held_out("name", wish.name) for _, wish in requests)
    assert all(wish.name in text and has_phrase(text, wish.thing) for text, wish in requests)
    for messages, turn in held_out_questions(40, 0):
        assert messages[-1]["content"] == turn.user
        assert is_right(turn.assistant, turn.value)
    assert all(has_phrase(text, wish.name) and has_phrase(text, wish.thing) for text, wish in OUTSIDE_REQUESTS)
