"""Names of characters: common first names with a known gender, rare ones, and names invented from syllables."""

from __future__ import annotations

import re
from functools import cache
from random import Random

from .grammar import capitalise, words_of
from .phrases import read_text, text_names
from .split import is_name_allowed

GIRLS = words_of("""
Ada, Agnes, Alice, Alma, Amelia, Amina, Amy, Anna, Anya, Astrid, Ava, Beatrice, Bella, Beth, Bonnie, Brenda,
Carla, Carmen, Cecilia, Celia, Chloe, Clara, Cora, Daisy, Dalia, Daphne, Delia, Diana, Dora, Edith, Elena,
Elise, Eliza, Ella, Elsa, Emily, Emma, Erica, Esther, Eva, Fatima, Fiona, Flora, Frances, Freya, Frida, Gemma,
Gertrude, Gloria, Grace, Greta, Hannah, Harriet, Hazel, Heidi, Helen, Hilda, Holly, Ida, Ines, Ingrid, Irene,
Iris, Isabel, Ivy, Jane, Jasmine, Jenny, Jill, Joan, Johanna, Josie, Judith, Julia, June, Karen, Katie, Kira,
Laila, Laura, Leah, Lena, Lidia, Lily, Lina, Linda, Lisa, Lola, Lotte, Louisa, Lucy, Luna, Mabel, Maggie,
Maria, Marta, Matilda, Maya, Meera, Mia, Mildred, Mina, Minnie, Miriam, Molly, Mona, Nadia, Nancy, Naomi,
Nell, Nina, Nora, Olga, Olive, Olivia, Opal, Paula, Pearl, Peggy, Penelope, Petra, Phoebe, Poppy, Priya,
Rachel, Rebecca, Rita, Rosa, Rosie, Ruby, Ruth, Sally, Sara, Selma, Sofia, Stella, Susan, Sylvia, Tamara,
Tara, Tessa, Thea, Tilda, Tina, Ursula, Valerie, Vera, Victoria, Viola, Wanda, Wendy, Willa, Winnie, Yasmin,
Yuki, Zara, Zelda, Zoe""")
BOYS = words_of("""
Aaron, Abel, Adam, Albert, Alfred, Amir, Andrew, Anton, Arlo, Arthur, Axel, Barnaby, Ben, Bert, Boris, Bruno,
Caleb, Carl, Casper, Cedric, Charlie, Conrad, Cyril, Daniel, David, Dexter, Diego, Dominic, Douglas, Edgar,
Edmund, Edwin, Eli, Elias, Emil, Eric, Ernest, Ethan, Felix, Ferdinand, Finn, Frank, Fred, Gabriel, George,
Gilbert, Gordon, Gus, Hamish, Hans, Harold, Harry, Hector, Henry, Herbert, Horace, Hugo, Ian, Ibrahim, Igor,
Isaac, Ivan, Jack, Jacob, Jakob, James, Jasper, Jim, Joe, Jonas, Joseph, Josh, Julian, Karim, Kenji, Kurt,
Lars, Leo, Leon, Leonard, Liam, Linus, Louis, Lucas, Ludwig, Luke, Magnus, Malcolm, Marcus, Mark, Martin,
Mateo, Max, Michael, Milo, Morris, Nathan, Ned, Neil, Nicholas, Nigel, Noah, Oliver, Omar, Oscar, Otto, Owen,
Pablo, Patrick, Paul, Pedro, Percy, Peter, Philip, Ralph, Ravi, Raymond, Reuben, Richard, Robert, Roger,
Roland, Rolf, Rory, Rufus, Rupert, Sam, Samuel, Sebastian, Simon, Stanley, Stefan, Sven, Ted, Theo, Thomas,
Tim, Timothy, Tobias, Tom, Tony, Ulrich, Victor, Vincent, Walter, Wilbur, Wilfred, William, Xavier, Yusuf,
Zachary""")
# Names that fit an animal, a toy or a cloud, and either gender.
PET_NAMES = words_of("""
Acorn, Amber, Apple, Ash, Aster, Basil, Beech, Bean, Berry, Biscuit, Bluebell, Bobbin, Bracken, Bramble,
Briar, Bubble, Bumble, Button, Cinder, Clover, Cobble, Comet, Copper, Cricket, Crumb, Dapple, Dimple, Dot,
Dusty, Echo, Ember, Fennel, Fern, Fidget, Flicker, Flint, Fluff, Freckle, Frost, Ginger, Glimmer, Heather,
Hickory, Honey, Hopper, Indigo, Jangle, Jigsaw, Jumble, Juniper, Kelp, Kipper, Kit, Lark, Lemon, Maple,
Marble, Marigold, Midge, Minnow, Mist, Mittens, Moss, Muffin, Mumble, Nettle, Nibble, Nimbus, Noodle, Nutmeg,
Oakley, Olly, Otis, Paprika, Parsnip, Patch, Peanut, Pebble, Pepper, Pickle, Pip, Pippin, Pixel, Plum, Pocket,
Puddle, Pumpkin, Quill, Quince, Raisin, Ripple, River, Robin, Rowan, Rumble, Rusty, Saffron, Sage, Scamp,
Scout, Shadow, Skipper, Smudge, Snowdrop, Sorrel, Sparrow, Speckle, Spindle, Sprig, Squeak, Storm, Sunny,
Tadpole, Tangle, Teasel, Thimble, Thistle, Tinder, Toffee, Tuft, Tumble, Turnip, Twig, Velvet, Waffle, Walnut,
Wattle, Whisper, Willow, Wisp, Wobble, Zephyr, Zigzag""")

