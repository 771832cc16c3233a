"""The pages of a KV cache: the holders of each page, and the pages with the beginning of a known prompt.

Nothing here knows a device. A page is a number; it names the keys and values of PAGE_TOKENS tokens in all layers.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.runners.base import PAGE_TOKENS


class PagePool:
    """Counts the holders of each page. A page with several holders must not be written.

    Attributes: num_idle: pages that are kept and have no other holder
    """

    def __init__(self, num_pages: int):
        self.num_idle = 0
        self._holders = [0] * num_pages
        self._kept = [False] * num_pages
        self._free = list(range(num_pages))  # a heap: the lowest comes first, which keeps a row's pages together

    @property
    def num_free(self) -> int:
        """Pages without a holder."""
        return len(self._free)

    def take(self) -> int:
        """Take a free page; it has one holder. Raises: IndexError if no page is free"""
        page = heapq.heappop(self._free)
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Add a holder to a page that is held already."""
        self.num_idle -= self._is_idle(page)
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """Remove a holder; the page becomes free with its last one."""
        self._holders[page] -= 1
        self.num_idle += self._is_idle(page)
        if self._holders[page] == 0:
            heapq.heappush(self._free, page)

    def keep(self, page: int) -> None:
        """Hold a page that is held already, for rows that may find it, until it is given up."""
        self.hold(page)
        self._kept[page] = True

    def give_up(self, page: int) -> None:
        """Undo `keep`."""
        self.num_idle -= self._is_idle(page)
        self._kept[page] = False
        self.release(page)

    def _is_idle(self, page: int) -> bool:
        return self._kept[page] and self._holders[page] == 1

    def num_holders(self, page: int) -> int:
        """Number of the page's holders."""
        return self._holders[page]


@dataclass(eq=False)
class _Node:
    """A page of a prompt's beginning. `key` finds it: the page before it, and its own stamps."""

    page: int
    parent: "_Node | None"
    key: tuple[int, tuple[int, ...]]
    num_children: int = 0


class PromptIndex:
    """Finds the pages of known prompts by their tokens. It holds these pages until room is needed.

    A stamp identifies a token: its id and the method that computed it. So a page that is found has the right bits.
    """

    def __init__(self, pool: PagePool):
        self._pool = pool
        # The least recently used page comes first. A page comes before its parent, so the first ones end prompts.
        self._nodes: OrderedDict[tuple[int, tuple[int, ...]], _Node] = OrderedDict()

    def find(self, stamps: Sequence[int]) -> list[int]:
        """The pages of the longest known beginning of a prompt. The caller must hold them."""
        path = self._path(stamps)
        for node in reversed(path):
            self._nodes.move_to_end(node.key)
        return [node.page for node in path]

    def add(self, stamps: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Add the full pages of a prompt's beginning; return the pages that `find` gives for it from now on.

        A page that is known under another number keeps that number. The caller must use the returned pages.
        """
        path = self._path(stamps)
        parent = path[-1] if path else None
        for index in range(len(path), len(pages)):
            key = _key(parent, stamps, index)
            node = self._nodes[key] = _Node(pages[index], parent, key)
            self._pool.keep(node.page)
            if parent is not None:
                parent.num_children += 1
            parent = node
            path.append(node)
        for node in reversed(path):
            self._nodes.move_to_end(node.key)
        return [node.page for node in path]

    def give_up_one(self) -> bool:
        """Release the least recently used page that no row holds; False if there is none."""
        for _ in range(len(self._nodes)):
            node = next(iter(self._nodes.values()))
            if node.num_children == 0 and self._pool.num_holders(node.page) == 1:
                del self._nodes[node.key]
                if node.parent is not None:
                    node.parent.num_children -= 1
                self._pool.give_up(node.page)
                return True
            self._nodes.move_to_end(node.key)  # a row or a later page needs it: try it again last
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
    # The parent's page number represents all earlier tokens: a node's parent exists as long as the node does.
    tokens = tuple(stamps[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])
    return (-1 if parent is None else parent.page), tokens
