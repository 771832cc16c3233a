"""Masks on the card: each choice has its own, and they exclude what the host excludes."""

import numpy as np
import pytest

from llmcli.errors import UsageError
from llmcli.sampling.candidates import pack_mask
from llmcli.sampling.chain import choose
from llmcli.sampling.params import Sampler, SamplingParams

pytest.importorskip("cupy")
sampling = pytest.importorskip("llmcli.runners.cuda.step.sampling")

from sampler_rows import VOCAB_SIZE, Rows  # noqa: E402

GREEDY = SamplingParams(temperature=0)


def test_a_mask_that_leaves_no_token_raises_what_the_host_raises():
    with pytest.raises(UsageError) as expected:
        choose(np.zeros(3, np.float32), [0] * 4, Sampler(GREEDY, 0), mask=pack_mask(np.zeros(3, np.bool_)))
    with pytest.raises(UsageError) as error:
        sampling.raise_problem(4, 4)
    assert str(error.value) == str(expected.value)


@pytest.mark.cuda
def test_masks_come_and_go(device):
    """One graph; a mask is sent after queued runs, one slot has another than the other, and a new row has none."""
    rows = Rows(device, 2)
    rng = np.random.default_rng(6)
    logits = (rng.standard_normal((2, VOCAB_SIZE)) * 3).astype(np.float32)
    rows.logits.set(logits)
    device.synchronize()
    device.stream.begin_capture()
    rows.enqueue()
    graph = device.stream.end_capture()
    samplers = [Sampler(params, 5) for params in (SamplingParams(temperature=1.5, top_p=1), GREEDY)]
    histories = [[0], [0]]
    for slot, sampler in enumerate(samplers):
        rows.sampler.set_sampler(slot, sampler)
    for first in range(0, 40, 8):
        runs, masks = [], []
        for step in range(first, first + 8):  # all queued before the first is read
            of_step = [pack_mask(rng.random(VOCAB_SIZE) < 0.01) if rng.random() < 0.6 else None for _ in range(2)]
            if step == 20:
                rows.sampler.set_sampler(1, samplers[1])
                of_step[1] = None
            for slot, mask in enumerate(of_step):
                rows.sampler.allow(slot, mask)
            graph.launch(device.stream)
            runs.append([rows.sampler.count_run(slot) for slot in range(2)])
            masks.append(of_step)
        for of_step, numbers in zip(masks, runs, strict=True):
            for slot, (sampler, history) in enumerate(zip(samplers, histories, strict=True)):
                token_id = rows.sampler.wait(slot, numbers[slot], len(history))
                assert token_id == choose(logits[slot], history, sampler, mask=of_step[slot]).token_id
                history.append(token_id)
    rows.sampler.allow(0, pack_mask(np.zeros(VOCAB_SIZE, np.bool_)))
    first, second = rows.run()
    with pytest.raises(UsageError, match="excludes every token"):
        rows.sampler.wait(0, first, len(histories[0]))
    assert rows.sampler.wait(1, second, len(histories[1])) >= 0


def test_masks_of_slots_side_by_side_go_together():
    copies = []

    class Mailbox:
        def send(self, target, source):
            target[:] = source.view(np.uint8)

        def send_rows(self, target, sources):
            copies.append(len(sources))
            target[:] = [source.view(np.uint8) for source in sources]

    sampler = object.__new__(sampling.DeviceSampler)
    layout = sampler._layout = sampling.RowLayout(100)
    state = sampler._state = np.zeros((9, layout.row_bytes), np.uint8)
    sampler._mailbox, sampler._masked = Mailbox(), set()
    masks = {slot: np.random.default_rng(slot).integers(1, 2**32, 4, np.uint32) for slot in (7, 0, 1, 2, 5, 8)}
    sampler.allow_all(masks)
    sampler.allow(5, None)
    sampler.allow(4, masks[1])
    assert copies == [3, 1, 2, 1]
    masks[4] = masks[1]
    uses = state[:, layout.uses_mask_start : layout.uses_mask_start + 4].view(np.int32).ravel()
    assert uses.tolist() == [1, 1, 1, 0, 1, 0, 0, 1, 1]
    for slot in range(9):
        held = state[slot, layout.mask_start : layout.mask_start + 16].view(np.uint32).tolist()
        assert held == (masks[slot].tolist() if slot in masks else [0] * 4)
