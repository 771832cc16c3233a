"""Things that stories turn on: ordinary ones, compounds such as a moon-kite, and invented ones such as a zibbet.

Every thing is one object that a small character can hold or carry, so that it fits every plot.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .grammar import words_of
from .names import invent_word, odd_word
from .split import is_thing_allowed

ORDINARY = words_of("""
accordion, acorn, almanac, anchor, apron, arrow, atlas, backpack, badge, bag, ball, balloon, banjo, banner,
basket, bead, beanbag, bell, belt, bicycle bell, binder, blanket, boat, bobbin, bonnet, book, bookmark,
boomerang, boot, bottle, bow, bowl, box, bracelet, brick, broom, brooch, brush, bucket, buckle, bugle, button,
cake, camera, candle, candlestick, cane, cap, cape, card, carrot, cart, casket, chain, chair, chalk box,
charm, chart, chest, chime, clarinet, cloak, clock, cloth, coat, coin, collar, comb, compass, cone, cork,
crayon, crown, crystal, cup, curtain, cushion, dice cup, dish, doll, doorknob, doorbell, dress, drum,
dumpling, duster, earring, easel, egg, egg cup, envelope, eraser, fan, feather, fiddle, figurine, flag, flask,
flute, footstool, fork, frame, funnel, gem, globe, glove, goblet, gong, guitar, hammer, hammock, handbag,
handkerchief, harmonica, harp, hat, helmet, hook, hoop, horn, hourglass, jacket, jam jar, jar, jewel, jug,
kaleidoscope, kazoo, kettle, key, key ring, kite, knapsack, knob, ladder, ladle, lamp, lampshade, lantern,
leaf, lens, letter, letterbox, lid, locket, lute, magnet, map, marble, mask, matchbox, medal, mirror, mitten,
mop, mug, napkin, necklace, needle, net, notebook, nutcracker, oar, ornament, paddle, paintbrush, pan,
parasol, parcel, pebble, pen, pencil, pendant, penny, photograph, picture, pie, pillow, pin, pincushion, pine
cone, pinwheel, pipe, plate, pocket watch, postcard, pot, pouch, propeller, puppet, purse, puzzle, quilt,
racket, radio, rag doll, raft, rattle, recorder, ribbon, ring, robe, rolling pin, rope, rucksack, ruler,
saddle, sailboat, sandal, saucepan, saucer, saw, saxophone, scarf, screwdriver, scroll, seashell, seed, shawl,
shell, shield, shoe, shovel, sieve, skateboard, skipping rope, slate, sled, sleigh bell, slipper, snow globe,
soap dish, sock, spade, spinning top, spool, spoon, spyglass, stamp, stone, stool, suitcase, sundial, sweater,
tablecloth, tambourine, tape measure, tea cosy, teacup, teapot, teaspoon, teddy bear, telescope, tent,
thermometer, thimble, ticket, tile, toaster, toothbrush, torch, tortoiseshell comb, towel, toy boat, toy car,
toy duck, toy rocket, toy train, tray, treasure box, trinket, trowel, trumpet, tuba, typewriter, ukulele,
umbrella, vase, vest, violin, waistcoat, wagon, walking stick, wallet, wand, watch, watering can, wheel,
wheelbarrow, whisk, whistle, wig, windmill, wooden spoon, wreath, xylophone, yo-yo""")
COLOURS = words_of("""
red, blue, green, yellow, orange, purple, pink, white, black, brown, grey, golden, silver, crimson, scarlet,
turquoise, violet, sky blue, cherry red, navy blue, cream, lilac, mint green, rose pink, lemon yellow, dark green,
dark blue, light blue, bright red, bright yellow, pale green, pale blue, snow white""")
MATERIALS = words_of("""
brass, wooden, copper, glass, paper, tin, clay, woollen, leather, stone, velvet, silk, pewter, bamboo, straw, felt,
china, marble, cotton, iron, knitted, wicker, crystal, oak, bronze, cardboard, steel, amber, canvas, rubber""")
LOOKS = words_of("""
tiny, little, old, round, crooked, shiny, dusty, striped, spotted, patched, painted, rusty, smooth, odd, heavy, long,
small, polished, chipped, battered, wonderful, dented, plain, glittering, bent, square, wobbly, fancy, lucky, mended,
carved, squeaky, faded, speckled, pointed, enormous, fuzzy, creaky, humming, shabby, splendid, handsome, curious,
ordinary, famous, ancient, brand-new, second-hand, borrowed, cracked, twisted, starry, dotted, flat, pocket-sized,
sturdy, sparkling, gleaming, magic""")
_FIRST_HALVES = words_of("""
moon, star, sun, rain, wind, cloud, snow, thunder, honey, river, dream, whisper, shadow, frost, flower, moss,
button, feather, song, mirror, sugar, pepper, bubble, echo, morning, evening, winter, summer, dragon, giggle,
sleep, storm, pocket, rainbow, wish, pumpkin, sea, fire, silver, apple""")
_LAST_HALVES = words_of("""
kite, lamp, bell, boat, drum, cup, hat, lantern, spoon, key, box, stone, whistle, clock, coat, basket, ball,
feather, flute, map, mirror, pot, ribbon, ring, scarf, shell, shoe, top, wheel, wand, jar, net, book, horn,
fiddle, broom, blanket, mug, compass, button""")

# Share of things such as a moon-kite.
_COMPOUND_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class Thing:
    """One thing: its noun, and the adjective of its first mention."""

    noun: str
    adjective: str
    colour: str  # the adjective again where it is a colour, else empty

    @property
    def full(self) -> str:
        """The first mention without an article: `red kite`."""
        return f"{self.adjective} {self.noun}" if self.adjective else self.noun


def is_compound(noun: str) -> bool:
    """Tell whether a thing is one such as a moon-kite, of two common words."""
    first, _, last = noun.partition("-")
    return first in _FIRST_HALVES and last in _LAST_HALVES


def _choose_noun(random: Random, rare_share: float) -> str:
    if random.random() < rare_share:
        roll = random.random()
        if roll < 0.4:
            return odd_word(random)
        if roll < 0.6:
            return f"{odd_word(random)} {random.choice(_LAST_HALVES)}"
        return invent_word(random) if roll < 0.8 else f"{random.choice(ORDINARY).split()[-1]}-{invent_word(random)}"
    first, last = random.choice(_FIRST_HALVES), random.choice(_LAST_HALVES)
    if random.random() < _COMPOUND_SHARE and first != last:
        return f"{first}-{last}"
    return random.choice(ORDINARY)


def choose_thing(random: Random, shape: str, split: str, rare_share: float) -> Thing:
    """Choose a thing that this split may put into this shape; a share of things is rare, as names are."""
    while True:
        noun = _choose_noun(random, rare_share)
        if is_thing_allowed(noun, shape, split):
            break
    roll = random.random()
    # Plain colours come up most.
    colour = random.choice(COLOURS[:12] if roll < 0.3 else COLOURS) if roll < 0.5 else ""
    adjective = colour or random.choice(MATERIALS if roll < 0.7 else LOOKS)
    if adjective.split()[0] in noun.split():  # no tin tin, no wooden wooden spoon
        return Thing(noun, "lucky", "")
    return Thing(noun, adjective, colour)
