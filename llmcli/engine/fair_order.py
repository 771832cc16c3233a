"""`FairOrder`: the order in which the texts of several clients get rows: weighted fair queueing.

Each text is ordered by the time at which it would end if all clients shared the steps equally [Demers, Keshav and
Shenker 1989, Analysis and simulation of a fair queueing algorithm]. So who asks for little does not wait for who asks
for much, and everybody's turn comes: time goes on for those who wait, too. The texts of one client keep their order.
"""

from collections import Counter
from collections.abc import Hashable
from itertools import count
from typing import NamedTuple

_PROMPT_SHARE = 1 / 16  # of a new token's time that a token of a prompt takes; a rough figure
_WORTH = 4  # a row changes hands for a text that needs this many times fewer tokens than the other


class Order(NamedTuple):
    """A text's place: the one that ends earlier goes first, then the one that was asked for earlier."""

    end: float
    number: int


class FairOrder:
    """See the module. Time is in new tokens of each client. A client is known while a text of its own is open."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[Hashable, float] = {}  # of the latest text of each client
        self._num_open: Counter[Hashable] = Counter()
        self._numbers = count(1)

    def enter(self, client: Hashable, num_prompt_tokens: int, num_new_tokens: int) -> Order:
        """The place of a text that is asked for now."""
        self._num_open[client] += 1
        begin = max(self._now, self._ends.get(client, 0.0))
        end = self._ends[client] = begin + num_prompt_tokens * _PROMPT_SHARE + num_new_tokens
        return Order(end, next(self._numbers))

    def leave(self, client: Hashable, num_unused: int) -> None:
        """A text is over; what it has not used of its new tokens is the client's again."""
        self._num_open[client] -= 1
        if self._num_open[client]:
            self._ends[client] -= num_unused
        else:
            del self._num_open[client], self._ends[client]

    def pass_time(self, num_tokens: int) -> None:
        """Count a step's new tokens, of which each client has had its share."""
        self._now += num_tokens / max(1, len(self._num_open))


def is_worth_a_row(num_wanted: int, num_left: int, rows_of_wanting: int, rows_of_holder: int) -> bool:
    """Whether a running text should give its row to one of another client that goes first.

    `num_wanted` and `num_left` are the new tokens that each needs still; rows are those that each one's client holds.
    """
    return rows_of_wanting + 1 < rows_of_holder or num_wanted * _WORTH <= num_left
