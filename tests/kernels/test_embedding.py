"""embedding bit by bit: every type, first and last rows, and ids that are in no table."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import embedding, embedding_cost
from llmcli.kernels.phantom import Phantom
from llmcli.kernels.tiles import tile_layout
from llmcli.lab.cases.elementwise import embedding_case, rows_case, unknown_ids_case
from llmcli.lab.matrices import STORAGE


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
@pytest.mark.parametrize("hidden_size", [1, 7, 8, 40, 172, 1024, 1030, 4096, 5120, 9001])
def test_rows_of_the_table(device: Device, hidden_size: int, num_tokens: int, dtype: Any) -> None:
    assert_right(device, embedding_case(num_tokens, hidden_size, dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("hidden_size", [7, 64])
def test_an_unknown_id_gives_nan_and_reads_nothing(device: Device, hidden_size: int) -> None:
    assert_right(device, unknown_ids_case(hidden_size))


@pytest.mark.cuda
@pytest.mark.parametrize("hidden_size", [7, 64])
def test_ids_of_rows(device: Device, hidden_size: int) -> None:
    assert_right(device, rows_case(hidden_size))


def test_cost_counts_every_byte_once() -> None:
    cost = embedding_cost(num_tokens=3, hidden_size=8, itemsize=2)
    assert (cost.read_bytes, cost.written_bytes) == (3 * 8 * 2 + 3 * 4, 3 * 8 * 4)


def test_it_waits_for_what_was_launched_before() -> None:
    """Kernels after it read ahead what the sampler wrote."""
    launches: list[dict[str, Any]] = []
    device: Any = SimpleNamespace(launch=lambda stem, name, **details: launches.append(details))
    layout = tile_layout("float32", 5, 8)
    table = layout.place(Phantom((layout.arena_bytes,), np.uint8, 4096))
    ids, out = Phantom((2,), np.int32, 4096), Phantom((2, 8), np.float32, 4096)
    embedding(device, table=table, token_ids=ids, out=out)
    assert not launches[0].get("overlaps")