_SIMPLE_ONSETS = words_of("""
b, d, f, g, h, j, k, l, m, n, p, r, s, t, v, w, z""")
_RICH_ONSETS = words_of("""
bl, br, cl, cr, dr, fl, fr, gl, gr, kl, kr, pl, pr, qu, sh, sk, sl, sm, sn, sp, st, sw, thr, tr, tw, wh, ch,
th, zw, y, c, ph""")
# Plain vowels come up twice as often as pairs.
_VOWELS = (*"aeiouaeiou", "y", "ee", "oo", "ai", "ia", "io", "ea", "ou")
_CODAS = words_of("""
b, d, g, k, l, m, n, n, p, r, r, s, t, x, ck, ll, lm, lt, mp, nd, nk, nn, rk, rn, sh, sk, ss, tt, zz, ng, rl,
rt, st, ft""")
_ENDINGS = words_of("""
a, o, i, e, us, is, in, en, an, el, il, ette, ina, ora, ello, ix, ax, on, um, ara, iko, uma, eth, wen, dor,
mir, bert, by, dle, kin, ling, wick, ton, bo, po, ra, la, na, zu, ble, kle, mo, ti, vi, ny""")


# Shares of names that are odd words, and of names of two words.
_ODD_SHARE = 0.18
_DOUBLE_SHARE = 0.04
# Everyday words stand as a name or a thing, too, so that every whole token of the vocabulary is copied sometimes.
_FUNCTION_WORDS = frozenset(
    words_of("""
he, she, it, they, him, her, them, his, hers, its, their, theirs, himself, herself, itself, themself,
themselves, the, and, but, for, nor, yet, was, were, are, had, has, have, did, does, not, you, your, who,
whom, whose, that, this, these, those, what, when, where, which, why, how, hero, pal, elder, friend, name,
plot, ask, let, end, meet, thing, newthing, kind, named, called, said, felt, told, with, from, into, over,
than, then, there, our, out, off, all, any, can, will, would, could, should, may, might, must, one, two,
three, four, five, six, day, monday, tuesday, wednesday, thursday, friday, saturday, sunday""")
)


@cache
def everyday_words() -> tuple[str, ...]:
    """Words of three to eleven letters that the grammar's own text uses, function words left out."""
    files = [name for folder in ("plots", "pools") for name in text_names(folder)]
    # A slot is no word, nor the name of a pool, and a contraction is no name.
    text = re.sub(r"\{[^}]*\}|\w+'\w+|^\w+:", " ", "\n".join(map(read_text, files)), flags=re.MULTILINE)
    words = {word.lower() for word in [*re.findall(r"\b[A-Za-z]{3,11}\b", text), *GIRLS, *BOYS, *PET_NAMES]}
    return tuple(sorted(words - _FUNCTION_WORDS))


def odd_word(random: Random) -> str:
    """A word that is seldom a name: an everyday one, or one that is spelled as none is."""
    roll = random.random()
    if roll < 0.75:
        return random.choice(everyday_words())
    word = invent_word(random)
    at = random.randrange(1, len(word))
    if roll < 0.88:
        return word[:at] + random.choice("bcdfghjkqvwxz") + word[at:]
    return random.choice(everyday_words())[:4] + word


def invent_word(random: Random) -> str:
    """Make up a word of one to three syllables that can be said aloud, in lower case."""
    rand = random.random

    def pick(parts: tuple[str, ...]) -> str:
        return parts[int(rand() * len(parts))]

    roll = rand()
    word = "" if roll < 0.12 else pick(_RICH_ONSETS if roll < 0.42 else _SIMPLE_ONSETS)
    word += pick(_VOWELS)
    if rand() < 0.35:
        word += pick(_SIMPLE_ONSETS) + pick(_VOWELS)
    if rand() < 0.5:
        word += pick(_CODAS)
    if len(word) < 4 or rand() < 0.45:
        word += pick(_ENDINGS) if word[-1] not in "aeiouy" else pick(_CODAS)
    word = word if len(word) > 2 else word + pick(_ENDINGS)
    # A creature called Her would make every pronoun a riddle.
    return invent_word(random) if word in _FUNCTION_WORDS else word


def choose_name(random: Random, split: str, invented_share: float, is_child: bool) -> tuple[str, str]:
    """Choose a name of the split; return it with its gender: `she`, `he`, or empty where a name has none."""
    while True:
        roll = random.random()
        if roll < _ODD_SHARE:
            name, gender = capitalise(odd_word(random)), ""
        elif roll < _ODD_SHARE + (1 - _ODD_SHARE) * invented_share:
            name, gender = capitalise(invent_word(random)), ""
        else:
            roll = random.random()
            if roll < (0.48 if is_child else 0.3):
                name, gender = random.choice(GIRLS), "she"
            elif roll < (0.96 if is_child else 0.6):
                name, gender = random.choice(BOYS), "he"
            else:
                name, gender = random.choice(PET_NAMES), ""
        is_allowed = is_name_allowed(name, split)
        if random.random() < _DOUBLE_SHARE:
            second = capitalise(odd_word(random) if random.random() < 0.5 else random.choice(PET_NAMES))
            is_allowed &= second != name and is_name_allowed(second, split)
            name = f"{name} {second}"
            is_allowed &= is_name_allowed(name, split)
        if is_allowed:
            return name, gender
