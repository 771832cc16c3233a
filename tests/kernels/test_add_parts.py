"""add_parts against sums by NumPy: every bit, with any number of parts and tails of blocks."""

from typing import Any

import numpy as np
import pytest
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import add_parts, add_parts_cost
from llmcli.kernels.phantom import Phantom
from llmcli.lab.cases.elementwise import add_parts_case
from llmcli.lab.notes import Notes

SHAPES = [(1, 1), (1, 4), (3, 21), (6, 1028), (64, 4096), (256, 4096)]


@pytest.mark.cuda
@pytest.mark.parametrize(("num_rows", "num_columns"), SHAPES)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 5, 7, 8, 17])
def test_every_bit(device: Device, num_parts: int, num_rows: int, num_columns: int) -> None:
    assert_right(device, add_parts_case(num_parts, num_rows, num_columns))


def test_vectors_where_they_fit() -> None:
    notes: Any = Notes()
    for num_columns in (8, 7):
        parts, out = Phantom((2, 3, num_columns), np.float32, 1 << 20), Phantom((3, num_columns), np.float32, 2 << 20)
        add_parts(notes, parts=parts, out=out)
    assert [launch.name for launch in notes.launches] == ["add_parts<4>", "add_parts<1>"]


def test_cost_counts_every_byte_once() -> None:
    cost = add_parts_cost(num_parts=3, size=8)
    assert (cost.read_bytes, cost.written_bytes, cost.flops) == (4 * 8 * 4, 8 * 4, 3 * 8)
