"""The sampler chain on the card against the host's: 10,000 tokens of each chain, batches, ties, errors, determinism."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fenced import fenced, to_host
from sampling_chains import Text, first_differences, go_on

from llmcli.kernels.compiler import compile_kernels
from llmcli.kernels.sample_token import (
    BLOCK_SIZE,
    IS_BREAKER,
    IS_END,
    IS_FORCED,
    IS_PROBLEM,
    IS_SUPPRESSED,
    MAX_BLOCKS,
    MAX_SEQUENCE_IDS,
    MAX_STEPS,
    NUM_DRY_AMOUNTS,
    NUM_RESULTS,
    ROW_SAMPLER,
    SEQUENCE,
    STEPS,
    RowLayout,
    blocks_per_row,
    sample_token,
)
from llmcli.kernels.sources import flatten
from llmcli.lab.cases.sample_token import CHAINS, NUM_PROMPT_TOKENS, chains_for, make_logits, make_prompts, make_sampler
from llmcli.runners.cuda.step.packed_sampler import pack_sampler
from llmcli.sampling.chain import choose
from llmcli.sampling.params import Sampler, SamplingParams

cupy = pytest.importorskip("cupy")
arena = pytest.importorskip("llmcli.runners.cuda.step.arena")
device_sampling = pytest.importorskip("llmcli.runners.cuda.step.sampling")

POOL_SEED = 7


@dataclass
class Batch:
    """Rows on the card; `lanes` gives the row slot of each in the batch."""

    sampler: Any
    lanes: list[int]
    rows: Any
    positions: Any
    token_ids: Any
    history: Any

    def step(self, logits: Any) -> None:
        self.sampler.enqueue(logits=logits, rows=self.rows, positions=self.positions)

    def texts(self) -> list[np.ndarray]:
        history, positions = to_host(self.history), to_host(self.positions)
        return [history[row, : end + 1] for row, end in zip(self.lanes, positions, strict=True)]


def begin(device, samplers, histories, vocab_size, max_seq_len, lanes=None, num_rows=None) -> Batch:
    lanes = list(range(len(samplers))) if lanes is None else lanes
    num_rows = num_rows or max(lanes) + 1
    mailbox = arena.Mailbox(device, 2**20)
    history = np.full((num_rows, max_seq_len), -1, np.int32)
    for row, tokens in zip(lanes, histories, strict=True):
        history[row, : len(tokens)] = tokens
    token_ids, on_card = cupy.full(num_rows, -1, cupy.int32), cupy.asarray(history)
    device_sampler = device_sampling.DeviceSampler(device, vocab_size, mailbox, token_ids, on_card)
    for lane, sampler in zip(lanes, samplers, strict=True):
        device_sampler.set_sampler(lane, sampler)
    positions = cupy.asarray([len(tokens) - 1 for tokens in histories], cupy.int32)
    return Batch(device_sampler, lanes, cupy.asarray(lanes, cupy.int32), positions, token_ids, on_card)


def write_texts(device, samplers, vocab_size, num_steps, lanes=None) -> list[Text]:
    """Let the card write `num_steps` tokens a row, with logits that move on through one pool."""
    num_rows = len(samplers)
    num_pool_rows = 48
    pool = make_logits(num_pool_rows, vocab_size, POOL_SEED)
    on_card = cupy.asarray(np.resize(pool, (num_pool_rows + num_rows, vocab_size)))  # any `num_rows` from any row on
    histories = make_prompts(num_rows, vocab_size, 5)
    batch = begin(device, samplers, histories, vocab_size, NUM_PROMPT_TOKENS + num_steps, lanes)
    for step in range(num_steps):
        first = step % num_pool_rows
        batch.step(on_card[first : first + num_rows])
    return [
        Text(sampler, history, index, num_pool_rows, vocab_size, POOL_SEED)
        for index, (sampler, history) in enumerate(zip(samplers, batch.texts(), strict=True))
    ]


def test_the_parts_of_a_row_follow_each_other():
    layout = RowLayout(1001)
    assert layout.sequences_start % 16 == layout.sequence_ids_start % 16 == 0
    assert layout.sequence_ids_start == layout.sequences_start + (MAX_SEQUENCE_IDS + 1) * SEQUENCE.itemsize
    assert layout.bias_start >= layout.sequence_ids_start + 4 * MAX_SEQUENCE_IDS + 8 * 1008
    assert layout.bias_start % 8 == 0
    assert layout.row_bytes % 128 == 0
    assert layout.mask_start >= layout.marks_start + 1008
    assert layout.mask_start % 4 == 0
    assert layout.row_bytes >= layout.mask_start + 4 * 32  # words for 1001 bits
    assert layout.uses_mask_start == ROW_SAMPLER.fields["uses_mask"][1]


@pytest.mark.usefixtures("nvrtc")
def test_host_and_kernel_agree_on_names_sizes_and_places():
    claims = [f"sizeof(sampling::RowSampler) == {ROW_SAMPLER.itemsize}"]
    for struct, dtype in (("RowSampler", ROW_SAMPLER), ("Sequence", SEQUENCE)):
        for name in dtype.names:
            field, offset = dtype.fields[name][:2]
            # NVRTC has no offsetof.
            claims.append(f"__INTADDR__(&((sampling::{struct}*)0)->{name}) == {offset}")
            claims.append(f"sizeof(sampling::{struct}::{name}) == {field.itemsize}")
    claims += [f"sampling::{name.upper()} == {code}" for code, name in enumerate(STEPS, 1)]
    numbers = {
        "MAX_STEPS": MAX_STEPS, "MAX_SEQUENCE_IDS": MAX_SEQUENCE_IDS, "NUM_RESULTS": NUM_RESULTS,
        "NUM_DRY_AMOUNTS": NUM_DRY_AMOUNTS, "BLOCK_SIZE": BLOCK_SIZE, "IS_PROBLEM": IS_PROBLEM, "IS_END": IS_END,
        "IS_BREAKER": IS_BREAKER, "IS_SUPPRESSED": IS_SUPPRESSED, "IS_FORCED": IS_FORCED,
        "Row::SEQUENCES": RowLayout.sequences_start, "Row::SEQUENCE_IDS": RowLayout.sequence_ids_start,
        "Row::TOKENS": RowLayout(16).bias_start - 8 * 16,
    }  # fmt: skip
    claims += [f"sampling::{name} == {number}" for name, number in numbers.items()]
    assert MAX_BLOCKS <= 64
    source = flatten("sample_token") + "".join(f'static_assert({claim}, "");\n' for claim in claims)
    compile_kernels(source, "sample_token", ["sample_token"], "sm_90")


@pytest.mark.parametrize(
    ("num_multiprocessors", "num_tokens", "vocab_size", "expected"),
    [(132, 1, 128_256, MAX_BLOCKS), (132, 8, 128_256, 16), (28, 8, 128_256, 3), (28, 1, 500, 1), (132, 64, 32_000, 2)],
)
def test_no_more_blocks_than_multiprocessors(num_multiprocessors, num_tokens, vocab_size, expected):
    assert blocks_per_row(num_multiprocessors, num_tokens, vocab_size) == expected


@pytest.mark.cuda
@pytest.mark.thorough
def test_ten_thousand_tokens_of_every_chain_are_the_hosts(device):
    texts = []
    for settings in CHAINS.values():
        samplers = [make_sampler(settings, 2**63 + row, row) for row in range(8)]
        texts += write_texts(device, samplers, 2500, 1250)
    assert all(len(text.history) == NUM_PROMPT_TOKENS + 1250 for text in texts)
    assert first_differences(texts) == []


@pytest.mark.cuda
@pytest.mark.parametrize("vocab_size", [1, 2, 33, 260, 512, 32_000, 128_256, 151_936, 152_064, 300_000])
def test_rows_of_all_chains_side_by_side(device, vocab_size):
    samplers = [make_sampler(settings, 99, index) for index, settings in enumerate(chains_for(vocab_size))]
    texts = []
    for begin_ in range(0, len(samplers), 8):
        texts += write_texts(device, samplers[begin_ : begin_ + 8], vocab_size, 40)
    assert first_differences(texts) == []


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name", [name for name, chain in CHAINS.items() if "mirostat_tau" in chain and chain.get("temperature") != 0]
)
def test_mu_over_200_steps_is_the_hosts(device, name):
    vocab_size, num_steps = 5000, 200
    pool = make_logits(24, vocab_size, 3)
    on_card = cupy.asarray(pool)
    sampler = make_sampler(CHAINS[name], 8)
    batch = begin(device, [sampler], make_prompts(1, vocab_size, 5), vocab_size, NUM_PROMPT_TOKENS + num_steps)
    for step in range(num_steps):
        history = batch.texts()[0]
        batch.step(on_card[step % 24 : step % 24 + 1])
        expected = choose(pool[step % 24], history, sampler)
        choice = batch.sampler.choice(0, step + 1, len(history))
        assert choice.token_id == expected.token_id
        assert choice.mirostat_mu == pytest.approx(expected.mirostat_mu, rel=1e-12, abs=1e-12)
        sampler = go_on(sampler, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_as_many_sequences_as_there_is_room_for(device, temperature):
    """Many with one last id, one for each token, one as long as the history and one longer."""
    vocab_size = 3000
    history = [4, 2, 9, 4, 2, 7]
    sequences = [((2, 7, 11), 0.1), ((7, 11), 1e-3), ((4, 2, 9, 4, 2, 7, 12), 2.0), ((1, 4, 2, 9, 4, 2, 7, 12), 50.0)]
    sequences += [((7, token_id), 0.001 * (token_id % 700)) for token_id in range(2500)]
    sequences += [((5 + index % 3, 13), 1e-5 * index) for index in range(1000)]
    sequences += [((index % 9, 11), -0.003) for index in range(500)] + [((20,), -np.inf), ((7, 21), -np.inf)]
    num_ids = sum(len(token_ids) for token_ids, _ in sequences)
    sequences.append((tuple([7] * (MAX_SEQUENCE_IDS - num_ids)), 3.0))
    settings = {"temperature": temperature, "sequence_bias": tuple(sequences)}
    logits = make_logits(6, vocab_size, 4)
    samplers = [make_sampler(settings, 5, index) for index in range(6)]
    batch = begin(device, samplers, [history] * 6, vocab_size, 9)
    batch.step(cupy.asarray(logits))
    for index, text in enumerate(batch.texts()):
        assert text[-1] == choose(logits[index], history, samplers[index]).token_id


@pytest.mark.cuda
def test_the_hosts_own_scene_of_every_step(device):
    sampler = make_sampler(CHAINS["every step"] | {"top_k": 30, "num_prompt_tokens": 5}, 42)
    history = [3, 17, 8, 30, 3, 2, 17, 8, 25, 30, 17, 8, 31, 6, 17, 8]
    logits = np.random.default_rng(7).standard_normal((1, 40)).astype(np.float32) * 1.5
    drawn = set()
    for sample_index in range(300):
        sampler = make_sampler(CHAINS["every step"] | {"top_k": 30, "num_prompt_tokens": 5}, 42, sample_index)
        batch = begin(device, [sampler], [history], 40, 100)
        batch.step(cupy.asarray(logits))
        token_id = batch.texts()[0][-1]
        assert token_id == choose(logits[0], history, sampler).token_id
        drawn.add(int(token_id))
    assert len(drawn) > 8


@pytest.mark.cuda
def test_a_row_alone_is_the_row_in_a_batch(device):
    """Alone it also has more blocks and another slot."""
    settings = list(CHAINS.values())[-5:]
    samplers = [make_sampler(chain, 3, index) for index, chain in enumerate(settings)]
    vocab_size, num_steps = 32_000, 30
    logits = cupy.asarray(make_logits(num_steps * len(samplers), vocab_size, 1).reshape(num_steps, -1, vocab_size))
    histories = make_prompts(len(samplers), vocab_size, 5)
    together = begin(device, samplers, histories, vocab_size, 100, lanes=[4, 0, 2, 1, 3])
    for step in range(num_steps):
        together.step(logits[step])
    for index, (sampler, history) in enumerate(zip(samplers, histories, strict=True)):
        alone = begin(device, [sampler], [history], vocab_size, 100, lanes=[1], num_rows=3)
        for step in range(num_steps):
            alone.step(logits[step, index : index + 1])
        np.testing.assert_array_equal(alone.texts()[0], together.texts()[index])


@pytest.mark.cuda
def test_ten_runs_draw_the_same(device):
    samplers = [make_sampler(CHAINS[name], 1, 0) for name in ("default", "typical_p and xtc", "every step", "dry")]
    runs = [np.stack([text.history for text in write_texts(device, samplers, 128_256, 20)]) for _ in range(10)]
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


def tied(kind: str, vocab_size: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    logits = np.zeros(vocab_size) if kind == "equal" else rng.choice([0.0, -1.0, -40.0], vocab_size)
    if kind == "all but one":
        logits = np.full(vocab_size, -3.0)
        logits[vocab_size // 2] = 9.0
    if kind == "300 alike":
        logits = np.full(vocab_size, -40.0)
        logits[rng.permutation(vocab_size)[:300]] = 2.0
    if kind == "far apart":
        logits = rng.standard_normal(vocab_size) * 1e37
    if kind == "nearly equal":
        logits = rng.standard_normal(vocab_size) * 1e-6
    return logits.astype(np.float32)


@pytest.mark.cuda
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["equal", "three values", "all but one", "300 alike", "far apart", "nearly equal"])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"top_p": 0.5},
        {"top_p": 0.9, "temperature": 0.3},
        {"top_p": 1e-9},
        {"top_p": 1 - 1e-6},
        {"top_k": 700},
        {"top_k": 45, "top_p": 0.9},
        {"typical_p": 0.5},
        {"xtc_probability": 1, "xtc_threshold": 1e-30},
        {"xtc_probability": 1, "xtc_threshold": 0.5},
        {"temperature": 1e-3},
        {"temperature": 1e300, "top_k": 9},
        {"top_k": 9000, "top_p": 0.999, "min_p": 1e-10, "typical_p": 0.95, "xtc_probability": 1},
        {"top_n_sigma": 1.0},
        {"top_n_sigma": 1e-9, "temperature": 1e-300},
        {"dynatemp_range": 1.0, "top_p": 0.9},
        {"mirostat_tau": 3.0, "mirostat_eta": 1.0},
        {"top_p": 0.5, "top_k": 9000, "order": ("top_p", "top_k", "temperature")},
        {"top_k": 9, "top_p": 0.5, "xtc_probability": 1, "order": ("xtc", "top_k", "top_p"), "top_n_sigma": 0},
        {"typical_p": 0.5, "top_p": 0.5, "top_k": 700, "order": ("typical_p", "top_p", "top_k", "temperature")},
    ],
    ids=str,
)
def test_ties_and_extremes(device, kind, settings):
    """Where one bin holds more than is compared in one go, the selection goes down to bits and ids."""
    vocab_size = 20_011
    logits = tied(kind, vocab_size)
    samplers = [make_sampler(settings, 5, index) for index in range(8)]
    batch = begin(device, samplers, [[1]] * 8, vocab_size, 9)
    batch.step(cupy.asarray(np.broadcast_to(logits, (8, vocab_size)).copy()))
    for sampler, text in zip(samplers, batch.texts(), strict=True):
        assert text[1] == choose(logits, [1], sampler).token_id


@pytest.mark.cuda
def test_a_long_history(device):
    """One long loop is the worst case of DRY, and a text of one token that of the counts."""
    max_seq_len = 30_000
    histories = [np.tile([4, 5, 6], 9_999), np.full(29_990, 9), np.arange(29_000) % 2500]
    samplers = [make_sampler(CHAINS["every step"] | {"dry_window": 0, "penalty_window": 0}, 1, i) for i in range(3)]
    logits = make_logits(3, 2500, 2)
    batch = begin(device, samplers, histories, 2500, max_seq_len)
    batch.step(cupy.asarray(logits))
    for index, text in enumerate(batch.texts()):
        assert text[-1] == choose(logits[index], histories[index], samplers[index]).token_id


@pytest.mark.cuda
@pytest.mark.parametrize(("dry_window", "expected"), [(10, 4), (0, 0)])
def test_dry_counts_no_repetition_beyond_its_window(device, dry_window, expected):
    """A loop of three goes on with 4; seven repeated tokens cost 0.016, all 27 of them more than 5."""
    settings = {"temperature": 0, "dry_multiplier": 0.001, "dry_window": dry_window}
    logits = np.zeros((1, 600), np.float32)
    logits[0, 4] = 5
    history = [4, 5, 6] * 10
    batch = begin(device, [make_sampler(settings, 0)], [history], 600, 40)
    batch.step(cupy.asarray(logits))
    assert batch.texts()[0][-1] == choose(logits[0], history, make_sampler(settings, 0)).token_id == expected


@pytest.mark.cuda
def test_only_the_next_place_is_written(device):
    vocab_size, max_seq_len = 3001, 12
    history = fenced((2, max_seq_len), np.int32)
    integers = {name: fenced(size, np.int32) for name, size in (("rows", 1), ("positions", 1), ("token_ids", 2))}
    state = fenced((2, RowLayout(vocab_size).row_bytes), np.uint8)
    results = fenced((2, 2, NUM_RESULTS), np.uint64)
    greedy = pack_sampler(Sampler(SamplingParams(temperature=0), 0), vocab_size).header
    state.array[:] = 0
    state.array[:, : ROW_SAMPLER.itemsize] = cupy.asarray(greedy.view(np.uint8))
    results.array[:] = 0
    history.array[1, :3] = cupy.asarray([5, 6, 7], cupy.int32)
    integers["rows"].array[:] = 1
    integers["positions"].array[:] = 2
    before = to_host(history.array)
    logits = make_logits(1, vocab_size, 0)
    sample_token(
        device, logits=cupy.asarray(logits), history=history.array, state=state.array, results=results.array,
        **{name: array.array for name, array in integers.items()},
    )  # fmt: skip
    for array in (history, state, results, *integers.values()):
        array.check()
    expected = int(logits.argmax())
    after = to_host(history.array)
    assert after[1, 3] == expected
    after[1, 3] = before[1, 3]
    np.testing.assert_array_equal(after, before)
    assert int(integers["positions"].array[0]) == 3
    assert to_host(integers["token_ids"].array).tolist() == [-1, expected]
    assert int(results.array[1, 0, 1]) == 1 << 32 | expected
    assert np.count_nonzero(to_host(results.array)) == 1


@pytest.mark.cuda
def test_a_full_row_tells_its_token_and_stays(device):
    sampler = make_sampler(CHAINS["temperature"], 1)
    batch = begin(device, [sampler], [[1, 2, 3]], 600, 4)
    logits = make_logits(1, 600, 0)
    for _ in range(2):
        batch.step(cupy.asarray(logits))
    history = to_host(batch.history)[0]
    assert to_host(batch.positions)[0] == 3
    assert batch.sampler.wait(0, 2, 4) == choose(logits[0], history, sampler).token_id
    assert to_host(batch.token_ids)[0] == history[3]


@pytest.mark.cuda
def test_wrong_arrays_are_refused(device):
    sampler = Sampler(make_sampler({}, 0).params, 0)
    batch = begin(device, [sampler], [[1]], 600, 9)
    with pytest.raises(ValueError, match=r"sample_token: state is \[1, .*\], expected \[1, "):
        batch.step(cupy.zeros((1, 700), cupy.float32))
    with pytest.raises(ValueError, match="sample_token: logits is float64, expected float32"):
        batch.step(cupy.zeros((1, 600), cupy.float64))
    with pytest.raises(ValueError, match="a vocabulary of 600000"):
        batch.step(cupy.zeros((1, 600_000), cupy.float32))
