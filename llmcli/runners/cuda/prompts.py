"""How the tokens of a prompt are computed, and which prompts of a step share a pass."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from llmcli.runners.base import MAX_SPAN
from llmcli.runners.cuda.ways import WAYS, PromptWays, Way, most_tokens_of
from llmcli.runners.cuda.workspace import MOST_PARTS
from llmcli.runners.step_device import SINGLE, Work

# Method numbers: SINGLE, then one for each way of products; numbers from here on mean this plus a chunk's length.
_FIRST_NUMBER = 1 + len(WAYS)


def method_of(num_tokens: int, ways: PromptWays, *, is_free: bool) -> int:
    """The method of a chunk of `num_tokens` tokens. With `is_free` a product's bits do not depend on their number."""
    if num_tokens <= MAX_SPAN:
        return SINGLE
    return 1 + WAYS.index(ways.of(num_tokens)) if is_free else _FIRST_NUMBER + num_tokens


def way_of_method(method: int, ways: PromptWays) -> Way:
    """The way of products of a method other than SINGLE."""
    if method < _FIRST_NUMBER:
        return WAYS[method - 1]
    return ways.of(method - _FIRST_NUMBER)


def prompt_passes(works: Sequence[Work], places: Iterable[int], chunk_tokens: int) -> list[list[int]]:
    """The passes of the works at these indices: those computed in the same way share a pass, as far as they fit.

    A token has the same bits in any of them. A work that chooses after every token runs alone: there is no room for
    the logits of more.
    """

    def method_at(place: int) -> int:
        return works[place].method

    passes: list[list[int]] = []
    for method, some in groupby(sorted(places, key=method_at), method_at):
        is_free = SINGLE < method < _FIRST_NUMBER
        most = most_tokens_of(WAYS[method - 1], chunk_tokens) if is_free else 0
        room = 0
        for place in some:
            joins = is_free and works[place].choose != "every"
            if not joins or works[place].num_tokens > room or len(passes[-1]) == MOST_PARTS:
                passes.append([])
                room = most if joins else 0
            passes[-1].append(place)
            room -= works[place].num_tokens
    return passes
