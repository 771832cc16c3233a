"""Launches sample_token.cu, the sampler chain on the card, and defines the layout of each row's state."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from llmcli.kernels.arguments import Array, check
from llmcli.kernels.launches import Launcher
from llmcli.kernels.spec import KernelCost, KernelSpec

NAME = "sample_token"
SPEC = KernelSpec("sample_token", "sampler chain, from logits to the next token", (NAME,))

BLOCK_SIZE = 512
MAX_BLOCKS = 32  # of a row; more wait longer for each other than they save
TOKENS_PER_BLOCK = 2048  # with fewer a block only waits
MAX_VOCAB_SIZE = 2**19  # the sums of probabilities have 64 bits

NUM_DRY_AMOUNTS = 65
NUM_RESULTS = 16  # results that a row keeps for the host, one of each of its last runs
IS_PROBLEM = 1 << 31  # in the low half of a result: the rest is the number of a problem, else it is the token id

IS_END, IS_BREAKER, IS_SUPPRESSED, IS_FORCED = 1, 2, 4, 8  # in a token's mark

# Token ids of all sequences with a bias. 8,192 are a list of two thousand phrases of four tokens; their tables take
# 160 KiB of a row's state (3.1 MiB at a vocabulary of 128,256), and each step looks at all of them.
MAX_SEQUENCE_IDS = 8192

# enum Step of kernels/common/sample_state.cuh, from 1: how the header names the steps at a temperature above 0.
STEPS = (
    "temperature", "top_n_sigma", "top_k", "top_p", "min_p", "typical_p", "xtc", "mirostat", "text_surprise",
)  # fmt: skip
MAX_STEPS = 16

# struct Sequence of the same file
SEQUENCE = np.dtype([("bias", np.float64), ("token_id", np.int32), ("ids_begin", np.int32)], align=True)

# struct RowSampler of the same file
_DOUBLES = (
    "temperature dynatemp_low dynatemp_high dynatemp_exponent top_n_sigma top_p log_min_p typical_p xtc_probability "
    "xtc_threshold mirostat_tau mirostat_eta mirostat_mu encoder_repetition_penalty repetition_penalty "
    "presence_penalty frequency_penalty"
)
_INTS = (
    "top_k penalty_window num_prompt_tokens min_new_tokens dry_window dry_allowed_length uses_dry uses_bias uses_ends "
    "ignores_ends suppresses_begin forced_position num_sequences uses_mask"
)
ROW_SAMPLER = np.dtype(
    [
        *((name, np.float64) for name in _DOUBLES.split()),
        ("dry_amounts", np.float64, NUM_DRY_AMOUNTS),
        ("seed", np.uint64),
        ("sample_index", np.uint32),
        *((name, np.int32) for name in _INTS.split()),
        ("step", np.uint32),
        ("steps", np.uint8, MAX_STEPS),
    ],
    align=True,
)


@dataclass(frozen=True)
class RowLayout:
    """The layout of one row's state, as struct Row of kernels/common/sample_state.cuh has it.

    The state starts with a ROW_SAMPLER. Everything that the host does not write is zero before the first run.
    Units: bytes

    Attributes:
        uses_mask_start: the ROW_SAMPLER's uses_mask
        sequences_start: up to MAX_SEQUENCE_IDS + 1 of SEQUENCE, by token id, the last with token id -1
        sequence_ids_start: up to MAX_SEQUENCE_IDS int32, the ids before each sequence's last
    """

    vocab_size: int

    uses_mask_start: ClassVar[int] = 720
    sequences_start: ClassVar[int] = 88320
    sequence_ids_start: ClassVar[int] = 219408
    _BEFORE_TOKENS: ClassVar[int] = 252288

    @property
    def bias_start(self) -> int:
        """A float64 for each token, after the 8 bytes of each token's key."""
        return self._BEFORE_TOKENS + 8 * self._num_tokens

    @property
    def marks_start(self) -> int:
        """A byte for each token, after keys, bias, and two tables of 4 bytes."""
        return self._BEFORE_TOKENS + 24 * self._num_tokens

    @property
    def mask_start(self) -> int:
        """A bit for each token, in words of 32, after the marks."""
        return self._BEFORE_TOKENS + 25 * self._num_tokens

    @property
    def row_bytes(self) -> int:
        """All of a row, padded so that the next begins with a line of its own."""
        return -(-(self.mask_start + -(-self.vocab_size // 32) * 4) // 128) * 128

    @property
    def _num_tokens(self) -> int:
        return -(-self.vocab_size // 16) * 16


def blocks_per_row(num_multiprocessors: int, num_tokens: int, vocab_size: int) -> int:
    """How many blocks share a row in a launch of `num_tokens` lanes.

    They wait for each other, so each must have a multiprocessor of its own. A block that has a row to itself waits for
    none, so there may be more of these than multiprocessors.
    """
    return max(1, min(MAX_BLOCKS, num_multiprocessors // num_tokens, -(-vocab_size // TOKENS_PER_BLOCK)))


def sample_token(
    device: Launcher,
    *,
    logits: Array,
    rows: Array,
    positions: Array,
    token_ids: Array,
    history: Array,
    state: Array,
    results: Array,
    next_row: Array | None = None,
    draft: Array | None = None,
) -> None:
    """Choose the token that follows each lane's row, append it to `history`, and advance `positions` and `token_ids`.

    A row whose logits or bans leave no token stays as it is. Row -1 marks an unused lane. `results` gets
    step << 32 | token id (or IS_PROBLEM | problem) at [row, 0, step % NUM_RESULTS]; the step is one more than the
    header's, which advances too. Before that, with mirostat, the bits of its next mu go to [row, 1, step %
    NUM_RESULTS].

    With `next_row` and `draft` there is one lane, and the next one of its row runs a draft: `next_row` becomes -1
    unless the draft is chosen. So a chain of calls chooses after each draft until one is wrong.

    Shapes: logits [num_tokens, vocab_size] float32; rows, positions [num_tokens] int32, rows all different but for -1;
    token_ids [num_rows] int32; history [num_rows, max_seq_len] int32; state [num_rows, row_bytes] uint8, see
    RowLayout; results [num_rows, 2, NUM_RESULTS] uint64, host memory that the card can write;
    next_row, draft [1] int32
    """
    num_tokens, vocab_size = logits.shape
    num_rows, max_seq_len = history.shape
    row_bytes = RowLayout(vocab_size).row_bytes
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"sample_token: a vocabulary of {vocab_size}, {MAX_VOCAB_SIZE} is the most")
    alignment = 4 if vocab_size % 4 else 16
    check(NAME, "logits", logits, dtype=np.float32, shape=(num_tokens, vocab_size), aligned=alignment)
    for name, array, size in (
        ("rows", rows, num_tokens),
        ("positions", positions, num_tokens),
        ("token_ids", token_ids, num_rows),
    ):
        check(NAME, name, array, dtype=np.int32, shape=(size,), aligned=4)
    check(NAME, "history", history, dtype=np.int32, shape=(num_rows, max_seq_len), aligned=4)
    check(NAME, "state", state, dtype=np.uint8, shape=(num_rows, row_bytes), aligned=128)
    check(NAME, "results", results, dtype=np.uint64, shape=(num_rows, 2, NUM_RESULTS))
    if next_row is not None and draft is not None:
        check(NAME, "next_row", next_row, dtype=np.int32, shape=(1,), aligned=4)
        check(NAME, "draft", draft, dtype=np.int32, shape=(1,), aligned=4)
        if num_tokens != 1:
            raise ValueError(f"sample_token: {num_tokens} lanes with a draft, 1 is the most")
    device.launch(
        SPEC.stem,
        NAME,
        grid=(blocks_per_row(device.num_multiprocessors, num_tokens, vocab_size), num_tokens),
        block=BLOCK_SIZE,
        arguments=(
            logits, rows, positions, token_ids, history, state, results, next_row, draft,
            np.int32(vocab_size), np.int32(max_seq_len), np.uint64(row_bytes),
        ),
        overlaps=True,
        cost=partial(sample_token_cost, num_tokens, vocab_size),
    )  # fmt: skip


def sample_token_cost(num_tokens: int, vocab_size: int) -> KernelCost:
    """What a greedy launch moves: the logits. At a temperature above 0 it also writes a key of 8 bytes for each."""
    return KernelCost(num_tokens * 4 * vocab_size, 0, 0)
