"""A `DeviceSampler` on a card, with its rows' data for a step."""

import pytest

cupy = pytest.importorskip("cupy")
arena = pytest.importorskip("llmcli.runners.cuda.step.arena")
sampling = pytest.importorskip("llmcli.runners.cuda.step.sampling")

VOCAB_SIZE = 3000
HALF_BYTES = 4096  # of a mailbox


class Rows:
    """Rows on the card, each in the slot of its number, and their data for a step."""

    def __init__(self, device, num_rows, vocab_size=VOCAB_SIZE, max_seq_len=300):
        mailbox = arena.Mailbox(device, HALF_BYTES)
        self.rows = cupy.arange(num_rows, dtype=cupy.int32)
        self.positions = cupy.zeros(num_rows, cupy.int32)
        self.token_ids = cupy.zeros(num_rows, cupy.int32)
        self.history = cupy.zeros((num_rows, max_seq_len), cupy.int32)
        self.logits = cupy.zeros((num_rows, vocab_size), cupy.float32)
        self.sampler = sampling.DeviceSampler(device, vocab_size, mailbox, self.token_ids, self.history)

    def enqueue(self):
        self.sampler.enqueue(logits=self.logits, rows=self.rows, positions=self.positions)

    def run(self):
        """Queue a run of every slot; returns their numbers."""
        self.enqueue()
        return [self.sampler.count_run(slot) for slot in range(len(self.rows))]
