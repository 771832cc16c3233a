"""`TorchRunner`: the `Runner` protocol over the plain torch model; rows are taken one at a time."""

from collections.abc import Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmcli.config.llama import LlamaConfig
from llmcli.errors import DeviceError
from llmcli.foreign_errors import foreign_errors_explained
from llmcli.runners.base import AllLogits, Logits
from llmcli.runners.torch.cache import RowCache
from llmcli.runners.torch.llama import Llama
from llmcli.sampling.chain import choose
from llmcli.sampling.sampler import Sampler

# Tokens per prefill step: wide enough for an efficient matrix product, small enough that a step is soon over.
PREFILL_CHUNK = 256


class _Row:
    """One sequence. `logits` are those after the last token, or None while tokens wait to be computed.

    Invariant: the first `num_cached` tokens have their keys and values in the cache; `logits` is set only if that is
    all of them.
    """

    def __init__(self, cache: RowCache):
        self.cache = cache
        self.token_ids: list[int] = []
        self.num_cached = 0
        self.logits: Logits | None = None
        self.mirostat_mu: float | None = None
        self.prefill_end = 0  # where the last prefill ended, and its logits: a sample starts again from there
        self.prefill_logits: Logits | None = None

    def truncate(self, num_tokens: int) -> None:
        if num_tokens == len(self.token_ids):
            return
        del self.token_ids[num_tokens:]
        if num_tokens == self.prefill_end:
            self.num_cached, self.logits = num_tokens, self.prefill_logits
        else:
            # The last token runs again, for its logits.
            self.num_cached, self.logits = min(self.num_cached, max(num_tokens - 1, 0)), None
        if num_tokens < self.prefill_end:
            self.prefill_end, self.prefill_logits = 0, None


