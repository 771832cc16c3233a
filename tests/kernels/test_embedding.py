"""embedding bit by bit: every type, first and last rows, and ids that are in no table."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fenced import assert_same_bits, fenced, to_float64, to_host, to_storage
from row_data import STORAGE, unchanged

from llmcli.kernels.device import Device
from llmcli.kernels.embedding import embedding, embedding_cost

VOCAB_SIZE = 61


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
@pytest.mark.parametrize("hidden_size", [1, 7, 8, 40, 172, 1024, 1030, 4096, 5120, 9001])
def test_rows_of_the_table(device: Device, hidden_size: int, num_tokens: int, dtype: Any) -> None:
    import cupy

    generator = np.random.default_rng(hidden_size)
    table = to_storage(generator.normal(size=(VOCAB_SIZE, hidden_size)), dtype)
    ids = generator.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32)
    ids[0], ids[-1] = VOCAB_SIZE - 1, 0
    table_device, ids_device = cupy.asarray(table), cupy.asarray(ids)
    out = fenced((num_tokens, hidden_size), np.float32)

    def call() -> Any:
        embedding(device, table=table_device, token_ids=ids_device, out=out.array)
        return out.array

    with unchanged(table_device, ids_device):
        assert_same_bits(call)
    out.check()
    assert np.array_equal(to_float64(out.array), to_float64(table)[ids])


@pytest.mark.cuda
@pytest.mark.parametrize("hidden_size", [7, 64])
def test_an_unknown_id_gives_nan_and_reads_nothing(device: Device, hidden_size: int) -> None:
    import cupy

    table = np.arange(3 * hidden_size, dtype=np.float32).reshape(3, hidden_size)
    ids = np.array([2, -1, 3, 2**31 - 1, -(2**31), 0], np.int32)
    out = fenced((len(ids), hidden_size), np.float32)
    embedding(device, table=cupy.asarray(table), token_ids=cupy.asarray(ids), out=out.array)
    values = to_host(out.array)
    assert np.array_equal(values[[0, 5]], table[[2, 0]])
    assert np.isnan(values[1:5]).all()


@pytest.mark.cuda
@pytest.mark.parametrize("hidden_size", [7, 64])
def test_ids_of_rows(device: Device, hidden_size: int) -> None:
    import cupy

    table = np.arange(5 * hidden_size, dtype=np.float32).reshape(5, hidden_size) + 1
    ids = np.array([3, 99, 1, 4], np.int32)
    rows = np.array([2, -1, 0, 3, 2, -1], np.int32)
    out = fenced((len(rows), hidden_size), np.float32)
    arrays = {"table": table, "token_ids": ids, "rows": rows}
    embedding(device, **{name: cupy.asarray(array) for name, array in arrays.items()}, out=out.array)
    out.check()
    values = to_host(out.array)
    assert np.array_equal(values[[0, 2, 3, 4]], table[[1, 3, 4, 1]])
    assert not values[[1, 5]].view(np.uint32).any()


def test_cost_counts_every_byte_once() -> None:
    cost = embedding_cost(num_tokens=3, hidden_size=8, itemsize=2)
    assert (cost.read_bytes, cost.written_bytes) == (3 * 8 * 2 + 3 * 4, 3 * 8 * 4)


def test_it_waits_for_what_was_launched_before() -> None:
    """Kernels after it read ahead what the sampler wrote."""
    launches: list[dict[str, Any]] = []
    device: Any = SimpleNamespace(launch=lambda stem, name, **details: launches.append(details))
    table, ids, out = (
        SimpleNamespace(shape=shape, dtype=np.dtype(dtype), strides=strides, data=SimpleNamespace(ptr=4096))
        for shape, dtype, strides in (
            ((5, 8), np.float32, (32, 4)),
            ((2,), np.int32, (4,)),
            ((2, 8), np.float32, (32, 4)),
        )
    )
    embedding(device, table=table, token_ids=ids, out=out)
    assert not launches[0].get("overlaps")
