"""`FairOrder`: the order in which the texts of several clients get rows: weighted fair queueing.

Each text is ordered by the time at which it would end if all clients shared the steps equally [Demers, Keshav and
Shenker 1989, Analysis and simulation of a fair queueing algorithm]. So who asks for little does not wait for who asks
for much, and everybody's turn comes: time goes on for those who wait, too. The texts of one client keep their order.
"""

from collections.abc import Hashable, Iterable
from itertools import count
from typing import NamedTuple

_PROMPT_SHARE = 1 / 16  # of a new token's time that a token of a prompt takes; a rough figure
_STEPS_TOGETHER = 16  # time is counted so rarely, as it takes a look at all who wait
_WORTH = 4  # a row changes hands for a text that needs this many times fewer tokens than the other


class Order(NamedTuple):
    """A text's place: the one that ends earlier goes first, then the one that was asked for earlier."""

    end: float
    number: int


class FairOrder:
    """See the module. Time is in new tokens of each client."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[Hashable, float] = {}  # of the latest text of each client that ends after now
        self._numbers = count(1)
        self._num_passed = self._num_steps = 0  # since `_now` changed

    def next(self, client: Hashable, num_prompt_tokens: int, num_new_tokens: int) -> Order:
        """The place of a text that is asked for now."""
        begin = self._ends.get(client, self._now)
        end = self._ends[client] = begin + num_prompt_tokens * _PROMPT_SHARE + num_new_tokens
        return Order(end, next(self._numbers))

    def pass_time(self, num_tokens: int, clients: Iterable[Hashable]) -> None:
        """Count a step's new tokens, of which each client has had its share. `clients` are those of all open texts."""
        self._num_passed += num_tokens
        self._num_steps += 1
        if self._num_steps < _STEPS_TOGETHER:
            return
        is_one = len(self._ends) <= 1  # then it need not be asked who they are
        self._now += self._num_passed / (1 if is_one else max(1, len(set(clients))))
        self._num_passed = self._num_steps = 0
        self._ends = {client: end for client, end in self._ends.items() if end > self._now}


def is_worth_a_row(num_wanted: int, num_left: int, rows_of_wanting: int, rows_of_holder: int) -> bool:
    """Whether a running text should give its row to one of another client that goes first.

    `num_wanted` and `num_left` are the new tokens that each needs still; rows are those that each one's client holds.
    """
    return rows_of_wanting + 1 < rows_of_holder or num_wanted * _WORTH <= num_left
