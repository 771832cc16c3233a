"""Which names, things and combinations belong to training and which are held out for the test.

The split is a hash of the words themselves, so it needs no list and holds for invented words too.
"""

from zlib import crc32

HELD_OUT_SHARE = 16  # one in sixteen


def is_held_out(*parts: str) -> bool:
    """Tell whether a word, or a combination such as (shape, thing), belongs to the test split."""
    return crc32("\x1f".join(parts).lower().encode()) % HELD_OUT_SHARE == 0


def is_name_allowed(name: str, split: str) -> bool:
    """Tell whether a split may use this name: training never, the test only held-out ones."""
    return is_held_out("name", name) == (split == "test")


def is_thing_allowed(noun: str, shape: str, split: str) -> bool:
    """Tell whether a split may put this thing into this shape.

    The test uses things that training never names, and known things in shapes where training never puts them.
    """
    return (is_held_out("thing", noun) or is_held_out("pair", shape, noun)) == (split == "test")
