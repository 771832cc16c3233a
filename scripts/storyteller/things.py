"""Things that stories turn on: ordinary ones, compounds such as a moon-kite, and invented ones such as a zibbet.

Every thing is one object that a small character can hold or carry, so that it fits every plot.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .grammar import words_of
from .names import invent_word
from .split import is_thing_allowed

ORDINARY = words_of("""
accordion, acorn, almanac, anchor, apron, arrow, atlas, backpack, badge, bag, ball, balloon, banjo, banner,
basket, bead, beanbag, bell, belt, bicycle bell, binder, blanket, boat, bobbin, bonnet, book, bookmark,
boomerang, boot, bottle, bow, bowl, box, bracelet, brick, broom, brooch, brush, bucket, buckle, bugle, button,
cake, camera, candle, candlestick, cane, cap, cape, card, carrot, cart, casket, chain, chair, chalk box, charm,
chart, chest, chime, clarinet, cloak, clock, cloth, coat, coin, collar, comb, compass, cone, cork, crayon,
crown, crystal, cup, curtain, cushion, dice cup, dish, doll, doorknob, doorbell, dress, drum, dumpling, duster,
earring, easel, egg, egg cup, envelope, eraser, fan, feather, fiddle, figurine, flag, flask, flute, footstool,
fork, frame, funnel, gem, globe, glove, goblet, gong, guitar, hammer, hammock, handbag, handkerchief, harmonica,
harp, hat, helmet, hook, hoop, horn, hourglass, jacket, jam jar, jar, jewel, jug, kaleidoscope, kazoo, kettle,
key, key ring, kite, knapsack, knob, ladder, ladle, lamp, lampshade, lantern, leaf, lens, letter, letterbox,
lid, locket, lute, magnet, map, marble, mask, matchbox, medal, mirror, mitten, mop, mug, napkin, necklace,
needle, net, notebook, nutcracker, oar, ornament, paddle, paintbrush, pan, parasol, parcel, pebble, pen, pencil,
pendant, penny, photograph, picture, pie, pillow, pin, pincushion, pine cone, pinwheel, pipe, plate, pocket
watch, postcard, pot, pouch, propeller, puppet, purse, puzzle, quilt, racket, radio, rag doll, raft, rattle,
recorder, ribbon, ring, robe, rolling pin, rope, rucksack, ruler, saddle, sailboat, sandal, saucepan, saucer,
saw, saxophone, scarf, screwdriver, scroll, seashell, seed, shawl, shell, shield, shoe, shovel, sieve,
skateboard, skipping rope, slate, sled, sleigh bell, slipper, snow globe, soap dish, sock, spade, spinning top,
spool, spoon, spyglass, stamp, stone, stool, suitcase, sundial, sweater, tablecloth, tambourine, tape measure,
tea cosy, teacup, teapot, teaspoon, teddy bear, telescope, tent, thermometer, thimble, ticket, tile, toaster,
toothbrush, torch, tortoiseshell comb, towel, toy boat, toy car, toy duck, toy rocket, toy train, tray, treasure
box, trinket, trowel, trumpet, tuba, typewriter, ukulele, umbrella, vase, vest, violin, waistcoat, wagon,
walking stick, wallet, wand, watch, watering can, wheel, wheelbarrow, whisk, whistle, wig, windmill, wooden
spoon, wreath, xylophone, yo-yo""")
COLOURS = words_of("""
red, blue, green, yellow, orange, purple, pink, white, black, brown, grey, golden, silver, crimson, scarlet,
turquoise, violet, amber, emerald green, sky blue, sea green, rose pink, lemon yellow, cherry red, snow white,
midnight blue, rust red, mint green, peach, plum, lilac, navy blue, cream, honey yellow, olive green, coral,
ruby red, copper brown, indigo, apricot""")
MATERIALS = words_of("""
brass, wooden, copper, glass, paper, tin, clay, woollen, leather, stone, velvet, silk, pewter, ivory, bamboo, straw,
felt, porcelain, marble, cotton, iron, knitted, wicker, pearl, crystal, birch-bark, oak, linen, bronze, cardboard""")
LOOKS = words_of("""
tiny, little, old, round, crooked, shiny, dusty, striped, spotted, patched, painted, folded, rusty, smooth,
curly, odd, heavy, long, small, polished, chipped, battered, wonderful, dented, plain, glittering, bent, square,
wobbly, fancy, lucky, mended, carved, floppy, squeaky, faded, speckled, pointed, lopsided, enormous""")
_FIRST_HALVES = words_of("""
moon, star, sun, rain, wind, cloud, snow, thunder, honey, river, dream, whisper, shadow, frost, flower, moss,
button, feather, song, mirror, sugar, pepper, bubble, echo, morning, evening, winter, summer, dragon, giggle,
sleep, storm, pocket, rainbow, wish, pumpkin, sea, fire, silver, apple""")
_LAST_HALVES = words_of("""
kite, lamp, bell, boat, drum, cup, hat, lantern, spoon, key, box, stone, whistle, clock, coat, basket, ball,
feather, flute, map, mirror, pot, ribbon, ring, scarf, shell, shoe, top, wheel, wand, jar, net, book, horn,
fiddle, broom, blanket, mug, compass, button""")


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


def _choose_noun(random: Random, invented_share: float) -> str:
    if random.random() >= invented_share:
        return random.choice(ORDINARY)
    roll = random.random()
    if roll < 0.45:
        word = invent_word(random)
        return word
    first, last = random.choice(_FIRST_HALVES), random.choice(_LAST_HALVES)
    if roll < 0.7 and first != last:
        return f"{first}-{last}"
    if roll < 0.85:
        return f"{invent_word(random)} {last}"
    return f"{random.choice(ORDINARY).split()[-1]}-{invent_word(random)}"


def choose_thing(random: Random, shape: str, split: str, invented_share: float) -> Thing:
    """Choose a thing that this split may put into this shape."""
    while True:
        noun = _choose_noun(random, invented_share)
        if is_thing_allowed(noun, shape, split):
            break
    roll = random.random()
    colour = random.choice(COLOURS) if roll < 0.5 else ""
    adjective = colour or random.choice(MATERIALS if roll < 0.72 else LOOKS)
    if adjective.split()[0] in noun.split():  # no tin tin, no wooden wooden spoon
        return Thing(noun, "lucky", "")
    return Thing(noun, adjective, colour)
