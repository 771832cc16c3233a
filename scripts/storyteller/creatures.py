"""Who can be in a story: kinds of heroes and helpers, what they are like, and what they have for hands and feet."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .grammar import words_of
from .names import blend, invent_word, misspell, odd_word
from .phrases import read_text
from .things import ORDINARY


@dataclass(frozen=True, slots=True, eq=False)  # children and grown-ups are not one key
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
FINNED = Body("fins", "fins", "pool")
ARMED = Body("arms", "arms", "pool")
MADE = Body("hands", "feet", "toyroom")

_KINDS = {
    CHILD: "girl, boy, girl, boy, child, twin",
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


def _groups(name: str) -> dict[str, tuple[str, ...]]:
    """Lists of a text file, each with its name in front; what stands in a list more than once is taken more often."""
    lines = (line.partition(": ") for line in read_text(name).splitlines())
    return {group: tuple(word.strip() for word in words.split(",")) for group, _, words in lines}


_BODIES = {
    "child": CHILD, "folk": FOLK, "beast": BEAST, "big_beast": BIG_BEAST, "hoofed": HOOFED, "bird": BIRD,
    "clawed": CLAWED, "small": SMALL, "finned": FINNED, "armed": ARMED, "made": MADE,
}  # fmt: skip
# What people wish for besides: dinosaurs, mermaids, steam engines.
MORE_KINDS = tuple((kind, _BODIES[body]) for body, kinds in _groups("kinds.txt").items() for kind in kinds)
_BODY_OF = dict((*MORE_KINDS, *KINDS))
COMMON_KINDS = frozenset(_BODY_OF)
_ONE_WORD_KINDS = tuple(kind for kind in _BODY_OF if kind.isalpha() and len(kind) > 3)
_MORE_SHARE = 0.3
# What somebody is to the one who asks: a son is a boy.
ROLES = _groups("roles.txt")
_ROLE_SHARES = {"boy": 8.0, "girl": 8.0}
PETS = words_of("""
dog, cat, rabbit, hamster, guinea pig, pony, puppy, kitten, parrot, turtle, goldfish, teddy bear, doll, toy bear, horse,
hen, mouse""")
_PET_SHARE = 0.2
_LOOKS = _groups("adjectives.txt")
TRAITS = words_of(read_text("traits.txt"))
COMMON_LOOKS = frozenset((*TRAITS, *_LOOKS["size"], *_LOOKS["colour"]))
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
    **dict.fromkeys(
        words_of("""
mermaid, fairy godmother, cowgirl, ballerina, empress, sorceress, schoolgirl, giantess, grandmother, granny, mother,
aunt, sister, old woman, snow queen, snowwoman, peahen"""),
        "she",
    ),
    **dict.fromkeys(
        words_of("""
cowboy, schoolboy, emperor, duke, baron, fireman, grandfather, father, uncle, brother, old man, ice king, bull, ram,
gingerbread man, gingerbread boy, sandman, spaceman, caveman, stallion"""),
        "he",
    ),
}
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

_IRREGULAR = {
    "mouse": "mice",
    "dormouse": "dormice",
    "goose": "geese",
    "wolf": "wolves",
    "child": "children",
    "grandchild": "grandchildren",
    "calf": "calves",
    "sheep": "sheep",
    "deer": "deer",
    "reindeer": "reindeer",
    "moose": "moose",
    "fisherman": "fishermen",
    "postman": "postmen",
    "snowman": "snowmen",
    "dwarf": "dwarfs",
    "clockwork mouse": "clockwork mice",
    "field mouse": "field mice",
    "fish": "fish",
    "goldfish": "goldfish",
    "old woman": "old women",
    "old man": "old men",
    "snowwoman": "snowwomen",
    "leaf": "leaves",
    "ox": "oxen",
    **{f"{kind}man": f"{kind}men" for kind in ("fire", "space", "cave", "sand", "gingerbread ")},
}


def plural_of(noun: str) -> str:
    """The plural of a kind of creature."""
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    if noun.endswith(("s", "x", "ch", "sh", "z")):
        return noun + "es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def _blended_kind(random: Random) -> str:
    """A word as kinds are, and none of them: `wallanda`. It must be copied piece by piece."""
    while True:
        word = blend(random, _ONE_WORD_KINDS)
        if 4 <= len(word) <= 13 and word not in COMMON_KINDS:
            return word


def _rare_kind(random: Random) -> str:
    """Something that nobody has heard of, or that is seldom a hero: a spoon, a zibbet, a moss dragon, a hegdehog."""
    roll = random.random()
    if roll < 0.2:
        return random.choice(ORDINARY)
    if roll < 0.4:
        return odd_word(random)
    if roll < 0.5:
        return f"{odd_word(random)} {random.choice(KINDS)[0].split()[-1]}"
    if roll < 0.8:
        return _blended_kind(random)
    if roll < 0.86:
        return f"{_blended_kind(random)} {random.choice(_ONE_WORD_KINDS)}"
    if roll < 0.91:
        return misspell(random, random.choice(_ONE_WORD_KINDS))
    return invent_word(random)


def choose_kind(random: Random, rare_share: float) -> tuple[str, Body]:
    """Choose what somebody is; a share is rare, of any body."""
    if random.random() < rare_share:
        return _rare_kind(random), random.choice((BEAST, FOLK, CLAWED, MADE))
    return random.choice(MORE_KINDS if random.random() < _MORE_SHARE else KINDS)


def choose_role(random: Random) -> tuple[str, str, Body]:
    """Choose what the hero is to the one who asks, and the kind that tells: a son is a boy, a dog is a dog."""
    if random.random() < _PET_SHARE:
        kind = random.choice(PETS)
        return kind, kind, _BODY_OF.get(kind, MADE)
    kind = random.choices(tuple(ROLES), tuple(_ROLE_SHARES.get(kind, 1.0) for kind in ROLES))[0]
    return random.choice(ROLES[kind]), kind, _BODY_OF.get(kind, FOLK)


def _rare_look(random: Random) -> str:
    roll = random.random()
    if roll < 0.6:
        return random.choice(_LOOKS["asked"])
    return odd_word(random) if roll < 0.88 else misspell(random, random.choice(TRAITS))


def choose_looks(random: Random, kind: str, count: int, rare_share: float, is_asked: bool = True) -> tuple[str, ...]:
    """Choose adjectives for a kind, as one says them in a row: character, size, colour. No word comes up twice."""
    order = [*random.sample(("mind", "size", "colour"), count)] if is_asked else ["mind", "size", "colour"][:count]
    if random.random() < 0.8:
        order.sort(key=("mind", "size", "colour").index)
    looks: list[str] = []
    for group in order:
        while True:
            if random.random() < rare_share:
                look = _rare_look(random)
            else:
                look = random.choice(TRAITS if group == "mind" else _LOOKS[group])
            if not {*look.split()} & {word for other in (*looks, kind) for word in other.split()}:
                break
        looks.append(look)
    return tuple(looks)


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
