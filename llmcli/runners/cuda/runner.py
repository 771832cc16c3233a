"""`CudaRunner`: the `Runner` protocol over one card."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from llmcli.config.llama import LlamaConfig
from llmcli.runners.base import AllLogits, Logits
from llmcli.runners.cuda.arena import copy, fetch
from llmcli.runners.cuda.decode import Decoder, DecodeRun
from llmcli.runners.cuda.forward import Forward
from llmcli.runners.cuda.rows import Row, common_prefix
from llmcli.sampling.sampler import Sampler

# Tokens whose logits are handed to the host at once, by `score`.
SCORE_CHUNK = 256


class CudaRunner:
    """LLaMA on a card. See `llmcli.runners.base.Runner` for the contract; `load.load` builds one.

    Decode works one step ahead of what it yields, so a running decode (`_run`) holds the truth about its rows' logits.
    Every operation that touches rows settles it first: the step ahead is dropped, and the logits after the last token
    that was yielded, which it has not overwritten, go back to their rows. A decode that is asked to go on after that
    starts again from its rows.
    Rounding: a token that is run alone goes through the decode kernels, several go through the prefill kernels. So
    what is computed again after a roll-back into an answer has the bits it had.
    """

    def __init__(
        self,
        forward: Forward,
        decoder: Decoder,
        rows: Sequence[Row],
        *,
        max_seq_len: int,
        cache_type: str,
        description: str,
    ):
        self._forward = forward
        self._decoder = decoder
        self._device = forward.device
        self._rows = rows
        self._max_seq_len = max_seq_len
        self._cache_type = cache_type
        self._description = description
        self._run: DecodeRun | None = None

    @property
    def config(self) -> LlamaConfig:
        """The shape of the loaded model."""
        return self._forward.config

    @property
    def description(self) -> str:
        """Card and precision for the user."""
        return self._description

    @property
    def cache_type(self) -> str:
        """Type of the KV cache's elements."""
        return self._cache_type

    @property
    def num_rows(self) -> int:
        """Rows that can be decoded side by side."""
        return len(self._rows)

    @property
    def max_seq_len(self) -> int:
        """Tokens a row can hold."""
        return self._max_seq_len

    def token_ids(self, row: int) -> Sequence[int]:
        """The row's tokens."""
        return self._rows[row].token_ids

    def prefill(self, row: int, token_ids: Sequence[int]) -> Generator[int, None, None]:
        """Make the row hold exactly `token_ids`, in chunks; see `Runner.prefill`."""
        self._check(token_ids)
        return self._prefill(self._rows[row], list(token_ids))

    def _prefill(self, row: Row, token_ids: list[int]) -> Generator[int, None, None]:
        self._settle()
        start = min(common_prefix(row.token_ids[: row.num_cached], token_ids), len(token_ids) - 1)
        row.keep(start)
        yield 0
        chunk = self._forward.chunk_tokens
        for begin in range(start, len(token_ids), chunk):
            self._settle()
            part = token_ids[begin : begin + chunk]
            if begin + chunk < len(token_ids):
                self._compute(row, part, logits=None)
            else:
                row.prefill_end = 0  # its buffer is about to be overwritten
                self._compute(row, part, logits=row.prefill_buffer)
                row.prefill_end = len(token_ids)
            yield len(row.token_ids) - start

    def decode(self, rows: Sequence[int], samplers: Sequence[Sampler]) -> Generator[list[int], None, None]:
        """Sample, append and yield one token per row, again and again; see `Runner.decode`."""
        if len(set(rows)) != len(rows) or len(rows) != len(samplers):
            raise ValueError(f"decode of rows {list(rows)} with {len(samplers)} samplers")
        if not all(self._rows[row].token_ids for row in rows):
            raise ValueError("decode of an empty row")
        return self._decode([self._rows[row] for row in rows], samplers)

    def _decode(self, rows: Sequence[Row], samplers: Sequence[Sampler]) -> Generator[list[int], None, None]:
        run: DecodeRun | None = None
        try:
            while all(len(row.token_ids) < self._max_seq_len for row in rows):
                if run is None or self._run is not run:
                    self._settle()
                    for row in rows:
                        self._make_logits_ready(row)
                    if run is not None:
                        samplers = run.samplers_to_go_on()
                    run = self._run = self._decoder.begin(rows, samplers)
                yield run.next_tokens()
        finally:
            if run is not None and self._run is run:
                self._settle()

    def mirostat_mu(self, row: int) -> float | None:
        """Mirostat's state after the row's last choice; see `Runner.mirostat_mu`."""
        return self._rows[row].mirostat_mu

    def logits(self, row: int) -> Logits:
        """Logits [vocab_size] float32 of the token that would follow the row's last."""
        this = self._rows[row]
        running = self._run.logits_of(this) if self._run is not None else None
        if running is None:
            self._make_logits_ready(this)
            running = this.logits
        return fetch(self._device, running)

    def score(self, row: int, token_ids: Sequence[int], first: int) -> Generator[AllLogits, None, None]:
        """Yield the logits that predict token_ids[first:]; see `Runner.score`."""
        self._check(token_ids)
        if not 0 < first < len(token_ids):
            raise ValueError(f"score from {first}, expected 1 to {len(token_ids) - 1}")
        return self._score(self._rows[row], list(token_ids[:-1]), first)

    def _score(self, row: Row, token_ids: list[int], first: int) -> Generator[AllLogits, None, None]:
        self._settle()
        row.truncate(0)
        chunk = min(self._forward.chunk_tokens, SCORE_CHUNK)
        for begin in range(0, len(token_ids), chunk):
            self._settle()
            part = token_ids[begin : begin + chunk]
            self._compute(row, part, logits=None)
            if begin + len(part) >= first:
                yield self._forward.logits_of_chunk(max(first - 1 - begin, 0), len(part))

    def truncate(self, row: int, num_tokens: int) -> None:
        """Roll the row back to its first `num_tokens` tokens."""
        self._settle()
        if not 0 <= num_tokens <= len(self._rows[row].token_ids):
            raise ValueError(f"truncate to {num_tokens} of {len(self._rows[row].token_ids)} tokens")
        self._rows[row].truncate(num_tokens)

    def copy_row(self, source: int, target: int) -> None:
        """Make `target` hold the tokens of `source` without computing them again."""
        if source == target:
            return
        self._settle()
        origin, other = self._rows[source], self._rows[target]
        other.truncate(0)
        self._forward.copy_cache(origin.index, other.index, origin.num_cached)
        copy(self._device, other.prefill_buffer, origin.prefill_buffer)
        copy(self._device, other.decode_buffer, origin.decode_buffer)
        other.become(origin)

    def _make_logits_ready(self, row: Row) -> None:
        if row.logits is None:
            row.num_cached = min(row.num_cached, len(row.token_ids) - 1)
            self._compute(row, [], logits=row.decode_buffer)

    def _compute(self, row: Row, new_token_ids: list[int], logits: Any) -> None:
        """Run the row's waiting tokens and the new ones; the row changes when the card is done with them.

        Shapes: logits float32 [vocab_size] on the card, to be filled, or None
        """
        waiting = row.token_ids[row.num_cached :] + new_token_ids
        self._forward.run(row.index, row.num_cached, waiting, logits)
        self._device.synchronize()
        row.append_computed(new_token_ids, logits)

    def _settle(self) -> None:
        """End the decode that is under way, if there is one; its rows then hold what it has yielded."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _check(self, token_ids: Sequence[int]) -> None:
        if not 0 < len(token_ids) <= self._max_seq_len:
            raise ValueError(f"prefill of {len(token_ids)} tokens, expected 1 to {self._max_seq_len}")
        if not all(0 <= token_id < self.config.vocab_size for token_id in token_ids):
            raise ValueError(f"token id outside the vocabulary of {self.config.vocab_size}")
