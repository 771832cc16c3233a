"""A whole `Sampler` reaches the card: every parameter, every field, and refusals."""

from dataclasses import fields, replace

import numpy as np
import pytest

from llmcli.errors import UsageError
from llmcli.kernels.sample_token import (
    IS_BREAKER,
    IS_END,
    IS_FORCED,
    IS_SUPPRESSED,
    MAX_SEQUENCE_IDS,
    ROW_SAMPLER,
    STEPS,
)
from llmcli.runners.cuda.step.packed_sampler import DERIVED, PackedSampler, pack_sampler
from llmcli.sampling.params import DEFAULT_ORDER, SPECS, ParamSpec, Sampler, SamplingParams

VOCAB_SIZE = 100


def same(one: PackedSampler, other: PackedSampler) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or a.tobytes() == b.tobytes())
        for a, b in zip(one, other, strict=True)
    )


def other_value(spec: ParamSpec) -> int | float:
    """A value of the parameter's own that is not its default."""
    values = (3, 7) if isinstance(spec.default, int) else (0.3, 1.3)
    return next(value for value in values if spec.contains(value) and value != spec.default)


def test_every_parameter_has_a_place_in_the_header():
    assert set(SPECS) == set(SPECS) & {*ROW_SAMPLER.names, *DERIVED}
    assert not set(DERIVED) & set(ROW_SAMPLER.names)
    for name, places in DERIVED.items():
        assert name in SPECS
        assert set(places) <= set(ROW_SAMPLER.names)


@pytest.mark.parametrize("name", SPECS)
def test_every_parameter_reaches_the_card(name):
    value = other_value(SPECS[name])
    usual = SamplingParams(dry_multiplier=1) if name == "dry_base" else SamplingParams()
    before = pack_sampler(Sampler(usual, 0), VOCAB_SIZE).header[0]
    after = pack_sampler(Sampler(replace(usual, **{name: value}), 0), VOCAB_SIZE).header[0]
    for place in DERIVED.get(name, (name,)):
        assert before[place].tobytes() != after[place].tobytes()
    if name not in DERIVED:
        assert after[name] == value


# A value for each field of Sampler besides its parameters, which the usual sampler lacks.
OTHER_FIELDS = {
    "seed": 2**64 - 1,
    "sample_index": 2**32 - 1,
    "num_prompt_tokens": 9,
    "eos_token_ids": frozenset({4}),
    "ignore_eos": True,
    "logit_bias": {3: 1.5},
    "sequence_bias": (((1, 2), 0.5),),
    "begin_suppress_token_ids": frozenset({5}),
    "forced_eos_token_ids": frozenset({6, 7}),
    "forced_eos_position": 12,
    "dry_breaker_token_ids": frozenset({8}),
    "order": tuple(reversed(DEFAULT_ORDER[:-1])),
    "mirostat_mu": 3.25,
}


def test_every_field_reaches_the_card():
    assert {item.name for item in fields(Sampler)} == {"params", *OTHER_FIELDS}
    params = SamplingParams(dry_multiplier=1, mirostat_tau=2, top_k=3)
    usual = Sampler(params, 0, forced_eos_token_ids=frozenset({6}), forced_eos_position=11, order=DEFAULT_ORDER)
    for name, value in OTHER_FIELDS.items():
        if name == "order":
            value = (*value, "mirostat")
        assert not same(pack_sampler(usual, VOCAB_SIZE), pack_sampler(replace(usual, **{name: value}), VOCAB_SIZE)), (
            name
        )


