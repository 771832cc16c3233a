"""Cases of sample_token and read_bandwidth: expected values, checked independently of their references."""

import numpy as np
import pytest

from llmcli.errors import LLMCliError
from llmcli.kernels.compiler import compile_kernels
from llmcli.kernels.read_bandwidth import BLOCK_BYTES
from llmcli.kernels.sample_token import IS_PROBLEM, NUM_RESULTS, ROW_SAMPLER, RowLayout
from llmcli.kernels.sources import flatten
from llmcli.lab.cases import sample_token
from llmcli.lab.cases.reductions import read_bandwidth_case
from llmcli.lab.cases.sample_token import CHAINS, NUM_PROMPT_TOKENS, chains_for, make_logits, make_sampler
from llmcli.lab.problem import Problem, find_mismatch


def words(problem: Problem) -> dict[int, int]:
    """The low half of each used lane's result, by lane."""
    results = problem.expected["results"].values[:, 0, 1].astype(np.uint64)
    rows = problem.inputs["rows"]
    return {lane: int(results[row]) & 0xFFFFFFFF for lane, row in enumerate(rows) if row >= 0}


def test_greedy_rows_take_the_largest_logit() -> None:
    logits = make_logits(3, 700, 2)
    problem = sample_token.case([make_sampler(CHAINS["greedy"], 0)] * 3, logits)
    assert list(words(problem).values()) == logits.argmax(1).tolist()
    history, rows = problem.expected["history"].values, problem.inputs["rows"]
    assert history[rows[rows >= 0], NUM_PROMPT_TOKENS].tolist() == logits.argmax(1).tolist()
    assert (history[:, NUM_PROMPT_TOKENS + 1 :] == -1).all()
    positions = problem.expected["positions"].values
    assert (positions[rows >= 0] == NUM_PROMPT_TOKENS).all()
    assert (positions[rows < 0] == 2**30).all()


def test_draws_differ_with_the_seed_and_lie_in_the_vocabulary() -> None:
    drawn = [list(words(sample_token.chains_case(2500, seed)).values()) for seed in range(3)]
    assert all(0 <= token_id < 2500 for row in drawn for token_id in row)
    assert len({tuple(row) for row in drawn}) == 3


def test_every_chain_takes_part_and_mu_can_be_compared_by_its_bits() -> None:
    problem = sample_token.chains_case(2500, 0)
    assert problem.sizes["num_lanes"] == len(CHAINS) + 1 == len(chains_for(2500)) + 1
    bits = problem.expected["results"].values[:, 1, 1].astype(np.uint64)
    mus = bits[bits > 0].view(np.float64)
    assert len(mus) == sum(
        bool(chain.get("mirostat_tau")) and chain.get("temperature") != 0 for chain in CHAINS.values()
    )
    assert (mus > 0.1).all()  # neighbours are near each other, as far as they are not near 0
    right = {name: one.values.astype(problem.outputs[name].dtype) for name, one in problem.expected.items()}
    (place,) = np.argwhere(right["results"][:, 1, 1] > 0)[:1]
    for factor, is_right in ((1 + 2e-13, True), (1 - 2e-13, True), (1 + 2e-12, False)):
        results = right["results"].copy()
        results[place, 1, 1] = (results[place, 1, 1].view(np.float64) * factor).view(np.uint64)
        assert (find_mismatch(problem, {**right, "results": results}) is None) == is_right


def test_the_state_begins_with_each_row_s_sampler() -> None:
    problem = sample_token.chains_case(33, 5)
    state, rows = problem.inputs["state_before"], problem.inputs["rows"]
    assert state.shape == (problem.sizes["num_lanes"], RowLayout(33).row_bytes)
    used = rows[rows >= 0]
    headers = state[used, : ROW_SAMPLER.itemsize].copy().view(ROW_SAMPLER)[:, 0]
    assert headers["sample_index"].tolist() == list(range(len(used)))
    assert set(headers["seed"].tolist()) == {5}
    (unused,) = set(range(len(state))) - set(used.tolist())
    assert not state[unused].any()


def test_problems_have_the_numbers_that_the_runner_reads() -> None:
    sampling = pytest.importorskip("llmcli.runners.cuda.step.sampling")
    problem = sample_token.problems_case(600)
    found = words(problem)
    numbers = [word & ~IS_PROBLEM for word in found.values() if word & IS_PROBLEM]
    assert sorted(numbers) == [1, 1, 2, 2, 3, 3]
    for lane, word in found.items():
        row, logits = problem.inputs["rows"][lane], problem.inputs["logits"][lane]
        wrong = {1: np.isnan(logits).any(), 2: np.isposinf(logits).any(), 3: np.isneginf(logits).all()}
        if word & IS_PROBLEM:
            assert wrong[word & ~IS_PROBLEM]
            with pytest.raises(LLMCliError):
                sampling.raise_problem(word & ~IS_PROBLEM, NUM_PROMPT_TOKENS)
            assert (problem.expected["history"].values[row, NUM_PROMPT_TOKENS:] == -1).all()
        else:
            assert not any(wrong.values())


