"""The sampler's state on the card: graphs that outlive samplers, tokens and mu on the host, and the host's errors."""

import os
import time
from dataclasses import replace

import numpy as np
import pytest

from llmcli.errors import CheckpointError, DeviceError, UsageError
from llmcli.kernels.sample_token import NUM_RESULTS
from llmcli.sampling.chain import choose
from llmcli.sampling.params import Sampler, SamplingParams

cupy = pytest.importorskip("cupy")
arena = pytest.importorskip("llmcli.runners.cuda.step.arena")
sampling = pytest.importorskip("llmcli.runners.cuda.step.sampling")

from sampler_rows import VOCAB_SIZE, Rows  # noqa: E402

GREEDY = SamplingParams(temperature=0)


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
    ([0, -np.inf, 2], Sampler(SamplingParams(), 0, logit_bias={0: -np.inf, 2: -np.inf}), 5),
    ([0, -np.inf, 2], Sampler(GREEDY, 0, sequence_bias=(((0, 0), -np.inf), ((2,), 1.0), ((0, 2), -np.inf))), 6),
    ([0, 1, 2], Sampler(SamplingParams(), 0, logit_bias={1: -np.inf, 2: -np.inf}, sequence_bias=(((0,), -np.inf),)), 6),
    ([0, 1, -np.inf], Sampler(GREEDY, 0, num_prompt_tokens=4, begin_suppress_token_ids=frozenset({0, 1})), 7),
    (
        [0, 1, 2],
        Sampler(
            SamplingParams(), 0, num_prompt_tokens=4, begin_suppress_token_ids=EOS, sequence_bias=(((0, 0), -np.inf),)
        ),
        7,
    ),
    ([-np.inf, 1, 2], Sampler(GREEDY, 0, eos_token_ids=EOS, ignore_eos=True), 8),
    ([0, 1, 2], Sampler(SamplingParams(min_new_tokens=9), 0, logit_bias={0: -np.inf}, eos_token_ids=EOS), 8),
    ([0, 1, -np.inf], Sampler(GREEDY, 0, forced_eos_token_ids=frozenset({2, 9}), forced_eos_position=4), 9),
    (
        [0, 1, 2],
        Sampler(
            SamplingParams(), 0, logit_bias={0: -np.inf}, forced_eos_token_ids=frozenset({9}), forced_eos_position=4
        ),
        9,
    ),
]


@pytest.mark.parametrize(("logits", "sampler", "problem"), PROBLEMS)
def test_problems_raise_what_the_host_raises(logits, sampler, problem):
    expected = host_error(np.asarray(logits, np.float32), sampler, 4)
    with pytest.raises(type(expected)) as error:
        sampling.raise_problem(problem, 4)
    assert str(error.value) == str(expected)


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
        for slot, sampler in enumerate(samplers):
            rows.sampler.set_sampler(slot, sampler)
        for _ in range(2 * NUM_RESULTS):
            runs = [rows.sampler.count_run(slot) for slot in range(2)]
            assert not rows.sampler.has_result(0, runs[0])
            graph.launch(device.stream)
            for slot, (sampler, history) in enumerate(zip(samplers, histories, strict=True)):
                token_id = rows.sampler.wait(slot, runs[slot], len(history))
                assert token_id == choose(logits[slot], history, sampler).token_id
                history.append(token_id)
    assert runs == [len(chains) * 2 * NUM_RESULTS] * 2
    device.synchronize()
    for slot, history in enumerate(histories):
        assert rows.history.get()[slot, : len(history)].tolist() == history
        assert int(rows.positions[slot]) == len(history) - 1
        assert int(rows.token_ids[slot]) == history[-1]


@pytest.mark.cuda
def test_a_sampler_is_set_while_earlier_runs_are_still_queued(device):
    """Each run uses the sampler that was set before it, not a later one."""
    rows = Rows(device, 1)
    logits = (np.random.default_rng(7).standard_normal((1, VOCAB_SIZE)) * 3).astype(np.float32)
    rows.logits.set(logits)
    device.synchronize()
    bias = dict.fromkeys(range(0, VOCAB_SIZE, 2), 0.5)  # more than the mailbox's halves hold
    samplers = [
        Sampler(SamplingParams(temperature=2, top_p=1), seed, logit_bias=bias if seed % 3 else {}, eos_token_ids=ends)
        for seed, ends in enumerate([EOS, EOS, frozenset({5}), EOS] * 3)
    ]
    runs = []
    for sampler in samplers:
        rows.sampler.set_sampler(0, sampler)
        runs += rows.run()
    assert runs == list(range(1, len(samplers) + 1))
    history = [0]
    for run, sampler in zip(runs, samplers, strict=True):
        choice = choose(logits[0], history, sampler)
        assert rows.sampler.choice(0, run, len(history)).token_id == choice.token_id
        history.append(choice.token_id)


