"""sample_token: unused lanes, more lanes than multiprocessors, and steps that go on."""

from types import SimpleNamespace

import numpy as np
import pytest
from fenced import to_host
from sampling_chains import first_differences
from test_sample_token import begin, write_texts

from llmcli.kernels.phantom import Phantom
from llmcli.kernels.sample_token import NUM_RESULTS, ROW_SAMPLER, RowLayout, sample_token
from llmcli.lab.cases.sample_token import CHAINS, NUM_PROMPT_TOKENS, make_logits, make_prompts, make_sampler

cupy = pytest.importorskip("cupy")


@pytest.mark.parametrize(
    ("num_multiprocessors", "num_lanes", "num_blocks"),
    [(132, 64, 2), (132, 66, 2), (132, 67, 1), (132, 256, 1), (28, 60, 1)],
)
def test_all_lanes_take_one_launch(num_multiprocessors, num_lanes, num_blocks):
    """Blocks that wait for each other run at once; blocks with a row to themselves may be more."""
    launches = []
    card = SimpleNamespace(
        num_multiprocessors=num_multiprocessors, launch=lambda stem, name, **details: launches.append(details)
    )
    vocab_size, num_rows = 8000, 300
    shapes = {
        "logits": ((num_lanes, vocab_size), np.float32),
        "rows": ((num_lanes,), np.int32),
        "positions": ((num_lanes,), np.int32),
        "token_ids": ((num_rows,), np.int32),
        "history": ((num_rows, 9), np.int32),
        "state": ((num_rows, RowLayout(vocab_size).row_bytes), np.uint8),
        "results": ((num_rows, 2, NUM_RESULTS), np.uint64),
    }
    arrays = {name: Phantom(shape, dtype, 4096) for name, (shape, dtype) in shapes.items()}
    sample_token(card, **arrays)
    assert [launch["grid"] for launch in launches] == [(num_blocks, num_lanes)]
    assert launches[0]["arguments"][:7] == tuple(arrays.values())


@pytest.mark.cuda
def test_unused_lanes_are_neither_read_nor_written(device):
    vocab_size, num_steps, used = 32_000, 12, [1, 3, 4]
    samplers = [make_sampler(CHAINS[name], 1, 0) for name in ("default", "every step", "dry")]
    histories = make_prompts(3, vocab_size, 5)
    pool = make_logits(num_steps * 3, vocab_size, 1).reshape(num_steps, 3, vocab_size)
    expected = begin(device, samplers, histories, vocab_size, 100, lanes=[2, 0, 3])
    batch = begin(device, samplers, histories, vocab_size, 100, lanes=[2, 0, 3])
    for name, unused in (("rows", -1), ("positions", 2**30)):
        spread = cupy.full(6, unused, cupy.int32)
        spread[used] = getattr(batch, name)
        setattr(batch, name, spread)
    logits = cupy.full((6, vocab_size), np.nan, cupy.float32)
    for step in range(num_steps):
        expected.step(cupy.asarray(pool[step]))
        logits[used] = cupy.asarray(pool[step])
        batch.step(logits)
    np.testing.assert_array_equal(to_host(batch.history), to_host(expected.history))
    np.testing.assert_array_equal(to_host(batch.token_ids), to_host(expected.token_ids))
    np.testing.assert_array_equal(to_host(batch.positions)[used], to_host(expected.positions))
    assert (to_host(batch.positions)[[0, 2, 5]] == 2**30).all()


@pytest.mark.cuda
def test_more_rows_than_multiprocessors(device):
    vocab_size, num_steps, num_rows = 600, 5, 150
    settings = list(CHAINS.values())
    samplers = [make_sampler(settings[index % len(settings)], 3, index) for index in range(num_rows)]
    texts = write_texts(device, samplers, vocab_size, num_steps, lanes=list(range(num_rows))[::-1])
    assert all(len(text.history) == NUM_PROMPT_TOKENS + num_steps for text in texts)
    assert first_differences(texts) == []


@pytest.mark.cuda
def test_steps_go_on_from_the_headers(device):
    """Also past 2^32: the host sets where a row's steps begin."""
    batch = begin(device, [make_sampler({"temperature": 0}, 0)], [[1, 2]], 600, 20)
    header = batch.sampler._state[0, : ROW_SAMPLER.itemsize].get().view(ROW_SAMPLER)
    header["step"] = 2**32 - 2
    batch.sampler._state[0, : ROW_SAMPLER.itemsize] = cupy.asarray(header.view(np.uint8))
    logits = make_logits(3, 600, 0)
    for step in range(3):
        batch.step(cupy.asarray(logits[step : step + 1]))
    device.synchronize()
    for index, step in enumerate((2**32 - 1, 0, 1)):
        word = int(batch.sampler._results[0, 0, step % NUM_RESULTS])
        assert (word >> 32, word & 0xFFFFFFFF) == (step, int(logits[index].argmax()))
