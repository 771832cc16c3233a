"""What every runner must do, whatever its device: subclass `RunnerConformance` and say how a runner is loaded.

The suite needs torch and tiny random models only. Tokens are compared where bits are promised, logits elsewhere.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_models import CONFIG, write_tiny_llama

from llmcli.errors import CheckpointError, LLMCliError
from llmcli.runners.base import Runner
from llmcli.sampling.chain import choose
from llmcli.sampling.params import SamplingParams
from llmcli.sampling.sampler import Sampler

MAX_SEQ_LEN = 400
PROMPT = [int(token_id) for token_id in np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 300)]
GREEDY = Sampler(SamplingParams(temperature=0.0), seed=0)
WARM = SamplingParams(temperature=1.0, top_p=1.0)


def prefill(runner: Runner, token_ids: list[int], row: int = 0) -> int:
    """Prefill to the end; return the number of tokens computed."""
    return list(runner.prefill(row, token_ids))[-1]


def decode(runner: Runner, count: int, sampler: Sampler = GREEDY, row: int = 0) -> list[int]:
    """Decode `count` tokens of one row and close the stream."""
    steps = runner.decode([row], [sampler])
    token_ids = [next(steps)[0] for _ in range(count)]
    steps.close()
    return token_ids


def relative_error(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).max() / np.abs(second).max())


class RunnerConformance:
    """Subclasses define `load` and, if their rounding is coarser, `tolerance`."""

    tolerance = 1e-5  # between two ways to compute the same logits, relative to the largest

    @classmethod
    def load(cls, folder: Path, *, max_seq_len: int, num_rows: int) -> Runner:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_llama(tmp_path_factory.mktemp("conformance") / "model", with_tokenizer=False)

    @pytest.fixture(scope="class")
    @classmethod
    def shared_runner(cls, folder: Path) -> Runner:
        return cls.load(folder, max_seq_len=MAX_SEQ_LEN, num_rows=3)

    @pytest.fixture
    def runner(self, shared_runner: Runner) -> Runner:
        for row in range(shared_runner.num_rows):
            shared_runner.truncate(row, 0)
        return shared_runner

    def test_describes_itself(self, runner: Runner) -> None:
        assert runner.num_rows == 3
        assert runner.max_seq_len == MAX_SEQ_LEN
        assert runner.config.hidden_size == CONFIG["hidden_size"]
        assert runner.description
        assert "\n" not in runner.description

    def test_a_row_holds_its_prompt(self, runner: Runner) -> None:
        assert list(runner.token_ids(0)) == []
        assert prefill(runner, PROMPT) == len(PROMPT)
        assert list(runner.token_ids(0)) == PROMPT
        logits = runner.logits(0)
        assert logits.shape == (CONFIG["vocab_size"],)
        assert logits.dtype == np.float32

    def test_prefill_reports_progress_from_0(self, runner: Runner) -> None:
        progress = list(runner.prefill(0, PROMPT))
        assert progress[0] == 0
        assert progress[-1] == len(PROMPT)
        assert progress == sorted(set(progress))

    def test_prefill_cancelled_between_chunks_leaves_a_usable_row(self, runner: Runner) -> None:
        chunks = runner.prefill(0, PROMPT)
        next(chunks)
        done = next(chunks)
        chunks.close()
        assert 0 < done < len(PROMPT), "the prompt must be longer than a chunk"
        assert list(runner.token_ids(0)) == PROMPT[:done]
        assert prefill(runner, PROMPT) == len(PROMPT) - done
        expected = runner.logits(0)
        runner.truncate(0, 0)
        prefill(runner, PROMPT)
        assert relative_error(expected, runner.logits(0)) < self.tolerance

    def test_prefill_that_is_never_asked_computes_nothing(self, runner: Runner) -> None:
        prefill(runner, PROMPT[:10])
        runner.prefill(0, PROMPT)
        assert list(runner.token_ids(0)) == PROMPT[:10]

    def test_prefill_keeps_the_common_prefix(self, runner: Runner) -> None:
        prefill(runner, PROMPT[:100])
        other = PROMPT[:60] + PROMPT[:50]
        assert prefill(runner, other) == 50
        kept = runner.logits(0)
        runner.truncate(0, 0)
        assert prefill(runner, other) == 110
        assert relative_error(kept, runner.logits(0)) < self.tolerance

    def test_prefill_of_the_same_prompt_computes_its_last_token(self, runner: Runner) -> None:
        prefill(runner, PROMPT[:50])
        before = runner.logits(0)
        assert prefill(runner, PROMPT[:50]) == 1
        assert relative_error(before, runner.logits(0)) < self.tolerance

    def test_prefill_of_a_shorter_prompt(self, runner: Runner) -> None:
        prefill(runner, PROMPT[:30])
        expected = runner.logits(0)
        prefill(runner, PROMPT[:50])
        assert prefill(runner, PROMPT[:30]) == 1
        assert list(runner.token_ids(0)) == PROMPT[:30]
        assert relative_error(runner.logits(0), expected) < self.tolerance

    def test_prefill_goes_on_after_decode(self, runner: Runner) -> None:
        """A conversation: the last sampled token may not have been run yet, and must be."""
        prefill(runner, PROMPT[:40])
        answer = decode(runner, 5)
        history = PROMPT[:40] + answer + PROMPT[40:50]
        assert prefill(runner, history) <= 10 + 1
        extended = runner.logits(0)
        runner.truncate(0, 0)
        prefill(runner, history)
        assert relative_error(extended, runner.logits(0)) < self.tolerance

    @pytest.mark.parametrize("token_ids", [[], [CONFIG["vocab_size"]], [-1], [0] * (MAX_SEQ_LEN + 1)])
    def test_prefill_refuses_what_does_not_fit(self, runner: Runner, token_ids: list[int]) -> None:
        with pytest.raises(ValueError, match="prefill|vocabulary"):
            runner.prefill(0, token_ids)

    def test_greedy_decode_takes_the_highest_logit(self, runner: Runner) -> None:
        prefill(runner, PROMPT[:20])
        for _ in range(10):
            expected = int(runner.logits(0).argmax())
            assert decode(runner, 1) == [expected]

    def test_sampled_decode_is_the_host_sampler(self, runner: Runner) -> None:
        prefill(runner, PROMPT[:20])
        sampler = Sampler(SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01), seed=7, sample_index=3)
        for _ in range(30):
            expected = choose(runner.logits(0), runner.token_ids(0), sampler).token_id
            assert decode(runner, 1, sampler) == [expected]

    def test_repetition_penalty_sees_prompt_and_answer(self, runner: Runner) -> None:
        prefill(runner, PROMPT[:20])
        sampler = Sampler(SamplingParams(temperature=0.0, repetition_penalty=1.8), seed=0)
        for _ in range(20):
            expected = choose(runner.logits(0), runner.token_ids(0), sampler).token_id
            assert decode(runner, 1, sampler) == [expected]

    def test_mirostat_s_state_is_handed_on_within_a_stream_and_given_to_the_next(self, runner: Runner) -> None:
        first = Sampler(SamplingParams(temperature=1.0, top_p=1.0, mirostat_tau=3, mirostat_eta=0.4), seed=7)
        prefill(runner, PROMPT[:20])
        decode(runner, 1)
        assert runner.mirostat_mu(0) is None
        runner.truncate(0, 20)
        expected, mus, sampler = [], [], first
        for _ in range(15):
            choice = choose(runner.logits(0), runner.token_ids(0), sampler)
            assert decode(runner, 1, sampler) == [choice.token_id]
            assert runner.mirostat_mu(0) == pytest.approx(choice.mirostat_mu, rel=1e-12)
            sampler = replace(sampler, mirostat_mu=choice.mirostat_mu)
            expected.append(choice.token_id)
            mus.append(choice.mirostat_mu)
        runner.truncate(0, 20)
        steps = runner.decode([0], [first])
        for token_id, mu in zip(expected, mus, strict=True):
            assert next(steps) == [token_id]
            assert runner.mirostat_mu(0) == pytest.approx(mu, rel=1e-12)
        steps.close()
        runner.truncate(0, 20)
        assert decode(runner, 15, first) == expected  # a stream begins with its sampler's mu, not with the row's

    def test_mirostat_goes_on_in_a_stream_between_whose_tokens_the_row_was_used(self, runner: Runner) -> None:
        sampler = Sampler(SamplingParams(temperature=1.0, top_p=1.0, mirostat_tau=3, mirostat_eta=0.4), seed=7)
        prefill(runner, PROMPT[:20])
        expected = decode(runner, 12, sampler)
        runner.truncate(0, 20)
        steps = runner.decode([0], [sampler])
        found = []
        for num_tokens in range(21, 33):
            found += next(steps)
            if num_tokens % 3 == 0:
                runner.truncate(0, num_tokens)  # drops nothing but what was worked ahead
        steps.close()
        assert found == expected

    def test_decode_in_one_stream_equals_decode_in_many(self, runner: Runner) -> None:
        sampler = Sampler(WARM, seed=5)
        prefill(runner, PROMPT[:20])
        at_once = decode(runner, 40, sampler)
        runner.truncate(0, 20)
        assert [decode(runner, 1, sampler)[0] for _ in range(40)] == at_once
        assert list(runner.token_ids(0)) == PROMPT[:20] + at_once

    def test_decode_logits_equal_prefill_logits(self, runner: Runner) -> None:
        prefill(runner, PROMPT[:20])
        answer = decode(runner, 30)
        decoded = runner.logits(0)
        runner.truncate(0, 0)
        prefill(runner, PROMPT[:20] + answer)
        assert relative_error(decoded, runner.logits(0)) < self.tolerance

    def test_decode_ends_where_the_row_is_full(self, runner: Runner) -> None:
        prefill(runner, PROMPT)
        steps = list(runner.decode([0], [GREEDY]))
        assert len(steps) == MAX_SEQ_LEN - len(PROMPT)
        assert len(runner.token_ids(0)) == MAX_SEQ_LEN
        assert list(runner.decode([0], [GREEDY])) == []

    @pytest.mark.parametrize("rows", [[1], [0, 0], [0, 1]])
    def test_decode_refuses_empty_and_repeated_rows(self, runner: Runner, rows: list[int]) -> None:
        prefill(runner, PROMPT[:5])
        with pytest.raises(ValueError, match="decode"):
            runner.decode(rows, [GREEDY] * len(rows))

    def test_a_row_does_not_depend_on_the_others(self, runner: Runner) -> None:
        samplers = [Sampler(WARM, seed=3, sample_index=index) for index in range(3)]
        prompts = [PROMPT[:30], PROMPT[10:75], PROMPT[5:6]]
        alone = []
        for prompt, sampler in zip(prompts, samplers, strict=True):
            runner.truncate(0, 0)
            prefill(runner, prompt)
            alone.append(decode(runner, 40, sampler))
        runner.truncate(0, 0)
        for row, prompt in enumerate(prompts):
            prefill(runner, prompt, row)
        steps = runner.decode([2, 0, 1], [samplers[2], samplers[0], samplers[1]])
        together = [next(steps) for _ in range(40)]
        assert [list(tokens) for tokens in zip(*together, strict=True)] == [alone[2], alone[0], alone[1]]

    def test_a_copied_row_goes_on_alike(self, runner: Runner) -> None:
        sampler = Sampler(WARM, seed=11)
        prefill(runner, PROMPT[:100])
        prefill(runner, PROMPT[200:250], row=1)
        runner.copy_row(0, 1)
        assert list(runner.token_ids(1)) == PROMPT[:100]
        assert runner.logits(1).tobytes() == runner.logits(0).tobytes()
        first = decode(runner, 30, sampler, row=0)
        assert decode(runner, 30, sampler, row=1) == first

    def test_copies_do_not_share_their_future(self, runner: Runner) -> None:
        prefill(runner, PROMPT[:50])
        expected = decode(runner, 20, Sampler(WARM, seed=1))
        runner.truncate(0, 50)
        runner.copy_row(0, 2)
        decode(runner, 20, Sampler(WARM, seed=2), row=2)
        assert decode(runner, 20, Sampler(WARM, seed=1), row=0) == expected

    def test_roll_back_to_the_prompt_is_exact(self, runner: Runner) -> None:
        prefill(runner, PROMPT[:70])
        before = runner.logits(0)
        first = decode(runner, 25, Sampler(WARM, seed=9))
        runner.truncate(0, 70)
        assert list(runner.token_ids(0)) == PROMPT[:70]
        assert runner.logits(0).tobytes() == before.tobytes()
        assert decode(runner, 25, Sampler(WARM, seed=9)) == first

    def test_roll_back_into_the_prompt(self, runner: Runner) -> None:
        prefill(runner, PROMPT[:40])
        expected = runner.logits(0)
        prefill(runner, PROMPT[:90])
        runner.truncate(0, 40)
        assert relative_error(runner.logits(0), expected) < self.tolerance

    def test_roll_back_into_the_answer(self, runner: Runner) -> None:
        prefill(runner, PROMPT[:40])
        answer = decode(runner, 20)
        runner.truncate(0, 45)
        assert decode(runner, 15) == answer[5:]

    @pytest.mark.parametrize("num_tokens", [-1, 11])
    def test_roll_back_refuses_lengths_the_row_never_had(self, runner: Runner, num_tokens: int) -> None:
        prefill(runner, PROMPT[:10])
        with pytest.raises(ValueError, match="truncate"):
            runner.truncate(0, num_tokens)

    def test_same_input_same_bits(self, runner: Runner) -> None:
        results = set()
        for _ in range(10):
            runner.truncate(0, 0)
            prefill(runner, PROMPT[:64])
            token_ids = decode(runner, 20, Sampler(WARM, seed=4))
            results.add((tuple(token_ids), runner.logits(0).tobytes()))
        assert len(results) == 1

    def test_nan_weights_are_refused_by_name(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False)
        tensors = load_file(folder / "model.safetensors")
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name][3, 5] = float("nan")
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{name} in model.safetensors holds NaN or infinity"):
            self.load(folder, max_seq_len=64, num_rows=1)

    def test_a_model_that_does_not_fit_is_refused_before_it_is_read(self, folder: Path) -> None:
        with pytest.raises(LLMCliError, match="needs .* is available: use --context"):
            self.load(folder, max_seq_len=2**34, num_rows=1)

    def test_scores_are_the_logits_of_every_position(self, runner: Runner) -> None:
        token_ids = PROMPT[:280]
        scores = np.concatenate(list(runner.score(0, token_ids, first=1)))
        assert scores.shape == (279, CONFIG["vocab_size"])
        assert scores.dtype == np.float32
        for length in (1, 2, 100, 256, 257, 279):
            prefill(runner, token_ids[:length], row=1)
            assert relative_error(scores[length - 1], runner.logits(1)) < self.tolerance

    @pytest.mark.parametrize("first", [2, 255, 256, 257, 279])
    def test_scores_from_some_position_on(self, runner: Runner, first: int) -> None:
        every = np.concatenate(list(runner.score(0, PROMPT[:280], first=1)))
        some = np.concatenate(list(runner.score(0, PROMPT[:280], first=first)))
        assert len(some) == 280 - first
        assert relative_error(some, every[first - 1 :]) < self.tolerance

    def test_a_scored_row_goes_on(self, runner: Runner) -> None:
        list(runner.score(0, PROMPT[:50], first=1))
        assert list(runner.token_ids(0)) == PROMPT[:49]
        scored = runner.logits(0)
        prefill(runner, PROMPT[:49], row=1)
        assert relative_error(scored, runner.logits(1)) < self.tolerance
        assert prefill(runner, PROMPT[:60]) == 11

    @pytest.mark.parametrize("first", [0, 10, -1])
    def test_score_refuses_positions_that_nothing_predicts(self, runner: Runner, first: int) -> None:
        with pytest.raises(ValueError, match="score"):
            runner.score(0, PROMPT[:10], first)