@pytest.mark.cuda
def test_a_result_of_an_earlier_row_is_none_of_the_next(device):
    """The next row in a slot gets a sampler while an unread run of the previous row is queued."""
    rows = Rows(device, 1)
    rng = np.random.default_rng(8)
    for number in range(3 * NUM_RESULTS):
        first, second = (rng.standard_normal((1, VOCAB_SIZE)).astype(np.float32) for _ in range(2))
        rows.sampler.set_sampler(0, Sampler(GREEDY, 0))
        rows.logits.set(first)
        (old,) = rows.run()
        rows.sampler.set_sampler(0, Sampler(GREEDY, number, logit_bias={number: 100.0}))
        new = rows.sampler.count_run(0)
        device.synchronize()
        assert new == old + 1
        assert rows.sampler.has_result(0, old)
        assert not rows.sampler.has_result(0, new)
        rows.positions.set(np.zeros(1, np.int32))
        rows.logits.set(second)
        rows.enqueue()
        assert rows.sampler.wait(0, new, 1) == number
        assert rows.sampler.wait(0, old, 1) == int(first.argmax())  # it is kept anyway
        rows.positions.set(np.zeros(1, np.int32))


@pytest.mark.cuda
def test_the_last_results_are_kept_for_a_host_that_is_behind(device):
    rows = Rows(device, 1)
    rows.logits.set(np.random.default_rng(4).standard_normal((1, VOCAB_SIZE)).astype(np.float32))
    rows.sampler.set_sampler(0, Sampler(SamplingParams(temperature=3), 0))
    runs = [rows.run()[0] for _ in range(NUM_RESULTS)]
    tokens = [rows.sampler.wait(0, run, run) for run in runs]
    device.synchronize()
    assert rows.history.get()[0, 1 : NUM_RESULTS + 1].tolist() == tokens


@pytest.mark.cuda
@pytest.mark.parametrize(("logits", "sampler", "problem"), PROBLEMS)
def test_a_problem_stops_its_row_and_no_other(device, logits, sampler, problem):
    rows = Rows(device, 2, vocab_size=3)
    logits = np.asarray([logits, [0, 1, 0]], np.float32)
    rows.logits.set(logits)
    rows.positions.set(np.asarray([3, 3], np.int32))
    rows.sampler.set_sampler(0, sampler)
    rows.sampler.set_sampler(1, Sampler(GREEDY, 0))
    for count in (1, 2):
        first, second = rows.run()
        expected = host_error(logits[0], sampler, 4)
        with pytest.raises(type(expected)) as error:
            rows.sampler.wait(0, first, 4)
        assert str(error.value) == str(expected)
        assert rows.sampler.wait(1, second, 3 + count) == 1
    assert rows.positions.get().tolist() == [3, 5]
    assert rows.history.get()[0].max() == 0
    # The row is as good as before once its logits are.
    rows.logits.set(np.asarray([[0, 5, 1], [0, 1, 0]], np.float32))
    rows.sampler.set_sampler(0, Sampler(GREEDY, 0))
    assert rows.sampler.wait(0, rows.run()[0], 4) == 1


@pytest.mark.cuda
def test_a_token_that_never_comes_is_an_error(device):
    rows = Rows(device, 1)
    rows.sampler.set_sampler(0, Sampler(GREEDY, 0))
    with pytest.raises(DeviceError, match="without run 1 of the sampler in place 0"):
        rows.sampler.wait(0, rows.sampler.count_run(0), 1)


