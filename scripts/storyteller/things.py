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
turquoise, violet, amber, emerald green, sky blue, sea green, rose pink, lemon yellow, cherry red, snow white,
midnight blue, rust red, mint green, peach, plum, lilac, navy blue, cream, honey yellow, olive green, coral,
ruby red, copper brown, indigo, apricot, mustard, maroon, magenta, teal, beige, tan, ochre, aqua, charcoal,
chestnut brown, brick red, moss green, lime green, pea green, bottle green, ice blue, ink blue, powder blue,
cornflower blue, royal blue, steel grey, dove grey, ash grey, soot black, coal black, pearl white, milk white,
butter yellow, mustard yellow, straw yellow, sunflower yellow, salmon pink, shell pink, rosy, berry red, brick
orange, pumpkin orange, carrot orange, toffee brown, chocolate brown, walnut brown, lavender, mauve, heather
purple, grape purple""")
MATERIALS = words_of("""
brass, wooden, copper, glass, paper, tin, clay, woollen, leather, stone, velvet, silk, pewter, ivory, bamboo,
straw, felt, porcelain, marble, cotton, iron, knitted, wicker, pearl, crystal, birch-bark, oak, linen, bronze,
cardboard, steel, pine, cherrywood, walnut, ebony, china, chalk, wax, amber, jade, enamel, canvas, hemp,
flannel, satin, tweed, corduroy, lace, muslin, sheepskin, feathered, earthenware, plaster, sugar, rubber,
slate, granite, driftwood""")
LOOKS = words_of("""
tiny, little, old, round, crooked, shiny, dusty, striped, spotted, patched, painted, folded, rusty, smooth,
curly, odd, heavy, long, small, polished, chipped, battered, wonderful, dented, plain, glittering, bent,
square, wobbly, fancy, lucky, mended, carved, floppy, squeaky, faded, speckled, pointed, lopsided, enormous,
plump, slender, stout, frilly, fuzzy, woolly, velvety, silky, sticky, slippery, creaky, humming, rattling,
whistling, shabby, splendid, handsome, humble, homely, peculiar, curious, ordinary, famous, ancient,
brand-new, second-hand, borrowed, well-worn, weather-beaten, cracked, scratched, twisted, knotted,
embroidered, engraved, gilded, varnished, lacquered, chequered, tartan, flowery, starry, stripy, dotted,
wrinkled, crumpled, oval, flat, hollow, three-cornered, pocket-sized, gigantic, dainty, sturdy, rickety,
bulging, narrow, wide, musical, sparkling, gleaming, glossy, sooty, mossy, sandy, sweet-smelling, double,
magic""")
NUM_LOOKS = len(COLOURS) + len(MATERIALS) + len(LOOKS)
_FIRST_HALVES = words_of("""
moon, star, sun, rain, wind, cloud, snow, thunder, honey, river, dream, whisper, shadow, frost, flower, moss,
button, feather, song, mirror, sugar, pepper, bubble, echo, morning, evening, winter, summer, dragon, giggle,
sleep, storm, pocket, rainbow, wish, pumpkin, sea, fire, silver, apple""")
_LAST_HALVES = words_of("""
kite, lamp, bell, boat, drum, cup, hat, lantern, spoon, key, box, stone, whistle, clock, coat, basket, ball,
feather, flute, map, mirror, pot, ribbon, ring, scarf, shell, shoe, top, wheel, wand, jar, net, book, horn,
fiddle, broom, blanket, mug, compass, button""")

# Share of things that are everyday words of any sort, or oddly spelled.
_ODD_SHARE = 0.18


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
    roll = random.random()
    if roll < _ODD_SHARE:
        # A thing that is held out may still be the first half of another.
        word = odd_word(random) if random.random() < 0.7 else random.choice(ORDINARY)
        is_half = word in ORDINARY or random.random() < 0.2
        return f"{word} {random.choice(_LAST_HALVES)}" if is_half else word
    if roll >= _ODD_SHARE + (1 - _ODD_SHARE) * invented_share:
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
