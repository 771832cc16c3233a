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
rosy-cheeked, soft-hearted, determined, easy-going, eager, peaceful, absent, affable, agreeable, amiable,
anxious, artful, artistic, awkward, balanced, big-eared, big-hearted, blunt, bookish, bossy, brainy, breezy,
bright, brisk, broad-shouldered, bustling, calm, candid, capable, careworn, carefree, caring, casual,
charming, chirpy, chubby, comical, contented, cool-headed, cosy, courteous, crafty, creative, cuddly, dainty,
dapper, dashing, dauntless, decent, delicate, devoted, dignified, diligent, dizzy, dotty, downcast, dramatic,
dutiful, earnest, easily startled, eccentric, elegant, energetic, even-tempered, excitable, faithful, famous,
fanciful, fearless, fierce, flustered, fond, frank, frail, frisky, frugal, fun-loving, gallant, gangly,
gifted, giddy, gracious, grave, gruff, handy, happy-go-lucky, hard-working, hardy, hasty, headstrong, hearty,
heroic, humble, humorous, idle, imaginative, impish, impulsive, independent, innocent, inquisitive, jaunty,
jittery, joyful, jumpy, keen, kind-hearted, knowing, lanky, light-footed, light-hearted, likeable,
little-known, lively, loving, loyal, lucky, mannerly, meek, methodical, mild, modern, moody, muddled,
mumbling, muscular, mysterious, neighbourly, nimble, noble, obedient, odd, old-fashioned, open-handed,
optimistic, orderly, outspoken, painstaking, pensive, perky, persistent, petite, placid, plain-spoken,
pleasant, poetic, portly, practical, precise, prim, prudent, punctual, puzzled, quaint, quarrelsome,
quick-witted, quiet-voiced, rash, ready-witted, reliable, resourceful, respectful, romantic, rosy, rowdy,
ruddy, rumpled, saucy, self-taught, sensitive, sentimental, sharp-eyed, sheepish, shrewd, sincere, slender,
slow-spoken, sly, smiling, snappish, sociable, soft-spoken, spirited, sprightly, square-shouldered, stately,
steadfast, steady, stocky, stout, studious, sturdy, stylish, superstitious, sure-footed, sweet-tempered,
talented, talkative, tearful, tenacious, thrifty, ticklish, tireless, tough, tousled, trusting, trustworthy,
unassuming, unhurried, unlucky, unruly, upright, vain, valiant, watchful, wayward, weary, well-meaning,
well-read, whimsical, whiskered, willing, wily, wise, wistful, witty, wobbly, zany, zealous""")
_HELPER_LOOKS = words_of("""
old, wise, plump, tall, thin, tiny, grey, white-haired, friendly, grumpy, sleepy, muddy, bright-eyed, slow,
quick, solemn, cheerful, speckled, young, shaggy, whiskery, round, brown, lanky, calm, gentle, wrinkled,
silvery, spotted, bossy, patient, long-eared, one-eyed, soft-voiced, chubby, weather-beaten, fluffy, barefoot,
curious, hoarse, stout, portly, stooping, limping, sturdy, elderly, ancient, dignified, stern, kindly, jolly,
merry, gruff, absent-minded, dreamy, chatty, silent, whistling, sniffling, yawning, smiling, rosy, ruddy,
freckled, bearded, bespectacled, well-dressed, ragged, scruffy, dapper, velvet-voiced, deaf, short-sighted,
sharp-eyed, sleek, slender, broad, tubby, bald, curly-haired, moustached, bow-legged, long-legged,
flat-footed, red-faced, snub-nosed, sunburnt, dusty, floury, sooty, sandy, mossy, frosty, travelling, retired,
learned, shy, polite, modest, famous, forgotten, unhurried, nimble, lively, thoughtful, wistful, puzzled,
startled, generous, thrifty, crafty, honest, noble, eccentric, poetic, musical, clever, snoring, giggling,
humming, muffled-up, lopsided, twinkling, leathery""")
_HELPER_KINDS = words_of("""
heron, owl, toad, tortoise, badger, hare, goat, raven, crow, magpie, stork, snail, spider, beaver, otter,
mole, donkey, cow, ram, goose, pelican, gull, cat, hound, sheepdog, weasel, squirrel, moth, bee, cricket,
beetle, frog, newt, pike, carp, salmon, miller, baker, ferryman, postman, shepherd, tinker, gardener,
clockmaker, fisherman, beekeeper, weaver, washerwoman, woodcutter, fiddler, gnome, giant, wizard, witch,
scarecrow, lamplighter, bookseller, sailor, cook, knight, pigeon, swan, bat, hedgehog, moose, bear, wolf,
lizard, mouse, rat, stoat, dormouse, robin, wren, jackdaw, pony, horse, ox, peacock, parrot, seal, walrus,
crab, elephant, camel, robot, troll, dragon, hawk, finch, thrush, starling, cuckoo, kingfisher, plover, vole,
shrew, marten, lynx, puma, yak, llama, mule, buffalo, bison, kangaroo, koala, panda, lemur, badger cub,
octopus, lobster, turtle, whale, dolphin, eel, trout, dragonfly, ladybird, bumblebee, glow-worm, caterpillar,
earwig, blacksmith, cobbler, tailor, thatcher, carpenter, mason, potter, glassblower, chimney sweep, milkmaid,
goatherd, innkeeper, coachman, conductor, stationmaster, librarian, watchman, astronomer, sculptor, piper,
drummer, juggler, fortune-teller, rag-and-bone man, pedlar, candlemaker, ropemaker, saddler, puppet-maker,
organ-grinder, dairymaid, pastry cook, toymaker, hatter, bell-ringer, dwarf, ogre, elf, pixie, goblin,
mermaid, snowman, griffin, unicorn, phoenix""")
NUM_HELPERS = len(_HELPER_LOOKS) * len(_HELPER_KINDS)
_ELDER_TITLES = words_of("""
Aunt, Uncle, Granny, Grandpa, Old Mr, Mrs, Mr, Miss, Cousin, Captain, Doctor, Nurse, Old Mrs, Great-Aunt,
Great-Uncle""")
_ELDER_NAMES = words_of("""
Juniper, Bram, Hester, Tobit, Plum, Finch, Applewhite, Thistledown, Pettigrew, Clementine, Ambrose, Moss,
Oats, Underhill, Pocket, Larkspur, Tansy, Fergus, Barley, Crane, Bellweather, Crumpet, Dandridge, Elderberry,
Fairweather, Gooseberry, Hathaway, Inkpen, Jessop, Kettlewell, Lavender, Merriweather, Nightingale, Oakapple,
Pennyfeather, Quince, Rosewarne, Silverthorn, Teasdale, Umberley, Violet, Winterbourne, Yarrow, Buttercross,
Honeycomb, Marchbanks, Puddifoot, Swallowfield, Trelawney, Wimple""")
_PARENTS = words_of("Grandmother, Grandfather, Mother, Father")
FEELINGS = words_of("""
happy, proud, glad, warm all over, calm, brave, content, cheerful, thankful, lighter than a feather, peaceful,
grateful, pleased, very lucky, safe, wide awake with joy, quietly proud, cosy, hopeful, full of joy, snug, at
home, contented, relieved, delighted, ten feet tall, as light as air, quite at peace, merry, satisfied, loved,
warm inside, jolly, joyful, cheery, carefree, brand-new""")
_AS_FEELINGS = words_of(
    "happy, snug, merry, proud, light, warm, calm, bright, glad, cosy, brave, peaceful, free, rich, jolly, safe"
)
_AS_WHAT = words_of("""
a lark in spring, a cricket on a hearth, a bee in clover, a cat in the sun, a robin on a gatepost, a duck on a
pond, a mouse in a cheese shop, a king on a cushion, a bun in an oven, a sailor ashore, a kite in the wind, a
kettle on the boil, a bear in a blanket, a frog in the rain, a snail in a lettuce, a bell on a Sunday, a star
in winter, a lamb in a meadow, a moth by a lamp, a goose in a puddle, a fiddler at a fair, a hedgehog in
leaves, an owl at midnight, a rabbit in a burrow, a sparrow in a bakery, a boat in a harbour, a candle in a
window, a squirrel in autumn, a dog at a picnic, a poppy in a field""")
# Every other feeling is plain, every other a comparison.
FEELINGS += tuple(f"as {feeling} as {what}" for feeling in _AS_FEELINGS for what in _AS_WHAT)
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
    if random.random() < 0.25:
        return random.choice(_PARENTS)
    return f"{random.choice(_ELDER_TITLES)} {random.choice(_ELDER_NAMES)}"
