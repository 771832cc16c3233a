"""The card's page table of a row: it has all pages before a step runs, and gets each of them once."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

device = pytest.importorskip("llmcli.runners.cuda.step.device")


class Copies:
    """A stand-in for the mailbox: records how many pages were sent."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def send(self, target: np.ndarray, source: np.ndarray) -> None:
        target[...] = source
        self.sizes.append(len(source))


def test_only_pages_that_the_card_has_not_are_sent() -> None:
    card: Any = object.__new__(device.CudaDevice)
    card._tables = [[], []]
    card._mailbox = Copies()
    card._workspace = SimpleNamespace(page_table=np.full((2, 6), -1, np.int32))
    row: list[int] = []
    for pages, sent in (
        ([7], [1]),
        ([7, 3], [1]),
        ([7, 3], []),
        ([7, 3, 4, 5], [2]),
        ([7, 9, 4, 5], [4]),  # a page that others share was copied
        ([7, 9, 4, 5, 8], [1]),
        ([7, 9], [2]),  # rolled back
        ([7, 9, 6], [1]),  # and on, in other pages
        ([2, 9, 6], [3]),  # another row
    ):
        row[:] = pages  # the runner changes its list in place
        card._mailbox.sizes.clear()
        card._send_table(1, row)
        assert card._workspace.page_table[1, : len(pages)].tolist() == pages
        assert card._mailbox.sizes == sent
    assert card._tables[0] == []
