"""The sampler's state on the card: packing, graphs that outlive samplers, tokens on the host, and the host's errors."""

import numpy as np
import pytest

from llmcli.errors import CheckpointError, DeviceError, UsageError
from llmcli.kernels.device import Device
from llmcli.kernels.sample_token import IS_BREAKER, IS_END, NUM_RESULTS
from llmcli.sampling.chain import choose
from llmcli.sampling.params import SamplingParams
from llmcli.sampling.sampler import Sampler

cupy = pytest.importorskip("cupy")
sampling = pytest.importorskip("llmcli.runners.cuda.sampling")

GREEDY = SamplingParams(temperature=0)
VOCAB_SIZE = 3000


def test_packing_keeps_every_parameter():
    params = SamplingParams(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, typical_p=0.8, xtc_probability=0.3, xtc_threshold=0.2,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=-0.3, penalty_window=5, dry_multiplier=2,
        dry_base=3, dry_allowed_length=4, dry_window=6, min_new_tokens=8,
    )  # fmt: skip
    sampler = Sampler(
        params, seed=2**64 - 1, sample_index=2**32 - 1, num_prompt_tokens=9, eos_token_ids=frozenset({1, 50}),
        ignore_eos=True, logit_bias={2: -np.inf, 3: 1.5, 60: 1.0}, dry_breaker_token_ids=frozenset({1, 4}),
    )  # fmt: skip
    header, bias, marks = sampling.pack_sampler(sampler, 10)
    packed = header[0]
    for name in (
        "temperature", "top_k", "top_p", "typical_p", "xtc_probability", "xtc_threshold", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "penalty_window", "dry_allowed_length", "dry_window", "min_new_tokens",
    ):  # fmt: skip
        assert packed[name] == getattr(params, name)
    assert packed["log_min_p"] == np.log(0.1)
    assert (packed["seed"], packed["sample_index"], packed["num_prompt_tokens"]) == (2**64 - 1, 2**32 - 1, 9)
    np.testing.assert_array_equal(packed["dry_amounts"][:4], [-2, -6, -18, -54])
    assert [packed[name] for name in ("uses_dry", "uses_bias", "uses_ends", "ignores_ends", "step")] == [1, 1, 1, 1, 0]
    np.testing.assert_array_equal(bias, [0, 0, -np.inf, 1.5, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(marks, [0, IS_END | IS_BREAKER, 0, 0, IS_BREAKER, 0, 0, 0, 0, 0])


def test_packing_leaves_out_what_is_off_and_bounds_what_is_huge():
    header, bias, marks = sampling.pack_sampler(Sampler(SamplingParams(top_k=10**20, min_new_tokens=10**20), 0), 10)
    assert bias is None
    assert marks is None
    assert header[0]["log_min_p"] == -np.inf
    assert header[0]["top_k"] == header[0]["min_new_tokens"] > 2**30
    # DRY looks at the marks of all tokens.
    assert not sampling.pack_sampler(Sampler(SamplingParams(dry_multiplier=1), 0), 10).marks.any()


def host_error(logits, sampler, position):
    with pytest.raises((CheckpointError, UsageError)) as error:
        choose(logits, [0] * position, sampler)
    return error.value


EOS = frozenset({1, 2})
PROBLEMS = [
    ([0, np.nan, np.inf], Sampler(GREEDY, 0), 1),
    ([0, np.inf, 1], Sampler(SamplingParams(), 0), 2),
    ([-np.inf] * 3, Sampler(SamplingParams(), 0), 3),
    ([-np.inf] * 3, Sampler(SamplingParams(), 0, logit_bias={0: -np.inf}, eos_token_ids=EOS, ignore_eos=True), 3),
    ([0, -np.inf, 2], Sampler(SamplingParams(), 0, logit_bias={0: -np.inf, 2: -np.inf}), 4),
    ([-np.inf, 1, 2], Sampler(GREEDY, 0, eos_token_ids=EOS, ignore_eos=True), 5),
    ([0, 1, 2], Sampler(SamplingParams(min_new_tokens=9), 0, logit_bias={0: -np.inf}, eos_token_ids=EOS), 5),
]


@pytest.mark.parametrize(("logits", "sampler", "problem"), PROBLEMS)
def test_problems_raise_what_the_host_raises(logits, sampler, problem):
    expected = host_error(np.asarray(logits, np.float32), sampler, 6)
    with pytest.raises(type(expected)) as error:
        sampling.raise_problem(problem, 6)
    assert str(error.value) == str(expected)


@pytest.fixture(scope="module")
def opened_device():
    return Device.open(0)


@pytest.fixture
def device(opened_device):
    opened_device.activate()
    with opened_device.stream:
        yield opened_device
    opened_device.synchronize()


class Rows:
    """Rows on the card and what a step needs of them."""

    def __init__(self, device, num_rows, vocab_size=VOCAB_SIZE, max_seq_len=200):
        self.sampler = sampling.DeviceSampler(device, num_rows, vocab_size)
        self.rows = cupy.arange(num_rows, dtype=cupy.int32)
        self.positions = cupy.zeros(num_rows, cupy.int32)
        self.token_ids = cupy.zeros(num_rows, cupy.int32)
        self.history = cupy.zeros((num_rows, max_seq_len), cupy.int32)
        self.logits = cupy.zeros((num_rows, vocab_size), cupy.float32)

    def enqueue(self):
        self.sampler.enqueue(
            logits=self.logits, rows=self.rows, positions=self.positions, token_ids=self.token_ids,
            history=self.history,
        )  # fmt: skip


@pytest.mark.cuda
def test_one_graph_serves_any_samplers_and_the_host_sees_each_token(device):
    rows = Rows(device, 2)
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((2, VOCAB_SIZE)) * 3).astype(np.float32)
    rows.logits.set(logits)
    device.synchronize()
    device.stream.begin_capture()
    rows.enqueue()
    graph = device.stream.end_capture()
    histories = [[0], [0]]
    chains = [
        (GREEDY, SamplingParams(repetition_penalty=1.3, top_k=5)),
        (SamplingParams(min_p=0.1, dry_multiplier=1), SamplingParams(typical_p=0.5)),
        (SamplingParams(xtc_probability=1, temperature=2, top_p=1), GREEDY),
    ]
    for seed, chain in enumerate(chains):
        samplers = [Sampler(params, seed, logit_bias={7: 1.0} if seed == 1 else {}) for params in chain]
        rows.sampler.set_samplers([0, 1], samplers)
        assert not rows.sampler.has_result(0, 1)
        for step in range(1, 2 * NUM_RESULTS):
            graph.launch(device.stream)
            for row, (sampler, history) in enumerate(zip(samplers, histories, strict=True)):
                token_id = rows.sampler.wait(row, step, len(history))
                assert token_id == choose(logits[row], history, sampler).token_id
                history.append(token_id)
    device.synchronize()
    for row, history in enumerate(histories):
        assert rows.history.get()[row, : len(history)].tolist() == history
        assert int(rows.positions[row]) == len(history) - 1
        assert int(rows.token_ids[row]) == history[-1]


@pytest.mark.cuda
def test_the_last_results_are_kept_for_a_host_that_is_behind(device):
    rows = Rows(device, 1)
    rows.logits.set(np.random.default_rng(4).standard_normal((1, VOCAB_SIZE)).astype(np.float32))
    rows.sampler.set_samplers([0], [Sampler(SamplingParams(temperature=3), 0)])
    for _ in range(NUM_RESULTS):
        rows.enqueue()
    tokens = [rows.sampler.wait(0, step, step) for step in range(1, NUM_RESULTS + 1)]
    device.synchronize()
    assert rows.history.get()[0, 1 : NUM_RESULTS + 1].tolist() == tokens


@pytest.mark.cuda
@pytest.mark.parametrize(("logits", "sampler", "problem"), PROBLEMS)
def test_a_problem_stops_its_row_and_no_other(device, logits, sampler, problem):
    rows = Rows(device, 2, vocab_size=3)
    logits = np.asarray([logits, [0, 1, 0]], np.float32)
    rows.logits.set(logits)
    rows.positions.set(np.asarray([3, 3], np.int32))
    rows.sampler.set_samplers([0, 1], [sampler, Sampler(GREEDY, 0)])
    for step in (1, 2):
        rows.enqueue()
        expected = host_error(logits[0], sampler, 4)
        with pytest.raises(type(expected)) as error:
            rows.sampler.wait(0, step, 4)
        assert str(error.value) == str(expected)
        assert rows.sampler.wait(1, step, 3 + step) == 1
    assert rows.positions.get().tolist() == [3, 5]
    assert rows.history.get()[0].max() == 0
    # The row is as good as before once its logits are.
    rows.logits.set(np.asarray([[0, 5, 1], [0, 1, 0]], np.float32))
    rows.sampler.set_samplers([0], [Sampler(GREEDY, 0)])
    rows.enqueue()
    assert rows.sampler.wait(0, 1, 4) == 1


@pytest.mark.cuda
def test_a_token_that_never_comes_is_an_error(device):
    rows = Rows(device, 1)
    rows.sampler.set_samplers([0], [Sampler(GREEDY, 0)])
    with pytest.raises(DeviceError, match="without sampling step 1 of row 0"):
        rows.sampler.wait(0, 1, 1)
