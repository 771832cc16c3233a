"""Finds the names that a misspelt one may mean."""

from collections.abc import Collection

_MAX_PROPOSALS = 2


def near_names(name: str, known: Collection[str]) -> list[str]:
    """The known names that are near, the nearest first, at most two; case, and a dash more or less, count for nothing.

    Words are separated by dashes or underscores.
    """
    found = {other: distance for other in known if (distance := _distance(name, other)) is not None}
    return sorted(found, key=lambda other: (found[other], other))[:_MAX_PROPOSALS]


def _distance(name: str, other: str) -> int | None:
    """The number of slips between two names; None for too many."""
    words, others = (one.lower().replace("_", "-").strip("-").split("-") for one in (name, other))
    if len(words) != len(others):
        words, others = ["".join(words)], ["".join(others)]
    total = 0
    for word, meant in zip(words, others, strict=True):
        slips = _slips(word, meant)
        # The first letter is usually right, and two slips make another word of a short one.
        if slips and (word[:1] != meant[:1] or slips > min(2, min(len(word), len(meant)) // 3)):
            return None
        total += slips
    return total


def _slips(word: str, meant: str) -> int:
    """The number of letters missing, extra, wrong or swapped (Damerau and Levenshtein's distance, restricted)."""
    before: list[int] = []
    row = list(range(len(meant) + 1))
    for i, letter in enumerate(word, start=1):
        before, last, row = row, before, [i]
        for j, expected in enumerate(meant, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != expected))
            if i > 1 and j > 1 and letter == meant[j - 2] and word[i - 2] == expected:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]
