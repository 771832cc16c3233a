"""`SteppingRunner` over a device without a model: which pages a row writes, and which tokens it reports."""

from itertools import count

import numpy as np
from page_device import VOCAB_SIZE, PageDevice

from llmcli.runners.base import Span
from llmcli.runners.stepping import SteppingRunner
from llmcli.sampling.params import Sampler, SamplingParams

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