@pytest.mark.cuda
def test_mu_comes_with_each_token_and_a_dropped_token_takes_its_own_with_it(device):
    """A host that drops the token ahead starts again with the mu of the last token that counts."""
    rows = Rows(device, 2)
    logits = (np.random.default_rng(5).standard_normal((2, VOCAB_SIZE)) * 3).astype(np.float32)
    rows.logits.set(logits)
    params = SamplingParams(top_p=1, mirostat_tau=4, mirostat_eta=0.5)
    samplers = [Sampler(params, 3), Sampler(SamplingParams(), 4)]
    for slot, sampler in enumerate(samplers):
        rows.sampler.set_sampler(slot, sampler)
    history: list[int] = [0]
    mu = None
    for step in range(1, 201):
        if step % 7 == 0:  # the token that was drawn ahead is dropped
            rows.run()
            device.synchronize()
            rows.sampler.set_sampler(0, replace(samplers[0], mirostat_mu=mu))
            rows.sampler.set_sampler(1, samplers[1])
            rows.positions.set(rows.positions.get() - 1)
        first, second = rows.run()
        expected = choose(logits[0], history, replace(samplers[0], mirostat_mu=mu))
        choice = rows.sampler.choice(0, first, len(history))
        assert choice.token_id == expected.token_id
        mu = choice.mirostat_mu
        assert mu == pytest.approx(expected.mirostat_mu, rel=1e-12)
        assert rows.sampler.choice(1, second, len(history)).mirostat_mu is None
        history.append(choice.token_id)
    device.synchronize()
    assert rows.positions.get().tolist() == [200, 200]


def test_choices_of_many_runs_are_read_together(monkeypatch):
    """Late ones are waited for; a failed one leaves its error; a slot with mirostat returns its mu."""
    sampler = object.__new__(sampling.DeviceSampler)
    sampler._results = np.zeros((4, 2, NUM_RESULTS), np.uint64)
    sampler._has_mu = np.array([False, True, False, False])
    sampler._step_seconds = 0.0
    runs = [sampling.SamplerRun(slot, number, 5) for slot, number in ((2, 40), (0, 7), (1, 2**31 + 3), (3, 9), (2, 41))]
    words = [123, 2**31 - 1, 77, sampling.IS_PROBLEM | 3, 5]
    late = list(zip(runs, words, strict=True))

    def arrive(*_):
        (slot, number, _), word = late.pop(0)
        sampler._results[slot, :, number % NUM_RESULTS] = number << 32 | word, np.float64(1.5 + slot).view(np.uint64)

    arrive()
    sampler._results[0, 0, 7] = 6 << 32 | 1  # the result of the slot's previous run
    monkeypatch.setattr(time, "sleep", arrive)
    choices = sampler.choices(runs)
    with pytest.raises(CheckpointError) as error:
        sampling.raise_problem(3, 5)
    assert str(choices.pop(3)) == str(error.value)
    assert choices == [(123, None, None), (2**31 - 1, None, None), (77, None, 2.5), (5, None, None)]
    assert sampler.choices([]) == []


@pytest.mark.skipif(not hasattr(os, "sched_yield"), reason="there time.sleep(0) is short")
def test_a_choice_alone_is_waited_for_awake_towards_the_end(monkeypatch):
    """A sleep takes 80 us, a check 1 us. The first wait has no estimate yet."""
    sampler = object.__new__(sampling.DeviceSampler)
    sampler._results = np.zeros((1, 2, NUM_RESULTS), np.uint64)
    sampler._step_seconds = 0.0
    now, arrives, slept = 0.0, 0.0, 0

    def passes(seconds):
        nonlocal now, slept
        now += seconds
        slept += seconds > 1e-6
        if now >= arrives:
            sampler._results[0, 0, number % NUM_RESULTS] = number << 32 | 7

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "sleep", lambda _: passes(80e-6))
    monkeypatch.setattr(os, "sched_yield", lambda: passes(1e-6))
    dozes, number = [], 0
    for step_seconds in (2e-3, 2e-3, 1.7e-3, 2.4e-3, 2e-3):
        queued_at = now
        for seconds in (step_seconds, 20e-6, 40e-6):  # a step's first choice, and later ones
            number += 1
            arrives, slept = now + seconds, 0
            assert sampler.wait(0, number, 5, queued_at=queued_at) == 7
            assert now - arrives < 2e-6
            dozes.append(slept)
    assert dozes[::3] == [0, 20, 20, 17, 24]
    assert not any(dozes[place] for place in range(15) if place % 3)
