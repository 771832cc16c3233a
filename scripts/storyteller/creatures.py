"""Who can be in a story: kinds of heroes and helpers, what they are like, and what they have for hands and feet."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .grammar import words_of
from .names import invent_word


@dataclass(frozen=True, slots=True)
class Body:
    """The words for a kind of body, and whether its home is a house."""

    hands: str
    feet: str
    lives_in_house: bool


CHILD = Body("hands", "feet", True)
FOLK = Body("hands", "feet", True)
BEAST = Body("paws", "paws", False)
HOOFED = Body("hooves", "hooves", False)
BIRD = Body("wings", "feet", False)
CLAWED = Body("claws", "claws", False)
SMALL = Body("legs", "feet", False)
MADE = Body("hands", "feet", True)

_KINDS = {
    CHILD: "girl, boy, girl, boy, girl, boy, girl, boy, child, twin, orphan",
    FOLK: """
gnome, elf, giant, troll, pixie, goblin, wizard, witch, knight, pirate, tailor, baker, sailor, princess, prince,
queen, king, shepherd, fiddler, lighthouse keeper, gardener, clockmaker, fairy, ogre, juggler, painter,
beekeeper, miller, cobbler, postman, fisherman, stargazer, dwarf, brownie, mermaid, imp""",
    BEAST: """
fox, rabbit, mouse, bear, hedgehog, badger, squirrel, cat, kitten, dog, puppy, wolf, otter, beaver, mole, rat,
hare, bunny, lion, tiger, panda, koala, raccoon, weasel, ferret, hamster, guinea pig, chipmunk, marmot, stoat,
lynx, leopard, cheetah, monkey, lemur, sloth, skunk, dormouse, vole, shrew, porcupine, wombat, kangaroo, possum,
meerkat, mongoose, polar bear, snow leopard, wolf cub, bear cub, red panda, anteater, armadillo""",
    HOOFED: """goat, pony, donkey, lamb, sheep, deer, fawn, calf, cow, horse, foal, reindeer, moose, pig, piglet, llama,
    alpaca, zebra, giraffe, unicorn, yak, camel, antelope""",
    BIRD: """
