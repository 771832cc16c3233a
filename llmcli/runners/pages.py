"""The pages of a KV cache: who holds which, and which hold the beginning of a prompt that another prompt shares.

Nothing here knows a device. A page is a number; it stands for the keys and values of PAGE_TOKENS tokens in all layers.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.runners.base import PAGE_TOKENS


class PagePool:
    """Counts who holds each page. A page with several holders must not be written."""

    def __init__(self, num_pages: int):
        self._holders = [0] * num_pages
        self._free = list(range(num_pages))  # a heap: the lowest first, so that the pages of one row lie together

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A page with one holder. Raises: IndexError if none is free"""
        page = heapq.heappop(self._free)
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Add a holder to a page that has one."""
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """Take a holder away; without any the page is free."""
        self._holders[page] -= 1
        if self._holders[page] == 0:
            heapq.heappush(self._free, page)

    def num_holders(self, page: int) -> int:
        """How many hold it."""
        return self._holders[page]


@dataclass(eq=False)
class _Node:
    """A page of a prompt's beginning. `key` is where it is found: the page before it, and its own tokens."""

    page: int
    parent: "_Node | None"
    key: tuple[int, tuple[int, ...]]
    num_children: int = 0


class PromptIndex:
    """Finds the pages of prompts by what they hold, and holds them itself until somebody needs room.

    A token is known here by its stamp: its id, and how it was computed. So what is found has the right bits.
    """

    def __init__(self, pool: PagePool):
        self._pool = pool
        # From the page that has been unused for the longest to the latest; a page stands in front of those before it
        # in its prompts, so that the first ones are ends of prompts.
        self._nodes: OrderedDict[tuple[int, tuple[int, ...]], _Node] = OrderedDict()

    def find(self, stamps: Sequence[int]) -> list[int]:
        """The pages of the longest known beginning of a prompt; the caller takes hold of them."""
        path = self._path(stamps)
        for node in reversed(path):
            self._nodes.move_to_end(node.key)
        return [node.page for node in path]

    def add(self, stamps: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Take up the full pages of a prompt's beginning; returns those in which it is found from now on.

        Where others hold the same, theirs stay, and the caller changes over to them.
        """
        path = self._path(stamps)
        parent = path[-1] if path else None
        for index in range(len(path), len(pages)):
            key = _key(parent, stamps, index)
            node = self._nodes[key] = _Node(pages[index], parent, key)
            self._pool.hold(node.page)
            if parent is not None:
                parent.num_children += 1
            parent = node
            path.append(node)
        for node in reversed(path):
            self._nodes.move_to_end(node.key)
        return [node.page for node in path]

    def num_idle(self) -> int:
        """Pages that nothing but the index holds."""
        return sum(self._pool.num_holders(node.page) == 1 for node in self._nodes.values())

    def give_up_one(self) -> bool:
        """Release the page that has been unused for the longest, of those that no row holds; False if there is none."""
        for _ in range(len(self._nodes)):
            node = next(iter(self._nodes.values()))
            if node.num_children == 0 and self._pool.num_holders(node.page) == 1:
                del self._nodes[node.key]
                if node.parent is not None:
                    node.parent.num_children -= 1
                self._pool.release(node.page)
                return True
            self._nodes.move_to_end(node.key)  # a row uses it, so it is as good as new
        return False

    def _path(self, stamps: Sequence[int]) -> list[_Node]:
        path: list[_Node] = []
        for index in range(len(stamps) // PAGE_TOKENS):
            node = self._nodes.get(_key(path[-1] if path else None, stamps, index))
            if node is None:
                break
            path.append(node)
        return path


def _key(parent: _Node | None, stamps: Sequence[int], index: int) -> tuple[int, tuple[int, ...]]:
    # A page's number says what stands before it: as long as a node exists, its parent does.
    tokens = tuple(stamps[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])
    return (-1 if parent is None else parent.page), tokens
