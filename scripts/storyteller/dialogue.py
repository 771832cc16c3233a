"""Conversations about stories: a request, the story, questions with answers that stand in it, endings, small talk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from .casting import NOTHING, RARE_SHARE, Asked
from .grammar import Values, fix_articles
from .phrases import POOLS, read_text
from .plots import Plot, parse_question
from .story import Story, tell, tell_ending
from .wishes import add_what_is_rare, choose_asked, mistype, phrase_wish

SYSTEM_PROMPTS = (
    "You are a storyteller.",
    "You tell short stories for children.",
    "You are a friendly storyteller.",
    "You are a helpful assistant.",
    "Tell stories and answer questions about them.",
)
# Of the requests: wishes as people write them, and not in the sentences that were made for the plots.
WISH_SHARE = 0.7
# Sentences that are tried for one that names all that is rare, before one is added.
_TRIES = 4
_WORD = re.compile(r"[\w'-]+")


@dataclass(slots=True)
class Turn:
    """One exchange: what was asked, the reference answer, and what a checker needs to know."""

    kind: str  # story, fact, ending, sequel, chat, unknown
    user: str
    assistant: str
    key: str = ""  # the fact asked for
    value: str = ""  # what the answer must say
    story: Story | None = None


@dataclass(slots=True)
class Dialogue:
    """A whole conversation; the last story is the one that questions are about."""

    turns: list[Turn] = field(default_factory=list)
    system: str = ""

    def messages(self) -> Iterator[tuple[str, str]]:
        """Roles and texts in order."""
        if self.system:
            yield "system", self.system
        for turn in self.turns:
            yield "user", turn.user
            yield "assistant", turn.assistant


def _template(name: str) -> list:
    return POOLS.parse(f"{{@{name}}}")


_T = {
    name: _template(name)
    for name in (
        "story_request",
        "open_request",
        "lead_in",
        "lead_in_two",
        "ending_request",
        "ending_lead",
        "sequel_request",
        "sequel",
        "more_request",
        "greet",
        "greet_back",
        "thank",
        "thank_back",
        "who",
        "who_back",
        "offtopic",
        "offtopic_back",
        "unknown_ask",
        "unknown_back",
        "talekind",
    )
}
# Questions that fit every plot.
GENERAL_QUESTIONS = [parse_question(line.removeprefix("q ")) for line in read_text("questions.txt").splitlines()]


def phrase_request(random: Random, story: Story) -> str:
    """Ask for this very story, naming some of what is in it."""
    # A requested character must appear in the story.
    others = [who for who in (story.facts["elder"], story.facts["friend"]) if who in story.text]
    story.values.update(ask=story.plot.ask, talekind=_T["talekind"], other=others[0] if others else "a friend")
    for _ in range(_TRIES):
        request = story.values.fill(_T["story_request"], random.random)
        if add_what_is_rare(random, story, request) == request:
            break
    return mistype(random, add_what_is_rare(random, story, request))


def story_turn(
    random: Random, split: str = "train", plot: Plot | None = None, is_open: bool = False,
    rare_share: float = RARE_SHARE,
) -> Turn:  # fmt: skip
    """A request and its story; an open request names nobody, so nobody in the story has a rare name."""
    if is_open:
        story = tell(random, split, plot, NOTHING)
        user = mistype(random, story.values.fill(_T["open_request"], random.random))
    elif random.random() < WISH_SHARE:
        story = tell(random, split, plot, choose_asked(random, rare_share))
        user = phrase_wish(random, story)
    else:
        story = tell(random, split, plot, Asked(name=True, thing=True, rare_share=rare_share))
        user = phrase_request(random, story)
    text = story.text
    if random.random() < 0.12:
        lead = "lead_in_two" if story.asked.mate and random.random() < 0.7 else "lead_in"
        text = fix_articles(story.values.fill(_T[lead], random.random)) + "\n\n" + text
    return Turn("story", user, text, story=story)


def fact_turns(random: Random, story: Story) -> list[Turn]:
    """All questions whose answers stand in the story, each in one phrasing, in random order."""
    low = story.text.lower()
    words = {word.removesuffix("'s") for word in _WORD.findall(low)}
    turns = []
    for question in story.plot.questions + GENERAL_QUESTIONS:
        key, value = question.key, story.facts.get(question.key, "")
        # A single word must appear as a word; a phrase is unmistakable anyway.
        if not value or (value.lower() not in low if " " in value else value.lower() not in words):
            continue
        # The thing is asked for by its full name, and answered by the noun at least.
        expected = story.facts["thing"] if key in ("thing", "thing_full") else value
        user = mistype(random, story.values.fill(question.ask, random.random))
        turns.append(Turn("fact", user, story.values.fill(question.answer, random.random), key, expected, story))
    random.shuffle(turns)
    return turns


def _yes_no_turn(random: Random, story: Story) -> Turn:
    values, facts = story.values, story.facts
    is_true = random.random() < 0.5
    if random.random() < 0.5:
        asked = facts["kind"] if is_true else facts["friendkind"]
        question, rest = f"Was {facts['name']} {{a_x}}?", "{hero} was {a_kind}."
    else:
        asked = (
            facts["thing_full"]
            if is_true
            else random.choice(("silver trumpet", "tin whistle", "blue balloon", "woollen hat"))
        )
        if not is_true and asked in story.text:
            asked = "stuffed walrus"
        question, rest = "Is there {a_x} in the story?", "there is {a_newthing} in it."
    local = Values(values)
    local["x"] = asked
    user = local.fill(POOLS.parse(question), random.random)
    answer = ("Yes, " if is_true else "No, ") + local.fill(POOLS.parse(rest), random.random)
    return Turn("fact", user, answer, "yes_no", "yes" if is_true else "no", story)


def ending_turn(random: Random, story: Story) -> Turn:
    """Another ending for the story."""
    fill = story.values.fill
    ending = tell_ending(random, story)
    lead = fill(_T["ending_lead"], random.random) + " " if random.random() < 0.8 else ""
    return Turn("ending", mistype(random, fill(_T["ending_request"], random.random)), lead + ending, story=story)


def chat_turn(random: Random, topic: str, values: Values) -> Turn:
    """Small talk: greet, thank, who, offtopic, unknown (a question that the story does not answer), sequel."""
    ask, answer = {"unknown": ("unknown_ask", "unknown_back"), "sequel": ("sequel_request", "sequel")}.get(
        topic, (topic, topic + "_back")
    )
    user = mistype(random, values.fill(_T[ask], random.random))
    return Turn(topic, user, values.fill(_T[answer], random.random))


def untold_turn(random: Random, story: Story) -> Turn:
    """A question that other stories answer and this one does not, or one that no story answers."""
    untold = [question for question in GENERAL_QUESTIONS if not story.facts.get(question.key)]
    turn = chat_turn(random, "unknown", story.values)
    if untold and random.random() < 0.5:
        turn.user = mistype(random, story.values.fill(random.choice(untold).ask, random.random))
    return turn


def converse(random: Random, split: str = "train", num_turns: int | None = None) -> Dialogue:
    """A conversation of two to six turns; exchanges before the story are small talk, those after it are about it."""
    rand = random.random
    num_turns = num_turns or 1 + int(rand() * 6)
    dialogue = Dialogue(system=random.choice(SYSTEM_PROMPTS) if rand() < 0.12 else "")
    first = story_turn(random, split, is_open=rand() < 0.12)
    story = first.story
    turns = dialogue.turns
    if rand() < 0.15:
        turns.append(chat_turn(random, random.choice(("greet", "greet", "who", "offtopic")), story.values))
    turns.append(first)
    questions = fact_turns(random, story)
    while len(turns) < num_turns:
        roll = rand()
        if roll < 0.62 and questions:
            turns.append(questions.pop())
        elif roll < 0.70:
            turns.append(_yes_no_turn(random, story))
        elif roll < 0.80:
            turns.append(ending_turn(random, story))
        elif roll < 0.84:
            turns.append(chat_turn(random, "sequel", story.values))
        elif roll < 0.89:
            turns.append(untold_turn(random, story))
        elif roll < 0.92:
            turns.append(chat_turn(random, random.choice(("who", "offtopic")), story.values))
        elif roll < 0.94 and len(turns) < 4:
            again = story_turn(random, split)
            if rand() < 0.3:
                again.user = story.values.fill(_T["more_request"], rand)
            story = again.story
            questions = fact_turns(random, story)
            turns.append(again)
        elif roll < 0.97:
            turns.append(chat_turn(random, "thank", story.values))
            break
    return dialogue


def small_talk(random: Random) -> Dialogue:
    """A conversation in which no story is asked for yet."""
    values = tell(random).values
    topics = [
        random.choice(("greet", "who", "offtopic", "offtopic", "thank")) for _ in range(1 + int(random.random() * 3))
    ]
    return Dialogue([chat_turn(random, topic, values) for topic in dict.fromkeys(topics)])