duck, duckling, owl, robin, sparrow, crow, magpie, penguin, goose, gosling, hen, chick, rooster, pigeon, swan,
wren, puffin, parrot, pelican, heron, stork, raven, jay, lark, peacock, swallow, turkey, quail""",
    CLAWED: """dragon, dragon, griffin, turtle, tortoise, lizard, gecko, newt, dinosaur, crab, crocodile, phoenix,
    chameleon, salamander, iguana""",
    SMALL: "beetle, cricket, ladybird, snail, ant, grasshopper, spider, bee, caterpillar, frog, toad, moth, firefly",
    MADE: "robot, rag doll, scarecrow, snowman, puppet, tin soldier, toy bear, teddy bear, clockwork mouse, marionette",
}
KINDS = tuple((" ".join(kind.split()), body) for body, kinds in _KINDS.items() for kind in kinds.split(","))
# Kinds that say the pronoun themselves.
GENDERED = {
    "girl": "she",
    "boy": "he",
    "witch": "she",
    "wizard": "he",
    "princess": "she",
    "prince": "he",
    "queen": "she",
    "king": "he",
    "hen": "she",
    "rooster": "he",
    "postman": "he",
    "fisherman": "he",
    "mermaid": "she",
    "snowman": "he",
    "cow": "she",
}
TRAITS = words_of("""
shy, brave, curious, clumsy, gentle, cheerful, stubborn, quiet, noisy, sleepy, hungry, lonely, clever, kind,
grumpy, proud, careful, careless, patient, impatient, polite, forgetful, dreamy, lazy, busy, bold, timid,
nervous, playful, serious, silly, thoughtful, tidy, untidy, messy, helpful, honest, fussy, restless, merry,
bashful, daring, cautious, jolly, giggly, chatty, solemn, hopeful, worried, plucky, mischievous, generous,
fidgety, tender-hearted, quick, slow, modest, boastful, absent-minded, cranky, gloomy, sunny, nosy, sensible,
adventurous, friendly, inventive, musical, homesick, good-natured, bouncy, scruffy, neat, spotty, freckled,
plump, skinny, tiny, small, little, tall, young, old, fluffy, round, long-legged, short-legged, wide-eyed,
rosy-cheeked, soft-hearted, determined, easy-going, eager, peaceful""")
_HELPER_LOOKS = words_of("""
old, wise, plump, tall, thin, tiny, grey, white-haired, friendly, grumpy, sleepy, muddy, bright-eyed, slow,
quick, solemn, cheerful, speckled, young, shaggy, whiskery, round, brown, lanky, calm, gentle, wrinkled,
silvery, spotted, bossy, patient, long-eared, one-eyed, soft-voiced, chubby, weather-beaten, fluffy, barefoot,
curious, hoarse""")
_HELPER_KINDS = words_of("""
heron, owl, toad, tortoise, badger, hare, goat, raven, crow, magpie, stork, snail, spider, beaver, otter, mole,
donkey, cow, ram, goose, pelican, gull, cat, hound, sheepdog, weasel, squirrel, moth, bee, cricket, beetle,
frog, newt, pike, carp, salmon, miller, baker, ferryman, postman, shepherd, tinker, gardener, clockmaker,
fisherman, beekeeper, weaver, washerwoman, woodcutter, fiddler, gnome, giant, wizard, witch, scarecrow,
lamplighter, bookseller, sailor, cook, knight, pigeon, swan, bat, hedgehog, moose, bear, wolf, lizard, mouse,
rat, stoat, dormouse, robin, wren, jackdaw, pony, horse, ox, peacock, parrot, seal, walrus, crab, elephant,
camel, robot, troll, dragon""")
_ELDERS = words_of("""
Grandmother, Grandfather, Mother, Father, Aunt Juniper, Uncle Bram, Aunt Hester, Uncle Tobit, Granny Plum, Old
Mr Finch, Mrs Applewhite, Mr Thistledown, Miss Pettigrew, Aunt Clementine, Uncle Ambrose, Granny Moss, Grandpa
Oats, Mrs Underhill, Mr Pocket, Miss Larkspur, Aunt Tansy, Uncle Fergus, Mrs Barley, Old Mr Crane""")
FEELINGS = words_of("""
happy, proud, glad, warm all over, calm, brave, content, cheerful, thankful, lighter than a feather, peaceful,
grateful, pleased, very lucky, safe, wide awake with joy, quietly proud, cosy, hopeful, full of joy, snug, at
home, contented, relieved, delighted, ten feet tall, as light as air, quite at peace, merry, satisfied, loved,
warm inside""")
PRONOUNS = {
    "she": {"he": "she", "him": "her", "his": "her", "himself": "herself", "he_was": "she was", "hers": "hers"},
    "he": {"he": "he", "him": "him", "his": "his", "himself": "himself", "he_was": "he was", "hers": "his"},
    "it": {"he": "it", "him": "it", "his": "its", "himself": "itself", "he_was": "it was", "hers": "its own"},
    "they": {
        "he": "they",
        "him": "them",
        "his": "their",
        "himself": "themself",
        "he_was": "they were",
        "hers": "theirs",
    },
}


def choose_kind(random: Random, invented_share: float) -> tuple[str, Body]:
    """Choose what the hero is; sometimes a creature that nobody has heard of."""
    if random.random() < invented_share:
        return invent_word(random), random.choice((BEAST, FOLK, CLAWED))
    return random.choice(KINDS)


def choose_pronoun(random: Random, kind: str, name_gender: str) -> str:
    """Choose the pronoun: the kind decides, then the name, then the dice."""
    known = GENDERED.get(kind) or name_gender
    if known:
        return known
    roll = random.random()
    return "she" if roll < 0.44 else "he" if roll < 0.88 else "it" if roll < 0.96 else "they"


def choose_helper(random: Random, apart_from: str) -> tuple[str, str]:
    """Choose the look and the kind of a helper who is not of the hero's kind."""
    while True:
        kind = random.choice(_HELPER_KINDS)
        if kind not in apart_from and apart_from not in kind:
            return random.choice(_HELPER_LOOKS), kind


def choose_elder(random: Random) -> str:
    """Choose a grown-up of the hero's family or street."""
    return random.choice(_ELDERS)
