"""A mask: its bits, and that the chain with it is the chain over the allowed tokens."""

from dataclasses import replace

import numpy as np
import pytest
from sampling_references import EVERY_HISTORY, EVERY_LOGITS, EVERY_STEP, make_sampler

from llmcli.errors import UsageError
from llmcli.sampling.candidates import mask_words, pack_mask, unpack_mask
from llmcli.sampling.chain import choose, run_steps
from llmcli.sampling.inspect import inspect_choice


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 40, 4096, 128_256])
def test_a_bit_stands_for_a_token(vocab_size):
    is_allowed = np.random.default_rng(vocab_size).random(vocab_size) < 0.3
    mask = pack_mask(is_allowed)
    assert (mask.dtype, len(mask)) == (np.uint32, mask_words(vocab_size))
    for token_id in {0, vocab_size // 2, vocab_size - 1}:
        assert bool(int(mask[token_id // 32]) >> token_id % 32 & 1) == is_allowed[token_id]
    unpacked = unpack_mask(mask)
    assert np.array_equal(unpacked[:vocab_size], is_allowed)
    assert not unpacked[vocab_size:].any()


@pytest.mark.parametrize("sampler", [EVERY_STEP, make_sampler(temperature=0), make_sampler(temperature=1.5, top_k=3)])
def test_a_choice_under_a_mask_is_one_of_a_model_that_excludes_the_rest(sampler):
    generator = np.random.default_rng(1)
    for sample_index in range(50):
        is_allowed = generator.random(len(EVERY_LOGITS)) < 0.5
        excluded = np.where(is_allowed, EVERY_LOGITS, np.float32(-np.inf))
        this = replace(sampler, sample_index=sample_index)
        expected = choose(excluded, EVERY_HISTORY, this)
        assert choose(EVERY_LOGITS, EVERY_HISTORY, this, mask=pack_mask(is_allowed)) == expected
        assert is_allowed[expected.token_id]


def test_the_mask_comes_before_everything_else():
    is_allowed = np.zeros(40, np.bool_)
    is_allowed[[1, 8]] = True
    names = [name for name, _ in run_steps(EVERY_LOGITS, EVERY_HISTORY, EVERY_STEP, pack_mask(is_allowed))]
    assert names[:3] == ["logits", "schema", "logit_bias"]
    assert "schema" not in [name for name, _ in run_steps(EVERY_LOGITS, EVERY_HISTORY, EVERY_STEP)]
    effect = inspect_choice(EVERY_LOGITS, EVERY_HISTORY, make_sampler(), 8, 3, pack_mask(is_allowed)).steps[0]
    assert (effect.name, effect.num_removed, effect.num_left) == ("schema", 38, 2)


def test_an_error_where_the_model_excludes_what_is_allowed():
    logits = np.array([1.0, -np.inf, 2.0], np.float32)
    with pytest.raises(UsageError, match="every token that the schema allows at position 1"):
        choose(logits, [7], make_sampler(), mask=pack_mask(np.array([False, True, False])))