class TorchRunner:
    """LLaMA on the CPU. See `llmcli.runners.base.Runner` for the contract; `load.load` builds one."""

    def __init__(self, llama: Llama, *, max_seq_len: int, num_rows: int, cache_type: str, description: str):
        self._llama = llama
        self._max_seq_len = max_seq_len
        self._cache_type = cache_type
        self._description = description
        self._rows = [_Row(RowCache(llama.config, max_seq_len, cache_type)) for _ in range(num_rows)]

    @property
    def config(self) -> LlamaConfig:
        """The shape of the loaded model."""
        return self._llama.config

    @property
    def description(self) -> str:
        """Device and precision for the user."""
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

    def _prefill(self, row: _Row, token_ids: list[int]) -> Generator[int, None, None]:
        start = min(_common_prefix(row.token_ids[: row.num_cached], token_ids), len(token_ids) - 1)
        row.truncate(start)
        row.num_cached, row.logits = min(row.num_cached, start), None
        yield 0
        for begin in range(start, len(token_ids), PREFILL_CHUNK):
            hidden = self._compute(row, token_ids[begin : begin + PREFILL_CHUNK])
            row.logits = self._logits(hidden[-1:])[0]
            row.prefill_end, row.prefill_logits = len(row.token_ids), row.logits
            yield len(row.token_ids) - start

    def decode(self, rows: Sequence[int], samplers: Sequence[Sampler]) -> Generator[list[int], None, None]:
        """Sample, append and yield one token per row, again and again; see `Runner.decode`."""
        if len(set(rows)) != len(rows) or len(rows) != len(samplers):
            raise ValueError(f"decode of rows {list(rows)} with {len(samplers)} samplers")
        if not all(self._rows[row].token_ids for row in rows):
            raise ValueError("decode of an empty row")
        return self._decode([self._rows[row] for row in rows], samplers)

    def _decode(self, rows: Sequence[_Row], samplers: Sequence[Sampler]) -> Generator[list[int], None, None]:
        samplers = list(samplers)
        while all(len(row.token_ids) < self._max_seq_len for row in rows):
            chosen = [
                choose(self._ready_logits(row), row.token_ids, sampler)
                for row, sampler in zip(rows, samplers, strict=True)
            ]
            for lane, (row, choice) in enumerate(zip(rows, chosen, strict=True)):
                row.logits = None
                row.token_ids.append(choice.token_id)
                row.mirostat_mu = choice.mirostat_mu
                if choice.mirostat_mu is not None:
                    samplers[lane] = replace(samplers[lane], mirostat_mu=choice.mirostat_mu)
            yield [choice.token_id for choice in chosen]

    def mirostat_mu(self, row: int) -> float | None:
        """Mirostat's state after the row's last choice; see `Runner.mirostat_mu`."""
        return self._rows[row].mirostat_mu

    def logits(self, row: int) -> Logits:
        """Logits [vocab_size] float32 of the token that would follow the row's last."""
        return self._ready_logits(self._rows[row])

    def score(self, row: int, token_ids: Sequence[int], first: int) -> Generator[AllLogits, None, None]:
        """Yield the logits that predict token_ids[first:]; see `Runner.score`."""
        self._check(token_ids)
        if not 0 < first < len(token_ids):
            raise ValueError(f"score from {first}, expected 1 to {len(token_ids) - 1}")
        return self._score(self._rows[row], list(token_ids[:-1]), first)

    def _score(self, row: _Row, token_ids: list[int], first: int) -> Generator[AllLogits, None, None]:
        row.truncate(0)
        for begin in range(0, len(token_ids), PREFILL_CHUNK):
            hidden = self._compute(row, token_ids[begin : begin + PREFILL_CHUNK])
            wanted = hidden[max(first - 1 - begin, 0) :]
            if len(wanted):
                yield self._logits(wanted)

    def truncate(self, row: int, num_tokens: int) -> None:
        """Roll the row back to its first `num_tokens` tokens."""
        if not 0 <= num_tokens <= len(self._rows[row].token_ids):
            raise ValueError(f"truncate to {num_tokens} of {len(self._rows[row].token_ids)} tokens")
        self._rows[row].truncate(num_tokens)

    def copy_row(self, source: int, target: int) -> None:
        """Make `target` hold the tokens of `source` without computing them again."""
        if source == target:
            return
        origin, copy = self._rows[source], self._rows[target]
        end = origin.num_cached
        copy.num_cached, copy.logits, copy.token_ids = 0, None, []
        copy.cache.copy_from(origin.cache, end)
        copy.token_ids = list(origin.token_ids)
        copy.num_cached, copy.logits = end, origin.logits
        copy.prefill_end, copy.prefill_logits = origin.prefill_end, origin.prefill_logits

    def _ready_logits(self, row: _Row) -> Logits:
        if row.logits is None:
            row.num_cached = min(row.num_cached, len(row.token_ids) - 1)  # after `score`, the last token runs again
            row.logits = self._logits(self._compute(row, [])[-1:])[0]
        return row.logits

    def _check(self, token_ids: Sequence[int]) -> None:
        if not 0 < len(token_ids) <= self._max_seq_len:
            raise ValueError(f"prefill of {len(token_ids)} tokens, expected 1 to {self._max_seq_len}")
        if not all(0 <= token_id < self.config.vocab_size for token_id in token_ids):
            raise ValueError(f"token id outside the vocabulary of {self.config.vocab_size}")

    @torch.inference_mode()
    def _compute(self, row: _Row, new_token_ids: list[int]) -> Tensor:
        """Run the row's waiting tokens and the new ones; the row changes last, so that an interrupt leaves it whole.

        Shapes: result [waiting and new tokens, hidden_size] float32
        """
        waiting = row.token_ids[row.num_cached :] + new_token_ids
        with foreign_errors_explained("running the model", DeviceError):
            hidden = self._llama.forward(torch.tensor(waiting, dtype=torch.int64), row.num_cached, row.cache)
        row.logits = None
        row.token_ids.extend(new_token_ids)
        row.num_cached = len(row.token_ids)
        return hidden

    @torch.inference_mode()
    def _logits(self, hidden: Tensor) -> AllLogits:
        """Shapes: hidden [num_tokens, hidden_size]; result [num_tokens, vocab_size] float32."""
        with foreign_errors_explained("running the model", DeviceError):
            logits: AllLogits = self._llama.logits(hidden).numpy()
        return logits


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading tokens that are equal."""
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length
