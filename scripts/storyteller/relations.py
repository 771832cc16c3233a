"""Puts a wish for two heroes into words that join them: verbs, `afraid of`, `between`, `my son wants to meet`."""

from __future__ import annotations

from functools import cache
from random import Random

from .grammar import Values, words_of
from .phrases import POOLS, read_text

VERBS = words_of(read_text("verbs.txt").replace("\n", " "))
_PAST = {
    "meet": "met", "find": "found", "run": "ran", "sing": "sang", "fly": "flew", "go": "went", "sit": "sat",
    "sleep": "slept", "get": "got", "have": "had", "think": "thought", "write": "wrote", "build": "built",
    "make": "made", "fall": "fell", "steal": "stole", "catch": "caught", "lose": "lost", "hear": "heard",
    "stand": "stood", "give": "gave", "tell": "told", "draw": "drew", "bring": "brought", "say": "said",
    "keep": "kept", "win": "won", "take": "took", "teach": "taught", "feed": "fed", "wake": "woke", "hide": "hid",
    "forgive": "forgave", "swap": "swapped", "hug": "hugged",
}  # fmt: skip
_DOUBLED = ("hug", "run", "swap", "sit", "get", "win")


@cache
def inflect(verb: str) -> dict[str, str]:
    """Forms of a verb, by their slots: `v` look for, `vs` looks for, `ved` looked for, `ving` looking for."""
    head, _, rest = verb.partition(" ")
    ends_in_y = head.endswith("y") and head[-2] not in "aeiou"
    if head == "have":
        third = "has"
    elif ends_in_y:
        third = head[:-1] + "ies"
    else:
        third = head + ("es" if head.endswith(("s", "x", "ch", "sh", "o")) else "s")
    stem = head[:-1] if head.endswith("e") and not head.endswith("ee") else head
    past = _PAST.get(head) or (head[:-1] + "ied" if ends_in_y else stem + ("d" if head.endswith("ee") else "ed"))
    present = f"{head}{head[-1]}ing" if head in _DOUBLED else stem + "ing"
    forms = {"v": head, "vs": third, "ved": past, "ving": present}
    return {slot: f"{form} {rest}".rstrip() for slot, form in forms.items()}


@cache
def _pool(name: str) -> list:
    return POOLS.parse(f"{{@{name}}}")


# Of the wishes for two: the second does something to the first.
_TURNED_SHARE = 0.12


def join_heroes(random: Random, values: Values, pool: str, may_turn: bool = True) -> str:
    """Fill a template that joins the words for both heroes, `h` and `m`, in this order or, if it may, the other."""
    local = Values(values)
    local.update(inflect(random.choice(VERBS)))
    if may_turn and random.random() < _TURNED_SHARE and not values["m"].startswith(values["his"]):
        local["h"], local["m"] = values["m"], values["h"]
    return local.fill(_pool(pool), random.random)