def test_full_rows_tell_their_token_and_stay() -> None:
    problem = next(one for one in sample_token.SAMPLE_TOKEN.checks() if one.label == "full rows")
    for name in ("positions", "token_ids", "history"):
        assert (problem.expected[name].values == problem.inputs[f"{name}_before"]).all()
    assert len(set(words(problem).values())) > 1
    assert problem.expected["results"].values.shape == (4, 2, NUM_RESULTS)


@pytest.mark.parametrize(("num_bytes", "num_blocks"), [(16, 3), (5 * BLOCK_BYTES - 32, 2), (3 * BLOCK_BYTES, 3)])
def test_sums_are_those_of_blocks_that_take_turns(num_bytes: int, num_blocks: int) -> None:
    problem = read_bandwidth_case(num_bytes, num_blocks)
    memory, sums = problem.inputs["memory"].view(np.uint32), [0] * num_blocks
    for number, begin in enumerate(range(0, len(memory), BLOCK_BYTES // 4)):
        for word in memory[begin : begin + BLOCK_BYTES // 4].tolist():
            sums[number % num_blocks] ^= word
    assert problem.expected["sums"].values.tolist() == sums


@pytest.mark.usefixtures("nvrtc")
def test_host_and_kernel_agree_on_what_a_block_reads_at_a_time() -> None:
    claim = f"BLOCK_SIZE * LOADS * sizeof(uint4) == {BLOCK_BYTES}"
    source = flatten("read_bandwidth") + f'static_assert({claim}, "");\n'
    compile_kernels(source, "read_bandwidth", ["read_bandwidth"], "sm_90")


def values_of(problem: Problem) -> dict[str, np.ndarray]:
    """The output of a right kernel."""
    return {name: one.values.astype(problem.outputs[name].dtype) for name, one in problem.expected.items()}


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_a_chain_of_choices_ends_behind_the_first_wrong_draft(num_right: int) -> None:
    logits = make_logits(8, 700, 2).reshape(2, 4, 700)
    problem = sample_token.drafts_case([make_sampler(CHAINS["greedy"], 0)] * 2, logits, [num_right, 3])
    likeliest, left = logits.argmax(2), values_of(problem)
    first, second = problem.inputs["rows_before"][[0, 4]]
    assert left["rows"].tolist() == [first] * (num_right + 1) + [-1] * (3 - num_right) + [second] * 4
    said = left["history"][[first, second], NUM_PROMPT_TOKENS : NUM_PROMPT_TOKENS + 4]
    assert said.tolist() == [[*likeliest[0, : num_right + 1], *[-1] * (3 - num_right)], likeliest[1].tolist()]
    assert left["token_ids"][[first, second]].tolist() == [likeliest[0, num_right], likeliest[1, 3]]
    assert np.count_nonzero(left["results"][first]) == num_right + 1
    drafts = problem.inputs["drafts"].reshape(2, 4)[0, 1:]
    assert [*(drafts == likeliest[0, :3]), False].index(False) == num_right


def test_penalties_of_a_chain_see_its_drafts() -> None:
    """The last token is not chosen again, though it stays the likeliest."""
    logits = np.zeros((1, 4, 50), np.float32)
    logits[..., [7, 20, 30, 41]] = 8, 7.5, 7, 6.5
    sampler = make_sampler({"temperature": 0, "presence_penalty": 2.0}, 0)
    problem = sample_token.drafts_case([sampler], logits, [3])
    row = problem.inputs["rows_before"][0]
    assert values_of(problem)["history"][row, NUM_PROMPT_TOKENS : NUM_PROMPT_TOKENS + 4].tolist() == [7, 20, 30, 41]


def test_kernels_that_keep_wrong_drafts_or_take_right_ones_out_are_found() -> None:
    samplers, logits = [make_sampler(CHAINS["usual"], 5)] * 2, make_logits(8, 700, 3).reshape(2, 4, 700)
    right, wrong = (sample_token.drafts_case(samplers, logits, [num_right] * 2) for num_right in (3, 1))
    assert find_mismatch(right, values_of(right)) is find_mismatch(wrong, values_of(wrong)) is None
    for problem, other in ((right, wrong), (wrong, right)):
        for name in ("rows", "positions", "history", "results"):
            found = find_mismatch(problem, {**values_of(problem), name: values_of(other)[name]})
            assert found is not None
            assert found.output == name


def test_a_choice_that_fails_ends_a_chain() -> None:
    left = values_of(sample_token.draft_problems_case(600))
    lanes = left["rows"].reshape(8, 4)
    assert (lanes >= 0).sum(1).tolist() == [1, 2, 4, 4] * 2
    ends = [int(left["results"][of_row[0], 0, (of_row >= 0).sum()]) & 0xFFFFFFFF for of_row in lanes]
    assert [word & IS_PROBLEM > 0 for word in ends] == [True, True, True, False] * 2
    full = next(one for one in sample_token.SAMPLE_TOKEN.checks() if one.label == "drafts that fill their rows")
    assert (values_of(full)["rows"].reshape(3, 4) >= 0).sum(1).tolist() == [3, 3, 3]
    assert (values_of(full)["history"][full.inputs["rows_before"], NUM_PROMPT_TOKENS:] >= 0).all()
