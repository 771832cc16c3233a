"""Decoding, one step ahead: a step samples a token for each row, runs it, and leaves the logits of the next.

The host reads a token from pinned memory as soon as it is sampled and queues the next step while this one's forward
pass goes on. So when a caller stops, the card has sampled one token more than the caller has seen. Nothing is lost by
that: a step reads its logits from one of two buffers and writes the other, and the logits after the last token seen
are still where the step ahead has read them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmcli.kernels.device import device_errors
from llmcli.runners.cuda.arena import copy, send
from llmcli.runners.cuda.forward import Forward, Tokens
from llmcli.runners.cuda.rows import Row
from llmcli.runners.cuda.sampling import DeviceSampler
from llmcli.runners.cuda.workspace import MAX_BATCH, Workspace
from llmcli.sampling.sampler import Sampler


@dataclass(frozen=True)
class Batch:
    """Lanes `begin` ... `end` - 1 of the decode buffers: rows whose tokens are run together."""

    begin: int
    end: int


class Decoder:
    """Queues decode steps. A step of so many lanes is captured once as a graph for each buffer it may read.

    `uses_graphs=False` launches the same kernels one by one.
    Shapes: logits: two of float32 [num_rows, vocab_size]; lane_token_ids, lane_rows, lane_positions int32 [num_rows];
            history int32 [num_rows, max_seq_len]
    """

    def __init__(
        self, forward: Forward, sampler: DeviceSampler, workspace: Workspace[Any], *, uses_graphs: bool = True
    ):
        self.device = forward.device
        self.sampler = sampler
        self.logits = (workspace.even_logits, workspace.odd_logits)
        self._forward = forward
        self._tokens = Tokens(workspace.lane_token_ids, workspace.lane_rows, workspace.lane_positions)
        self._history = workspace.history
        self.max_seq_len = int(self._history.shape[1])
        self._uses_graphs = uses_graphs
        self._graphs: dict[tuple[Batch, int], Any] = {}

    def begin(self, rows: Sequence[Row], samplers: Sequence[Sampler]) -> "DecodeRun":
        """Put the rows into lanes and queue the first step. Each row has its logits and room for a token."""
        return DecodeRun(self, rows, samplers)

    def set_lanes(self, rows: Sequence[Row], samplers: Sequence[Sampler]) -> None:
        """Send what a run starts from: tokens, places and logits of every lane."""
        device = self.device
        self.sampler.set_samplers([row.index for row in rows], samplers)
        send(device, self._tokens.rows[: len(rows)], np.array([row.index for row in rows], np.int32))
        # A row whose sampler finds no token runs its last one again, in its place.
        send(device, self._tokens.token_ids[: len(rows)], np.array([row.token_ids[-1] for row in rows], np.int32))
        last = np.array([len(row.token_ids) - 1 for row in rows], np.int32)
        send(device, self._tokens.positions[: len(rows)], last)
        for lane, row in enumerate(rows):
            send(device, self._history[row.index][: len(row.token_ids)], np.array(row.token_ids, np.int32))
            copy(device, self.logits[0][lane], row.logits)

    def queue_step(self, num_lanes: int, parity: int) -> None:
        """Queue one step of every lane, which reads the logits of buffer `parity` and writes the other."""
        for batch in batches(num_lanes):
            if not self._uses_graphs:
                self._launch(batch, parity)
                continue
            graph = self._graphs.get((batch, parity))
            if graph is None:
                graph = self._graphs[batch, parity] = self._capture(batch, parity)
            with device_errors():
                graph.launch(self.device.stream)

    def _capture(self, batch: Batch, parity: int) -> Any:
        stream = self.device.stream
        with device_errors():
            stream.begin_capture()
            try:
                self._launch(batch, parity)
            finally:
                graph = stream.end_capture()
        return graph

    def _launch(self, batch: Batch, parity: int) -> None:
        lanes = slice(batch.begin, batch.end)
        tokens = Tokens(self._tokens.token_ids[lanes], self._tokens.rows[lanes], self._tokens.positions[lanes])
        self.sampler.enqueue(
            logits=self.logits[parity][lanes],
            rows=tokens.rows,
            positions=tokens.positions,
            token_ids=tokens.token_ids,
            history=self._history,
        )
        self._forward.run_batch(tokens)
        self._forward.project_logits(self._forward.hidden[: batch.end - batch.begin], self.logits[1 - parity][lanes])


class DecodeRun:
    """A decode of some rows that is under way. Between two tokens the rows hold what has been given out."""

    def __init__(self, decoder: Decoder, rows: Sequence[Row], samplers: Sequence[Sampler]):
        self._decoder = decoder
        self._rows = rows
        self._samplers = samplers
        self._lengths = [len(row.token_ids) for row in rows]
        self._room = decoder.max_seq_len - max(self._lengths)
        self._num_given = 0
        self._mus: list[float | None] = [None] * len(rows)
        decoder.set_lanes(rows, samplers)
        decoder.queue_step(len(rows), 0)

    def next_tokens(self) -> list[int]:
        """The next token of every row, which the rows then hold; the step after it is queued first.

        Raises: CheckpointError, UsageError as `llmcli.sampling.chain.choose`; DeviceError
        """
        step = self._num_given
        sampler = self._decoder.sampler
        token_ids = [
            sampler.wait(row.index, step + 1, length + step)
            for row, length in zip(self._rows, self._lengths, strict=True)
        ]
        if step + 1 < self._room:
            self._decoder.queue_step(len(self._rows), (step + 1) % 2)
        for row, token_id in zip(self._rows, token_ids, strict=True):
            row.token_ids.append(token_id)
            row.mirostat_mu = sampler.mirostat_mu(row.index, step + 1)
        self._mus = [row.mirostat_mu for row in self._rows]
        self._num_given = step + 1
        return token_ids

    def samplers_to_go_on(self) -> list[Sampler]:
        """The samplers with which another run goes on where this one stands: with its mirostat_mu where that is on."""
        return [
            sampler if mu is None else replace(sampler, mirostat_mu=mu)
            for sampler, mu in zip(self._samplers, self._mus, strict=True)
        ]

    def logits_of(self, row: Row) -> Any:
        """The logits after a row's last token where this run has computed them, else None."""
        if self._num_given == 0 or row not in self._rows:
            return None
        return self._decoder.logits[self._num_given % 2][self._rows.index(row)]

    def finish(self) -> None:
        """Wait for the card and leave the rows as they would be had no step been queued ahead. May be called again."""
        self._decoder.device.synchronize()
        for lane, (row, length) in enumerate(zip(self._rows, self._lengths, strict=True)):
            del row.token_ids[length + self._num_given :]
            if self._num_given:
                copy(self._decoder.device, row.decode_buffer, self._decoder.logits[self._num_given % 2][lane])
                row.num_cached, row.logits = len(row.token_ids), row.decode_buffer


def batches(num_lanes: int) -> Iterator[Batch]:
    """Lanes in groups that one pass over the weights serves."""
    for begin in range(0, num_lanes, MAX_BATCH):
        yield Batch(begin, min(begin + MAX_BATCH, num_lanes))
