"""Pages: who holds which, and which prompts are found. Random histories against a plain dictionary."""

import random
from itertools import count

import numpy as np
import pytest
from page_device import VOCAB_SIZE, PageDevice

from llmcli.runners.base import PAGE_TOKENS, Span
from llmcli.runners.pages import PagePool, PromptIndex
from llmcli.runners.stepping import SteppingRunner
from llmcli.sampling.params import Sampler, SamplingParams


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


# `SteppingRunner` over a device without a model: which pages a row writes, and which tokens it reports.


PROMPT = list(range(20))
SAMPLER = Sampler(SamplingParams(), 0)


def device_with_rows(num_rows: int) -> PageDevice:
    """A device that chooses 100, 101, ... for any row."""
    numbers = count(100)
    return PageDevice(lambda history, sampler: next(numbers), num_rows=num_rows)


def test_a_row_that_has_room_writes_no_page_that_its_fork_holds() -> None:
    device = device_with_rows(2)
    runner = SteppingRunner(device)
    row = runner.open(PROMPT, SAMPLER)
    runner.queue([Span(row, tuple(PROMPT))]).choices()
    runner.queue([Span(row)]).choices()  # 21 tokens: its second page has room
    shared = device.works[-1][0].pages[1]
    fork = runner.fork(row, 21, SAMPLER)
    runner.queue([Span(row)]).choices()
    own = device.works[-1][0].pages[1]
    assert device.pages[own][4:6] == [100, 101]
    assert device.pages[shared][4:6] == [100, None]
    runner.queue([Span(fork, (7,))]).choices()
    assert device.works[-1][0].pages[1] == shared  # nobody else holds it any more
    assert device.pages[shared][4:6] == [100, 7]


def test_a_choice_that_is_made_again_is_the_one_that_runs() -> None:
    runner = SteppingRunner(device_with_rows(1))
    row = runner.open(PROMPT, SAMPLER)
    runner.queue([Span(row, tuple(PROMPT), "none")]).choices()
    logits = np.zeros(VOCAB_SIZE, np.float32)
    first, second = (runner.queue([Span(row, logits=logits)]).choices()[0] for _ in range(2))
    assert (first, second) == (((100, None, None),), ((101, None, None),))
    runner.queue([Span(row)])
    assert list(runner.token_ids(row)) == [*PROMPT, 101]
    runner.keep(row, 20)
    runner.queue([Span(row, (9,))]).choices()
    assert list(runner.token_ids(row)) == [*PROMPT, 9]


def test_steps_may_be_read_in_another_order() -> None:
    """As a text with a schema does, which reads its latest step for its mask."""
    runner = SteppingRunner(device_with_rows(1))
    row = runner.open(PROMPT, SAMPLER)
    steps = [runner.queue([Span(row, tuple(PROMPT))]), runner.queue([Span(row)]), runner.queue([Span(row)])]
    for number in (1, 2, 0):
        assert steps[number].choices() == [((100 + number, None, None),)]
    runner.queue([Span(row)])
    assert list(runner.token_ids(row)) == [*PROMPT, 100, 101, 102]


def test_a_choice_of_before_a_roll_back_is_not_of_the_row() -> None:
    runner = SteppingRunner(device_with_rows(1))
    row = runner.open(PROMPT, SAMPLER)
    first, later = runner.queue([Span(row, tuple(PROMPT))]), runner.queue([Span(row)])
    later.choices()  # after one that has not been read
    runner.keep(row, 19)
    first.choices()
    runner.queue([Span(row, (PROMPT[-1],))]).choices()
    runner.queue([Span(row)]).choices()
    runner.queue([Span(row)])
    assert list(runner.token_ids(row)) == [*PROMPT, 102, 103]
