"""Pages: who holds which, and which prompts are found. Random histories against a plain dictionary."""

import random

import pytest

from llmcli.runners.base import PAGE_TOKENS
from llmcli.runners.pages import PagePool, PromptIndex


def stamps(*pages: int) -> list[int]:
    """The stamps of whole pages, one number a page."""
    return [1000 * page + place for page in pages for place in range(PAGE_TOKENS)]


def take(pool: PagePool, count: int) -> list[int]:
    return [pool.take() for _ in range(count)]


def test_the_lowest_page_is_taken_first() -> None:
    pool = PagePool(4)
    assert take(pool, 3) == [0, 1, 2]
    pool.release(1)
    pool.release(0)
    assert (take(pool, 3), pool.num_free) == ([0, 1, 3], 0)
    with pytest.raises(IndexError):
        pool.take()


def test_a_page_is_free_when_nobody_holds_it() -> None:
    pool = PagePool(1)
    page = pool.take()
    pool.hold(page)
    pool.release(page)
    assert (pool.num_holders(page), pool.num_free) == (1, 0)
    pool.release(page)
    assert (pool.num_holders(page), pool.num_free) == (0, 1)


def test_the_longest_beginning_is_found() -> None:
    pool = PagePool(10)
    index = PromptIndex(pool)
    pages = take(pool, 3)
    assert index.add(stamps(1, 2, 3), pages) == pages
    assert index.find(stamps(1, 2, 3, 4)) == pages
    assert index.find(stamps(1, 2, 4)) == pages[:2]
    assert index.find([*stamps(1), *stamps(2)[:-1]]) == pages[:1]
    assert index.find([*stamps(1), *stamps(2)[:-1], 5]) == pages[:1]
    assert index.find(stamps(2, 3)) == []


def test_what_others_hold_already_stays_theirs() -> None:
    pool = PagePool(10)
    index = PromptIndex(pool)
    first, second = take(pool, 2), take(pool, 3)
    index.add(stamps(1, 2), first)
    assert index.add(stamps(1, 2, 3), second) == [*first, second[2]]


def test_the_longest_unused_goes_first_and_ends_go_before_beginnings() -> None:
    pool = PagePool(10)
    index = PromptIndex(pool)
    for numbers in ((1, 2, 3), (1, 4), (5,)):
        pages = take(pool, len(numbers))
        kept = index.add(stamps(*numbers), pages)
        for page in pages:
            pool.release(page)
        assert len(kept) == len(numbers)
    index.find(stamps(1, 2))
    known = [(1, 2, 3), (1, 4), (5,), (1, 2)]
    order = []
    while index.give_up_one():
        for numbers in [numbers for numbers in known if len(index.find(stamps(*numbers))) < len(numbers)]:
            known.remove(numbers)
            order.append(numbers)
    assert order[-1] in ((5,), (1, 2))
    assert (order.index((1, 2, 3)), pool.num_free) == (0, 10)


@pytest.mark.parametrize("seed", range(20))
def test_random_histories(seed: int) -> None:
    """Rows begin with found pages, offer their own and end; pages are released in between.

    `written` models the device: the content of each page.
    """
    rng = random.Random(seed)
    pool = PagePool(rng.choice([8, 20, 60]))
    index = PromptIndex(pool)
    num_pages = pool.num_free
    written: dict[int, tuple[list[int], tuple[int, ...]]] = {}  # by page: the pages before it, and its own stamps
    rows: list[tuple[list[int], list[int]]] = []  # stamps, pages

    def split(row_stamps: list[int]) -> list[tuple[int, ...]]:
        return [tuple(row_stamps[first : first + PAGE_TOKENS]) for first in range(0, len(row_stamps), PAGE_TOKENS)]

    for _ in range(400):
        action = rng.random()
        if action < 0.5:
            row_stamps = stamps(*[rng.randrange(3) for _ in range(rng.randint(1, 5))])
            row_stamps += [7] * rng.randrange(PAGE_TOKENS)
            pages = index.find(row_stamps)
            for page in pages:
                pool.hold(page)
            num_full = len(row_stamps) // PAGE_TOKENS
            while pool.num_free < num_full - len(pages) and index.give_up_one():
                pass
            if pool.num_free >= num_full - len(pages):
                for place in range(len(pages), num_full):
                    page = pool.take()
                    assert all(page not in held for _, held in rows), "a page that a row holds was given away"
                    written[page] = list(pages), split(row_stamps)[place]
                    pages.append(page)
                if rng.random() < 0.8:
                    found = index.add(row_stamps[: num_full * PAGE_TOKENS], pages)
                    for page in found:
                        pool.hold(page)
                    for page in pages:
                        pool.release(page)
                    pages = found
            rows.append((row_stamps, pages))
            assert [written[page][1] for page in pages] == split(row_stamps)[: len(pages)]
        elif action < 0.8 and rows:
            _, pages = rows.pop(rng.randrange(len(rows)))
            for page in pages:
                pool.release(page)
        else:
            num_free = pool.num_free
            assert index.give_up_one() == pool.num_free - num_free  # what a row holds is not given up
        for row_stamps, pages in rows:
            assert all(pool.num_holders(page) > 0 for page in pages)
            assert [written[page][1] for page in pages] == split(row_stamps)[: len(pages)]
        held = {page for _, pages in rows for page in pages}
        assert pool.num_free + pool.num_idle + len(held) == num_pages
    for _, pages in rows:
        for page in pages:
            pool.release(page)
    while index.give_up_one():
        pass
    assert pool.num_free == num_pages
