"""`pack_sampler`: packs a `Sampler` in the form that sample_token reads. Nothing here needs CuPy.

The header has a field for each sampling parameter but those in `DERIVED`, under the same name. A parameter without a
field is an error, so none is left out silently.
"""

import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UsageError
from llmcli.kernels.sample_token import (
    IS_BREAKER,
    IS_END,
    IS_FORCED,
    IS_SUPPRESSED,
    MAX_SEQUENCE_IDS,
    NUM_DRY_AMOUNTS,
    ROW_SAMPLER,
    SEQUENCE,
    STEPS,
    RowLayout,
)
from llmcli.sampling.chain import current_mu
from llmcli.sampling.params import OFF_VALUES, SPECS, Sampler, SamplingParams

# The card counts in 32 bits. A larger window, limit or number of tokens has the same effect as this one.
_LARGEST_COUNT = 2**31 - 1 - NUM_DRY_AMOUNTS

# Parameters that the header holds in another form, and the fields that they become.
DERIVED = {
    "dynatemp_range": ("dynatemp_low", "dynatemp_high"),
    "min_p": ("log_min_p",),
    "dry_multiplier": ("uses_dry", "dry_amounts"),
    "dry_base": ("dry_amounts",),
}


class PackedSampler(NamedTuple):
    """A `Sampler` as sample_token reads it. An array that no step reads is None.

    Shapes: header [1] ROW_SAMPLER; bias [vocab_size] float64; marks [vocab_size] uint8; sequences [num_sequences + 1]
    SEQUENCE, sequence_ids [any] int32, see RowLayout
    """

    header: NDArray[np.void]
    bias: NDArray[np.float64] | None
    marks: NDArray[np.uint8] | None
    sequences: NDArray[np.void] | None
    sequence_ids: NDArray[np.int32] | None

    def places(self, layout: RowLayout) -> list[tuple[int, NDArray[Any]]]:
        """Where each array begins in a row's state, and the array. Units: bytes"""
        arrays = (
            (0, self.header),
            (layout.bias_start, self.bias),
            (layout.marks_start, self.marks),
            (layout.sequences_start, self.sequences),
            (layout.sequence_ids_start, self.sequence_ids),
        )
        return [(start, values) for start, values in arrays if values is not None]


def pack_sampler(sampler: Sampler, vocab_size: int) -> PackedSampler:
    """Pack a sampler for a vocabulary; token ids outside it are left out.

    Raises: UsageError if its sequences have more token ids than a row's state has room for
    """
    header = np.zeros(1, ROW_SAMPLER)
    _pack_params(sampler.params, header)
    codes = [STEPS.index(name) + 1 for name in _steps(sampler, vocab_size)]
    header["steps"][0, : len(codes)] = codes
    header["mirostat_mu"] = current_mu(sampler)
    header["seed"] = sampler.seed
    header["sample_index"] = sampler.sample_index
    header["num_prompt_tokens"] = min(sampler.num_prompt_tokens, _LARGEST_COUNT)
    header["ignores_ends"] = sampler.ignore_eos

    biased = [token_id for token_id in sampler.logit_bias if token_id < vocab_size]
    bias = np.zeros(vocab_size) if biased else None
    if bias is not None:
        bias[biased] = [sampler.logit_bias[token_id] for token_id in biased]
    header["uses_bias"] = bool(biased)
    marks = np.zeros(vocab_size, np.uint8)
    for mark, token_ids in (
        (IS_END, sampler.eos_token_ids),
        (IS_BREAKER, sampler.dry_breaker_token_ids),
        (IS_SUPPRESSED, sampler.begin_suppress_token_ids),
        (IS_FORCED, sampler.forced_eos_token_ids),
    ):
        marks[[token_id for token_id in token_ids if 0 <= token_id < vocab_size]] |= mark
    header["uses_ends"] = bool((marks & IS_END).any())
    header["suppresses_begin"] = bool((marks & IS_SUPPRESSED).any())
    # Forced ids that are all outside the vocabulary leave no token: an error, unlike having no forced ids.
    position = sampler.forced_eos_position if sampler.forced_eos_token_ids else None
    is_forced = position is not None
    header["forced_position"] = -1 if position is None else min(position, _LARGEST_COUNT)
    # DRY reads the marks of every token, so it needs them even without breakers.
    uses_marks = any(header[name][0] for name in ("uses_ends", "suppresses_begin", "uses_dry")) or is_forced
    return PackedSampler(header, bias, marks if uses_marks else None, *_pack_sequences(sampler, vocab_size, header))


def _pack_params(params: SamplingParams, header: NDArray[np.void]) -> None:
    """Fill in the header from the sampling parameters; a parameter without a field is an error."""
    for name, spec in SPECS.items():
        if name not in DERIVED:
            value = getattr(params, name)
            header[name] = min(value, _LARGEST_COUNT) if isinstance(spec.default, int) else value
    header["dynatemp_low"] = max(params.temperature - params.dynatemp_range, 0.0)
    header["dynatemp_high"] = min(params.temperature + params.dynatemp_range, sys.float_info.max)
    header["log_min_p"] = np.log(params.min_p) if params.min_p > 0 else -np.inf
    header["uses_dry"] = params.dry_multiplier != 0
    if params.dry_multiplier != 0:
        with np.errstate(over="ignore"):  # the kernel clips, as the host does
            header["dry_amounts"] = -params.dry_multiplier * np.power(params.dry_base, np.arange(NUM_DRY_AMOUNTS))


def _steps(sampler: Sampler, vocab_size: int) -> list[str]:
    """The filters that are on, in the sampler's order; with mirostat also the step that moves its mu."""
    params = sampler.params
    steps = [
        name
        for name in sampler.order
        if name == "temperature"  # always on: it moves the highest score to 0
        or any(getattr(params, parameter) != off for parameter, off in OFF_VALUES[name].items())
    ]
    if params.top_k >= vocab_size and "top_k" in steps:
        steps.remove("top_k")
    return [*steps, "text_surprise"] if "mirostat" in steps else steps


def _pack_sequences(
    sampler: Sampler, vocab_size: int, header: NDArray[np.void]
) -> tuple[NDArray[np.void] | None, NDArray[np.int32] | None]:
    known = [(token_ids, bias) for token_ids, bias in sampler.sequence_bias if max(token_ids) < vocab_size]
    num_ids = sum(len(token_ids) for token_ids, _ in known)
    if num_ids > MAX_SEQUENCE_IDS:
        raise UsageError(
            f"the sequences with a bias have {num_ids} token ids in all, expected at most {MAX_SEQUENCE_IDS} on a "
            "card: give fewer or shorter ones"
        )
    header["num_sequences"] = len(known)
    if not known:
        return None, None
    known.sort(key=lambda one: one[0][-1])  # stable: the biases of a token are added up in their order
    sequences = np.zeros(len(known) + 1, SEQUENCE)
    sequences["bias"][:-1] = [bias for _, bias in known]
    sequences["token_id"] = [*(token_ids[-1] for token_ids, _ in known), -1]
    sequences["ids_begin"][1:] = np.cumsum([len(token_ids) - 1 for token_ids, _ in known])
    before = [token_id for token_ids, _ in known for token_id in token_ids[:-1]]
    return sequences, np.array(before, np.int32) if before else None