def test_packing_keeps_every_value():
    params = SamplingParams(
        temperature=0.5, dynatemp_range=0.75, min_p=0.1, dry_multiplier=2, dry_base=3, mirostat_tau=4, typical_p=0.5
    )
    sampler = Sampler(
        params, seed=2**64 - 1, sample_index=2**32 - 1, num_prompt_tokens=9, eos_token_ids=frozenset({1, 50}),
        ignore_eos=True, logit_bias={2: -np.inf, 3: 1.5, 60: 1.0}, dry_breaker_token_ids=frozenset({1, 4}),
        begin_suppress_token_ids=frozenset({4, 5}), forced_eos_token_ids=frozenset({1, 9}), forced_eos_position=33,
    )  # fmt: skip
    header, bias, marks, sequences, sequence_ids = pack_sampler(sampler, 10)
    packed = header[0]
    assert packed["log_min_p"] == np.log(0.1)
    assert (packed["dynatemp_low"], packed["dynatemp_high"]) == (0, 1.25)
    assert (packed["seed"], packed["sample_index"], packed["num_prompt_tokens"]) == (2**64 - 1, 2**32 - 1, 9)
    assert packed["mirostat_mu"] == 8
    assert packed["forced_position"] == 33
    np.testing.assert_array_equal(packed["dry_amounts"][:4], [-2, -6, -18, -54])
    flags = ("uses_dry", "uses_bias", "uses_ends", "ignores_ends", "suppresses_begin", "num_sequences", "step")
    assert [packed[name] for name in flags] == [1, 1, 1, 1, 1, 0, 0]
    np.testing.assert_array_equal(bias, [0, 0, -np.inf, 1.5, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(
        marks, [0, IS_END | IS_BREAKER | IS_FORCED, 0, 0, IS_BREAKER | IS_SUPPRESSED, IS_SUPPRESSED, 0, 0, 0, IS_FORCED]
    )
    assert sequences is None
    assert sequence_ids is None
    assert pack_sampler(replace(sampler, mirostat_mu=1.5), 10).header[0]["mirostat_mu"] == 1.5


def steps_of(params: SamplingParams, order: tuple[str, ...] = DEFAULT_ORDER) -> list[str]:
    codes = pack_sampler(Sampler(params, 0, order=order), VOCAB_SIZE).header[0]["steps"].tolist()
    used = codes[: codes.index(0)]
    assert not any(codes[len(used) :])
    return [STEPS[code - 1] for code in used]


def test_the_steps_are_those_that_are_on_in_their_order():
    assert steps_of(SamplingParams()) == ["temperature", "top_p"]
    assert steps_of(SamplingParams(temperature=1, top_p=1)) == ["temperature"]
    assert steps_of(SamplingParams(top_k=VOCAB_SIZE)) == ["temperature", "top_p"]
    every = SamplingParams(
        dynatemp_range=0.1, top_n_sigma=1, top_k=5, min_p=0.1, typical_p=0.5, xtc_probability=0.5, mirostat_tau=1
    )
    assert steps_of(every) == [*DEFAULT_ORDER, "text_surprise"]
    order = (*reversed(DEFAULT_ORDER[:-1]), "mirostat")
    assert steps_of(every, order) == [*order, "text_surprise"]
    assert steps_of(SamplingParams(temperature=1), ("top_p",)) == ["top_p"]


def test_packing_leaves_out_what_is_off_and_bounds_what_is_huge():
    huge = Sampler(
        SamplingParams(temperature=1e308, dynatemp_range=1.7e308, top_k=10**20, min_new_tokens=10**20), 0,
        forced_eos_token_ids=frozenset({1}), forced_eos_position=10**20,
    )  # fmt: skip
    header = pack_sampler(huge, 10).header[0]
    assert header["log_min_p"] == -np.inf
    assert header["top_k"] == header["min_new_tokens"] == header["forced_position"] > 2**30
    assert header["dynatemp_high"] == np.finfo(np.float64).max
    off = pack_sampler(Sampler(SamplingParams(), 0, dry_breaker_token_ids=frozenset({3})), 10)
    assert off[1:] == (None, None, None, None)
    assert off.header[0]["forced_position"] == -1
    # DRY looks at the marks of all tokens, and so does a forced token that is not in the vocabulary.
    for sampler in (
        Sampler(SamplingParams(dry_multiplier=1), 0),
        Sampler(SamplingParams(), 0, forced_eos_token_ids=frozenset({50}), forced_eos_position=3),
    ):
        marks = pack_sampler(sampler, 10).marks
        assert marks is not None
        assert not marks.any()


def test_sequences_lie_in_the_order_of_their_last_ids_and_among_those_in_their_own():
    biases = (((1, 7), 1.0), ((3,), 2.0), ((5, 6, 7), -np.inf), ((7,), 4.0), ((50, 1), 5.0), ((1, 50), 6.0))
    _, _, _, sequences, ids = pack_sampler(Sampler(SamplingParams(), 0, sequence_bias=biases), 10)
    assert sequences is not None
    assert sequences["token_id"].tolist() == [3, 7, 7, 7, -1]
    assert sequences["bias"].tolist() == [2, 1, -np.inf, 4, 0]
    assert sequences["ids_begin"].tolist() == [0, 0, 1, 3, 3]
    assert ids is not None
    assert ids.tolist() == [1, 5, 6]


def test_more_sequences_than_the_card_has_room_for_are_refused():
    fitting = tuple(((index % 10, 1), 1.0) for index in range(MAX_SEQUENCE_IDS // 2))
    assert pack_sampler(Sampler(SamplingParams(), 0, sequence_bias=fitting), 10).header[0]["num_sequences"] == 4096
    one_more = (*fitting, ((2,), 1.0))
    with pytest.raises(UsageError, match=r"have 8193 token ids in all, expected at most 8192 on a card: give fewer"):
        pack_sampler(Sampler(SamplingParams(), 0, sequence_bias=one_more), 10)
    assert UsageError.exit_code == 2
