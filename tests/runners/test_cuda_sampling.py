"""The sampler's state on the card: graphs that outlive samplers, tokens and mu on the host, and the host's errors."""

from dataclasses import replace

import numpy as np
import pytest

from llmcli.errors import CheckpointError, DeviceError, UsageError
from llmcli.kernels.device import Device
from llmcli.kernels.sample_token import NUM_RESULTS
from llmcli.sampling.chain import choose
from llmcli.sampling.params import SamplingParams
from llmcli.sampling.sampler import Sampler

cupy = pytest.importorskip("cupy")
sampling = pytest.importorskip("llmcli.runners.cuda.sampling")

GREEDY = SamplingParams(temperature=0)
VOCAB_SIZE = 3000


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
    ([-np.inf] * 3, Sampler(GREEDY, 0, forced_eos_token_ids=EOS, forced_eos_position=4), 3),
    ([0, -np.inf, 2], Sampler(SamplingParams(), 0, logit_bias={0: -np.inf, 2: -np.inf}), 4),
    ([0, -np.inf, 2], Sampler(GREEDY, 0, sequence_bias=(((0, 0), -np.inf), ((2,), 1.0), ((0, 2), -np.inf))), 5),
    ([0, 1, 2], Sampler(SamplingParams(), 0, logit_bias={1: -np.inf, 2: -np.inf}, sequence_bias=(((0,), -np.inf),)), 5),
    ([0, 1, -np.inf], Sampler(GREEDY, 0, num_prompt_tokens=4, begin_suppress_token_ids=frozenset({0, 1})), 6),
    (
        [0, 1, 2],
        Sampler(
            SamplingParams(), 0, num_prompt_tokens=4, begin_suppress_token_ids=EOS, sequence_bias=(((0, 0), -np.inf),)
        ),
        6,
    ),
    ([-np.inf, 1, 2], Sampler(GREEDY, 0, eos_token_ids=EOS, ignore_eos=True), 7),
    ([0, 1, 2], Sampler(SamplingParams(min_new_tokens=9), 0, logit_bias={0: -np.inf}, eos_token_ids=EOS), 7),
    ([0, 1, -np.inf], Sampler(GREEDY, 0, forced_eos_token_ids=frozenset({2, 9}), forced_eos_position=4), 8),
    (
        [0, 1, 2],
        Sampler(
            SamplingParams(), 0, logit_bias={0: -np.inf}, forced_eos_token_ids=frozenset({9}), forced_eos_position=4
        ),
        8,
    ),
]


@pytest.mark.parametrize(("logits", "sampler", "problem"), PROBLEMS)
def test_problems_raise_what_the_host_raises(logits, sampler, problem):
    expected = host_error(np.asarray(logits, np.float32), sampler, 4)
    with pytest.raises(type(expected)) as error:
        sampling.raise_problem(problem, 4)
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

    def __init__(self, device, num_rows, vocab_size=VOCAB_SIZE, max_seq_len=300):
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


@pytest.mark.cuda
def test_mu_comes_with_each_token_and_a_dropped_token_takes_its_own_with_it(device):
    """A host that drops the token ahead starts again with the mu of the last token that counts."""
    rows = Rows(device, 2)
    logits = (np.random.default_rng(5).standard_normal((2, VOCAB_SIZE)) * 3).astype(np.float32)
    rows.logits.set(logits)
    params = SamplingParams(top_p=1, mirostat_tau=4, mirostat_eta=0.5)
    samplers = [Sampler(params, 3), Sampler(SamplingParams(), 4)]
    rows.sampler.set_samplers([0, 1], samplers)
    history: list[int] = [0]
    mu = None
    for step in range(1, 201):
        if step % 7 == 0:  # the token that was drawn ahead is dropped
            rows.enqueue()
            device.synchronize()
            rows.sampler.set_samplers([0, 1], [replace(samplers[0], mirostat_mu=mu), samplers[1]])
            rows.positions.set(rows.positions.get() - 1)
            first = step
        elif step == 1:
            first = 1
        rows.enqueue()
        choice = choose(logits[0], history, replace(samplers[0], mirostat_mu=mu))
        assert rows.sampler.wait(0, step - first + 1, len(history)) == choice.token_id
        mu = rows.sampler.mirostat_mu(0, step - first + 1)
        assert mu == pytest.approx(choice.mirostat_mu, rel=1e-12)
        assert rows.sampler.wait(1, step - first + 1, len(history)) >= 0
        assert rows.sampler.mirostat_mu(1, step - first + 1) is None
        history.append(choice.token_id)
    device.synchronize()
    assert rows.positions.get().tolist() == [200, 200]
