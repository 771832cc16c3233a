"""Who can be in a story: kinds of heroes and helpers, what they are like, and what they have for hands and feet."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .grammar import words_of
from .names import invent_word
from .phrases import read_text


@dataclass(frozen=True, slots=True)
class Body:
    """The words for a kind of body, and the pool of homes that fit it."""

    hands: str
    feet: str
    home: str


CHILD = Body("hands", "feet", "house")
FOLK = Body("hands", "feet", "house")
BEAST = Body("paws", "paws", "burrow")
BIG_BEAST = Body("paws", "paws", "cave")
HOOFED = Body("hooves", "hooves", "barn")
BIRD = Body("wings", "feet", "nest")
CLAWED = Body("claws", "claws", "cave")
SMALL = Body("feet", "feet", "nook")
MADE = Body("hands", "feet", "toyroom")

_KINDS = {
    CHILD: "girl, boy, girl, boy, girl, boy, girl, boy, girl, boy, child, twin",
    FOLK: """
gnome, elf, giant, troll, pixie, goblin, wizard, witch, knight, pirate, tailor, baker, sailor, princess, prince,
queen, king, shepherd, fiddler, lighthouse keeper, gardener, clockmaker, fairy, juggler, painter, beekeeper, miller,
cobbler, postman, fisherman, dwarf, train driver, cook, farmer, teacher, inventor, robot""",
    BEAST: """
fox, fox, rabbit, mouse, mouse, hedgehog, badger, squirrel, cat, kitten, dog, puppy, otter, beaver, mole, rat, hare,
raccoon, weasel, ferret, hamster, guinea pig, chipmunk, stoat, skunk, dormouse, vole, shrew, meerkat, fox cub""",
    BIG_BEAST: """
bear, bear, wolf, lion, tiger, panda, koala, lynx, leopard, monkey, sloth, porcupine, wombat, kangaroo, polar bear,
snow leopard, wolf cub, bear cub, red panda, anteater""",
    HOOFED: """goat, pony, donkey, lamb, sheep, deer, fawn, calf, cow, horse, foal, reindeer, moose, pig, piglet, llama,
    alpaca, zebra, giraffe, unicorn, camel, elephant""",
    BIRD: """
duck, duckling, owl, robin, sparrow, crow, magpie, penguin, goose, gosling, hen, chick, rooster, pigeon, swan, wren,
puffin, parrot, pelican, heron, stork, raven, jay, lark, peacock, swallow""",
    CLAWED: "dragon, dragon, dragon, griffin, turtle, tortoise, lizard, crab, crocodile, phoenix, dinosaur",
    SMALL: "beetle, cricket, ladybird, snail, ant, grasshopper, spider, bee, caterpillar, frog, toad, moth, firefly",
    MADE: "rag doll, scarecrow, snowman, puppet, tin soldier, toy bear, teddy bear, clockwork mouse, teapot, cloud",
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
    "snowman": "he",
    "cow": "she",
}
TRAITS = words_of(read_text("traits.txt"))
_HELPER_LOOKS = words_of("""
old, wise, plump, tall, thin, tiny, grey, white-haired, friendly, grumpy, sleepy, muddy, bright-eyed, slow, quick,
solemn, cheerful, young, shaggy, round, brown, calm, gentle, bossy, patient, chubby, curious, hoarse, stout, elderly,
stern, kindly, jolly, merry, gruff, absent-minded, dreamy, chatty, silent, whistling, yawning, smiling, freckled,
scruffy, short-sighted, sharp-eyed, sunburnt, dusty, travelling, retired, shy, polite, famous, thoughtful, puzzled,
clever, honest, humming, little, big, one-eyed, forgetful, busy, kind, lonely, rosy, nimble, learned""")
_HELPER_KINDS = words_of("""
heron, owl, toad, tortoise, badger, hare, goat, raven, crow, magpie, stork, snail, spider, beaver, otter, mole,
donkey, cow, ram, goose, pelican, gull, cat, hound, sheepdog, weasel, squirrel, moth, bee, cricket, beetle, frog,
miller, baker, ferryman, postman, shepherd, tinker, gardener, clockmaker, fisherman, beekeeper, weaver, washerwoman,
woodcutter, fiddler, gnome, giant, wizard, witch, scarecrow, lamplighter, bookseller, sailor, cook, knight, pigeon,
swan, bat, hedgehog, moose, bear, wolf, lizard, mouse, rat, stoat, dormouse, robin, wren, jackdaw, pony, horse, ox,
peacock, parrot, crab, elephant, camel, robot, troll, dragon, hawk, thrush, starling, cuckoo, kingfisher, vole, lynx,
llama, mule, kangaroo, koala, panda, turtle, dragonfly, ladybird, bumblebee, caterpillar, blacksmith, cobbler, tailor,
carpenter, potter, chimney sweep, milkmaid, innkeeper, librarian, watchman, piper, drummer, juggler, pedlar,
candlemaker, toymaker, bell-ringer, dwarf, elf, pixie, goblin, snowman, griffin, unicorn, train driver, painter""")
_ELDER_TITLES = words_of(
    "Aunt, Uncle, Granny, Grandpa, Old Mr, Mrs, Mr, Miss, Captain, Old Mrs, Great-Aunt, Great-Uncle"
)
_ELDER_NAMES = words_of("""
Juniper, Bram, Hester, Plum, Finch, Applewhite, Pettigrew, Clementine, Ambrose, Moss, Underhill, Pocket, Larkspur,
Tansy, Fergus, Barley, Crane, Fairweather, Gooseberry, Lavender, Merriweather, Pennyfeather, Quince, Violet,
Winterbourne, Honeycomb, Wimple, Potter, Baker, Brown, Green, White, Carter, Cooper, Fisher, Martin, Bell, Rose, May,
Polly, Bess, Joe, Ned, Sam, Tilly, Nell, Ruth, George, Harriet, Ivy, Rosa, Pim""")
_PARENTS = words_of("Grandmother, Grandfather, Mother, Father")
FEELINGS = words_of(read_text("feelings.txt"))
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
    return "she" if roll < 0.47 else "he" if roll < 0.94 else "it" if roll < 0.98 else "they"


def choose_helper(random: Random, apart_from: str) -> tuple[str, str]:
    """Choose the look and the kind of a helper who is not of the hero's kind."""
    while True:
        kind = random.choice(_HELPER_KINDS)
        if kind not in apart_from and apart_from not in kind:
            return random.choice(_HELPER_LOOKS), kind


def choose_elder(random: Random) -> str:
    """Choose a grown-up of the hero's family or street."""
    if random.random() < 0.25:
        return random.choice(_PARENTS)
    return f"{random.choice(_ELDER_TITLES)} {random.choice(_ELDER_NAMES)}"
