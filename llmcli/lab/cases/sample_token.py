"""The sampler chain, from logits to the next token. The reference is the CPU's chain, whose draws have keys."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np

from llmcli.errors import CheckpointError, UsageError
from llmcli.kernels.device import Device
from llmcli.kernels.sample_token import IS_PROBLEM, NUM_RESULTS, RowLayout, sample_token, sample_token_cost
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem, Solver
from llmcli.runners.cuda.step.packed_sampler import pack_sampler
from llmcli.sampling.candidates import History, TokenMask, pack_mask
from llmcli.sampling.chain import Choice, choose
from llmcli.sampling.params import SPECS, Sampler, SamplingParams

# Sampler chains, and logits and prompts on which all of their filters act.

NUM_PROMPT_TOKENS = 40
OFF = {"top_p": 1.0, "temperature": 1.0}
# Texts of low ids continue these: the same last id several times, one bias alone, one that reaches far back.
SEQUENCES = (
    ((1, 2), 3.0), ((2,), -0.5), ((4, 1, 2), -1.25), ((0, 3), -np.inf), ((3, 5, 0), 0.1), ((5, 0), 0.2),
    ((2, 5, 0), 0.7), ((1, 1, 4), 2.5), ((1, 4), -np.inf), (tuple([3] * 100), 4.0), ((10**9, 1), 9.0),
    ((1, 10**9), 9.0),
)  # fmt: skip
BACKWARDS = ("xtc", "typical_p", "min_p", "top_p", "top_k", "top_n_sigma", "temperature", "mirostat")
# Forced ids are many, since some of the logits are -inf for half of the tokens.
EVERY_STEP = {
    "temperature": 1.3, "dynatemp_range": 0.5, "dynatemp_exponent": 0.7, "top_n_sigma": 6.0, "top_k": 300,
    "top_p": 0.98, "min_p": 0.0005, "typical_p": 0.93, "xtc_probability": 0.4, "xtc_threshold": 0.03,
    "mirostat_tau": 2.5, "encoder_repetition_penalty": 1.1, "repetition_penalty": 1.2, "presence_penalty": 0.4,
    "frequency_penalty": 0.3, "penalty_window": 90, "dry_multiplier": 0.8, "dry_window": 200, "min_new_tokens": 200,
    "eos_token_ids": frozenset({3, 5}), "dry_breaker_token_ids": frozenset({2, 7}),
    "logit_bias": {8: 1.0, 11: -1.5, 13: -np.inf, 10**9: 2.0}, "sequence_bias": SEQUENCES,
    "begin_suppress_token_ids": frozenset({1, 4}), "forced_eos_token_ids": frozenset(range(2, 15)),
    "forced_eos_position": 70,
}  # fmt: skip

# Settings besides OFF, by the chain's name: parameters and fields of Sampler.
CHAINS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy with penalties": {
        "temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.2,
        "dry_multiplier": 0.8, "logit_bias": {1: 2.0, 4: -np.inf}, "eos_token_ids": frozenset({0, 9}),
        "ignore_eos": True,
    },
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 3.0},
    "default": {"temperature": 0.8, "top_p": 0.95},
    "usual": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "top_k": {"top_k": 50},
    "top_k of many": {"temperature": 1.5, "top_k": 700},
    "top_p near 1": {"temperature": 2.0, "top_p": 0.9999},
    "min_p": {"min_p": 0.02},
    "typical_p": {"temperature": 0.9, "typical_p": 0.7},
    "xtc": {"temperature": 0.9, "xtc_probability": 0.6, "xtc_threshold": 0.05, "eos_token_ids": frozenset({1, 6})},
    "typical_p and xtc": {"typical_p": 0.5, "xtc_probability": 0.7, "xtc_threshold": 0.001},
    "penalties": {
        "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.15, "presence_penalty": -0.4,
        "frequency_penalty": 0.1, "penalty_window": 64,
    },
    "dry": {
        "temperature": 0.5, "dry_multiplier": 1.0, "dry_base": 2.0, "dry_allowed_length": 1, "dry_window": 12,
        "dry_breaker_token_ids": frozenset({0}),
    },
    "top_n_sigma": {"temperature": 0.8, "top_n_sigma": 1.5},
    "dynamic temperature": {"temperature": 0.9, "dynatemp_range": 0.6, "dynatemp_exponent": 1.7, "top_p": 0.97},
    "dynamic temperature from 0": {"temperature": 0.4, "dynatemp_range": 1.0, "top_n_sigma": 2.0},
    "mirostat": {"temperature": 0.8, "mirostat_tau": 3.0},
    "fast mirostat": {"temperature": 1.4, "top_k": 200, "mirostat_tau": 5.0, "mirostat_eta": 0.7},
    "mirostat and xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05, "mirostat_tau": 2.0, "mirostat_eta": 1.0},
    "sequences": {"temperature": 0.6, "sequence_bias": SEQUENCES, "encoder_repetition_penalty": 1.4},
    "greedy with sequences": {
        "temperature": 0, "sequence_bias": SEQUENCES, "encoder_repetition_penalty": 0.7, "repetition_penalty": 1.1,
        "begin_suppress_token_ids": frozenset({2, 3}), "forced_eos_token_ids": frozenset(range(3, 15)),
        "forced_eos_position": NUM_PROMPT_TOKENS + 3, "mirostat_tau": 2.0,
    },
    "begin and end": {
        "temperature": 0.7, "begin_suppress_token_ids": frozenset(range(12)), "repetition_penalty": 1.3,
        "forced_eos_token_ids": frozenset({*range(12), 10**9}), "forced_eos_position": NUM_PROMPT_TOKENS + 5,
        "eos_token_ids": frozenset({0}), "ignore_eos": True,
    },
    "temperature last": {
        "temperature": 1.6, "top_k": 60, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9,
        "order": ("top_k", "typical_p", "top_p", "min_p", "temperature"),
    },
    "temperature in the middle": {
        "temperature": 0.6, "dynatemp_range": 0.3, "top_n_sigma": 2.5, "typical_p": 0.8, "min_p": 0.02, "top_p": 0.9,
        "order": ("typical_p", "top_n_sigma", "temperature", "top_p", "min_p"),
    },
    "no temperature": {"top_p": 0.8, "typical_p": 0.9, "order": ("typical_p", "top_p")},
    "xtc first": {
        "temperature": 0.9, "xtc_probability": 0.7, "xtc_threshold": 0.02, "top_k": 40, "top_p": 0.9,
        "mirostat_tau": 3.0, "order": ("xtc", "top_p", "temperature", "top_k", "mirostat"),
    },
    "every step": EVERY_STEP,
    "every step backwards": EVERY_STEP | {"order": BACKWARDS},
}  # fmt: skip


def make_sampler(settings: Mapping[str, Any], seed: int, sample_index: int = 0) -> Sampler:
    """A sampler with everything off except the named parameters and fields."""
    settings = {"num_prompt_tokens": NUM_PROMPT_TOKENS} | dict(settings)
    params = {name: value for name, value in settings.items() if name in SPECS}
    others = {name: value for name, value in settings.items() if name not in SPECS}
    return Sampler(SamplingParams(**(OFF | params)), seed=seed, sample_index=sample_index, **others)


def make_logits(num_rows: int, vocab_size: int, seed: int) -> np.ndarray:
    """Rows of many kinds: a few likely tokens over a tail, flat, coarse (with ties), masked, far apart.

    Some low ids are likely, so that ends, breakers and biases play a part, and texts repeat themselves.
    Shapes: result [num_rows, vocab_size] float32
    """
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((num_rows, vocab_size)) * 2.5
    for row, values in enumerate(logits):
        values[rng.integers(0, vocab_size, 12)] += rng.uniform(2, 11, 12)
        values[rng.integers(0, min(vocab_size, 16), 6)] += rng.uniform(5, 12, 6)
        kind = row % 6
        if kind == 1:
            values *= 0.2
        if kind == 2:
            values[:] = np.round(values * 4) / 4
        if kind == 3:
            values[rng.permutation(vocab_size)[: vocab_size // 2]] = -np.inf
        if kind == 4:
            values *= 6
    return logits.astype(np.float32)


def make_prompts(num_rows: int, vocab_size: int, seed: int) -> list[np.ndarray]:
    """Prompts that repeat themselves, [NUM_PROMPT_TOKENS] int32 each."""
    rngs = map(np.random.default_rng, zip(repeat(seed), range(num_rows)))
    return [rng.integers(0, min(vocab_size, 6), NUM_PROMPT_TOKENS).astype(np.int32) for rng in rngs]


# Fields with which a chain may leave no token of a small vocabulary.
_BANS = {"eos_token_ids", "logit_bias", "sequence_bias", "begin_suppress_token_ids", "forced_eos_token_ids"}


def chains_for(vocab_size: int) -> list[Mapping[str, Any]]:
    """The chains that leave a token of any logits of this vocabulary."""
    return [settings for settings in CHAINS.values() if vocab_size > 16 or not _BANS & settings.keys()]


_UNUSED_LANE = 1
_STEP = 1  # of each row: the first
_NOT_IN_MASK = 4  # the number of the problem that the mask allows no token that the logits allow
# Mirostat's mu is compared by its bits: this many neighbours away is about 20 roundings of numbers 100 times as large.
# float64, in which they are compared, holds every 1024th.
_MU_NEIGHBOURS = 2.0**11 + 2.0**10


def case(
    samplers: Sequence[Sampler],
    logits: np.ndarray,
    num_free: int = 3,
    label: str = "",
    masks: Sequence[TokenMask | None] = (),
) -> Problem:
    """The first choice of each sampler's row. One lane is unused; rows have other indices than their lanes.

    Histories have room for `num_free` tokens after the prompt; a full row reports its token and stays. Without `masks`
    any token may be chosen.
    Shapes: logits float32 [num_samplers, vocab_size]
    """
    masks = masks or [None] * len(samplers)
    vocab_size, num_rows = logits.shape[1], len(samplers) + 1
    rows, history, state = _rows(samplers, masks, vocab_size, num_free)
    positions = np.full(len(samplers), NUM_PROMPT_TOKENS - 1, np.int32)
    inputs = {
        "logits": np.insert(logits, _UNUSED_LANE, np.nan, axis=0),
        "rows": np.insert(rows, _UNUSED_LANE, -1),
        "positions_before": np.insert(positions, _UNUSED_LANE, 2**30),
        "token_ids_before": np.full(num_rows, -1, np.int32),
        "history_before": history,
        "state_before": state,
    }
    changed = {name: inputs[f"{name}_before"] for name in ("positions", "token_ids", "history")}

    def reference() -> dict[str, Expected]:
        values = {name: array.astype(np.float64) for name, array in changed.items()}
        results, bound = np.zeros((2, num_rows, 2, NUM_RESULTS))
        for lane, row in enumerate(inputs["rows"]):
            if row < 0:
                continue
            place = lane - (lane > _UNUSED_LANE)
            tokens = history[row, :NUM_PROMPT_TOKENS]
            choice = _choose(inputs["logits"][lane], tokens, samplers[place], masks[place])
            _report(results, bound, row, 0, choice)
            if isinstance(choice, Choice) and num_free:
                values["positions"][lane] += 1
                values["token_ids"][row] = values["history"][row, NUM_PROMPT_TOKENS] = choice.token_id
        return {**{name: Expected(array, 0.0) for name, array in values.items()}, "results": Expected(results, bound)}

    def solve(device: Device, arrays: Arrays) -> None:
        names = ("logits", "rows", "positions", "token_ids", "history", "state", "results")
        sample_token(device, **{name: arrays[name] for name in names})

    return _problem(inputs, changed, reference, solve, label)


def _rows(
    samplers: Sequence[Sampler], masks: Sequence[TokenMask | None], vocab_size: int, num_free: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each sampler's row, among one row more than there are samplers; and the histories and states of all rows."""
    layout, num_rows = RowLayout(vocab_size), len(samplers) + 1
    rows = np.random.default_rng(num_rows).permutation(num_rows)[: len(samplers)].astype(np.int32)
    history = np.full((num_rows, NUM_PROMPT_TOKENS + num_free), -1, np.int32)
    history[rows, :NUM_PROMPT_TOKENS] = make_prompts(len(samplers), vocab_size, 5)
    state = np.zeros((num_rows, layout.row_bytes), np.uint8)
    for row, sampler, mask in zip(rows, samplers, masks, strict=True):
        places = pack_sampler(sampler, vocab_size).places(layout)
        if mask is not None:
            places += [(layout.uses_mask_start, np.ones(1, np.int32)), (layout.mask_start, mask)]
        for place, values in places:
            state[row, place : place + values.nbytes] = values.view(np.uint8)
    return rows, history, state


def drafts_case(
    samplers: Sequence[Sampler], logits: np.ndarray, num_right: Sequence[int], num_free: int = 8, label: str = "drafts"
) -> Problem:
    """A chain of choices for each sampler's row, after its last token and after drafts, one launch a choice.

    Each row has `num_right` right drafts, then a wrong one, then those that the chain would choose if all earlier
    drafts were kept. A choice that fails, or fills the history, ends the chain as a wrong draft does.
    Shapes: logits float32 [num_samplers, num_choices, vocab_size]; num_right [num_samplers]
    """
    num_choices, vocab_size = logits.shape[1:]
    num_rows = len(samplers) + 1
    rows, history, state = _rows(samplers, [None] * len(samplers), vocab_size, num_free)
    chains = [
        _choose_on(sampler, of_row, history[row, :NUM_PROMPT_TOKENS], num_free)
        for sampler, of_row, row in zip(samplers, logits, rows, strict=True)
    ]
    drafts = np.full((len(samplers), num_choices), -1, np.int32)
    for of_row, chain, right in zip(drafts, chains, num_right, strict=True):
        said = [choice.token_id for choice in chain if isinstance(choice, Choice)][: num_choices - 1]
        of_row[1 : len(said) + 1] = said
        of_row[right + 1 : right + 2] = (of_row[right + 1 : right + 2] + 1) % vocab_size
    first = NUM_PROMPT_TOKENS - 1
    inputs = {
        "logits": logits.reshape(-1, vocab_size),
        "drafts": drafts.reshape(-1),
        "rows_before": np.repeat(rows, num_choices),
        "positions_before": np.tile(np.arange(first, first + num_choices, dtype=np.int32), len(samplers)),
        "token_ids_before": np.full(num_rows, -1, np.int32),
        "history_before": history,
        "state_before": state,
    }
    changed = {name: inputs[f"{name}_before"] for name in ("rows", "positions", "token_ids", "history")}

    def reference() -> dict[str, Expected]:
        values = {name: array.astype(np.float64) for name, array in changed.items()}
        results, bound = np.zeros((2, num_rows, 2, NUM_RESULTS))
        for number, (row, chain) in enumerate(zip(rows, chains, strict=True)):
            lanes = range(number * num_choices, (number + 1) * num_choices)
            for place, (lane, choice) in enumerate(zip(lanes, chain, strict=False)):
                _report(results, bound, row, place, choice)
                if not isinstance(choice, Choice) or place == num_free:
                    break  # a problem, or the row is full
                values["positions"][lane] += 1
                values["token_ids"][row] = values["history"][row, NUM_PROMPT_TOKENS + place] = choice.token_id
                if place + 1 == num_choices or drafts[number, place + 1] != choice.token_id:
                    break
            values["rows"][lane + 1 : lanes.stop] = -1
        return {**{name: Expected(array, 0.0) for name, array in values.items()}, "results": Expected(results, bound)}

    def solve(device: Device, arrays: Arrays) -> None:
        shared = {name: arrays[name] for name in ("token_ids", "history", "state", "results")}
        for lane in range(len(samplers) * num_choices):
            this, following = slice(lane, lane + 1), slice(lane + 1, lane + 2)
            has_draft = (lane + 1) % num_choices > 0
            of_lane = {name: arrays[name][this] for name in ("logits", "rows", "positions")}
            next_row = arrays["rows"][following] if has_draft else None
            draft = arrays["drafts"][following] if has_draft else None
            sample_token(device, **of_lane, **shared, next_row=next_row, draft=draft)

    return _problem(inputs, changed, reference, solve, label)


def _problem(
    inputs: dict[str, np.ndarray],
    changed: dict[str, np.ndarray],
    reference: Callable[[], dict[str, Expected]],
    solve: Solver,
    label: str,
) -> Problem:
    """`changed` are the arrays that the kernel changes, before it does; the state is written, too, but is its own."""
    vocab_size, num_rows = inputs["logits"].shape[1], len(inputs["state_before"])
    rows = inputs["rows" if "rows" in inputs else "rows_before"]
    return Problem(
        "sample_token",
        {"num_lanes": len(rows), "vocab_size": vocab_size},
        inputs=inputs,
        outputs={
            **{name: Output(array.shape, array.dtype, initial=f"{name}_before") for name, array in changed.items()},
            "results": Output((num_rows, 2, NUM_RESULTS), np.uint64, holds_zeros=True),
        },
        scratch={"state": Output(inputs["state_before"].shape, np.uint8, initial="state_before")},
        reference=reference,
        cost=sample_token_cost(int((rows >= 0).sum()), vocab_size),
        solvers={ENGINE: solve},
        label=label,
    )


def _report(results: np.ndarray, bound: np.ndarray, row: int, place: int, choice: Choice | int) -> None:
    """Write what the kernel reports of a row's choice, or the number of its problem, `place` steps after the first."""
    step = _STEP + place
    if not isinstance(choice, Choice):
        results[row, 0, step] = step << 32 | IS_PROBLEM | choice
        return
    results[row, 0, step] = step << 32 | choice.token_id
    if choice.mirostat_mu is not None:
        results[row, 1, step] = np.float64(choice.mirostat_mu).view(np.uint64)
        bound[row, 1, step] = _MU_NEIGHBOURS * (place + 1)


def _choose(logits: np.ndarray, tokens: History, sampler: Sampler, mask: TokenMask | None = None) -> Choice | int:
    """The CPU's choice, or the kernel's number for what leaves no token to choose."""
    try:
        return choose(logits, tokens, sampler, mask=mask)
    except UsageError:
        return _NOT_IN_MASK
    except CheckpointError:
        if np.isnan(logits).any():
            return 1
        return 2 if np.isposinf(logits).any() else 3  # infinity, or only minus infinity


def _choose_on(sampler: Sampler, logits: np.ndarray, prompt: np.ndarray, num_free: int) -> list[Choice | int]:
    """Choice after choice from a prompt on, up to a problem, returned as its number, or until the history is full."""
    tokens, chain = prompt.tolist(), list[Choice | int]()
    for of_token in logits[: num_free + 1]:
        choice = _choose(of_token, tokens, sampler)
        chain.append(choice)
        if not isinstance(choice, Choice):
            return chain
        tokens.append(choice.token_id)
        sampler = replace(sampler, mirostat_mu=choice.mirostat_mu)
    return chain


def chains_case(vocab_size: int, seed: int) -> Problem:
    """All chains, one a row."""
    samplers = [make_sampler(settings, seed, index) for index, settings in enumerate(chains_for(vocab_size))]
    return case(samplers, make_logits(len(samplers), vocab_size, seed))


def masks_case(vocab_size: int, seed: int) -> Problem:
    """The chains that ban no token, each under another mask: few tokens, all, the last one or none, half of them."""
    samplers = [make_sampler(settings, seed, index) for index, settings in enumerate(chains_for(16))]
    shares = np.resize([0.02, 1.0, 0.0, 0.5], len(samplers))
    is_allowed = np.random.default_rng(seed).random((len(samplers), vocab_size)) < shares[:, None]
    is_allowed[2::8, -1] = True
    masks = [pack_mask(one) for one in is_allowed]
    return case(samplers, make_logits(len(samplers), vocab_size, seed), label="masks", masks=masks)


def problems_case(vocab_size: int) -> Problem:
    """Logits that leave no token: these rows stay as they are, and report the number of their problem."""
    samplers = [make_sampler(CHAINS[name], 3) for name in ("greedy", "usual") for _ in range(4)]
    logits = make_logits(len(samplers), vocab_size, 1)
    logits[0::4, vocab_size // 2] = np.nan
    logits[1::4, vocab_size // 2] = np.inf
    logits[2::4] = -np.inf  # the fourth row of each chain chooses a token
    return case(samplers, logits, label="no token")


def draft_chains_case(vocab_size: int, seed: int) -> Problem:
    """All chains, one a row, with three drafts; none, one, two or all of them are right."""
    samplers = [make_sampler(settings, seed, index) for index, settings in enumerate(chains_for(vocab_size))]
    logits = make_logits(4 * len(samplers), vocab_size, seed).reshape(len(samplers), 4, vocab_size)
    return drafts_case(samplers, logits, np.resize([3, 0, 2, 3, 1], len(samplers)).tolist())


def draft_problems_case(vocab_size: int) -> Problem:
    """Right drafts after which a choice fails: after the first, the second, the last; and one row where none fails."""
    samplers = [make_sampler(CHAINS[name], 3) for name in ("greedy", "usual") for _ in range(4)]
    logits = make_logits(4 * len(samplers), vocab_size, 1).reshape(len(samplers), 4, vocab_size)
    for place, row in zip((0, 1, 3), range(3), strict=True):
        logits[row::4, place, vocab_size // 2] = np.nan
    return drafts_case(samplers, logits, [3] * len(samplers), label="no token behind drafts")


def _checks() -> Iterator[Problem]:
    for vocab_size in (1, 33, 2500, 32_000):
        for seed in range(3):
            yield chains_case(vocab_size, seed)
    large = [make_sampler(CHAINS[name], 2**63, index) for index, name in enumerate(("usual", "every step"))]
    yield case(large, make_logits(2, 128_256, 4))
    full = [make_sampler(CHAINS[name], 7) for name in ("greedy", "default", "mirostat")]
    yield case(full, make_logits(3, 600, 5), num_free=0, label="full rows")
    yield problems_case(600)
    yield problems_case(601)  # rows without whole vectors of tokens
    for vocab_size in (33, 2500, 32_000):
        yield masks_case(vocab_size, 11)
    for vocab_size in (33, 2500):
        yield draft_chains_case(vocab_size, 13)
    yield draft_problems_case(600)
    filled = make_logits(4 * len(full), 600, 6).reshape(len(full), 4, 600)
    yield drafts_case(full, filled, [3] * len(full), num_free=2, label="drafts that fill their rows")


def _typical() -> Problem:
    return case([make_sampler(CHAINS["usual"], 1)], make_logits(1, 128_256, 1), num_free=1000)


SAMPLE_TOKEN = KernelCases("sample_token", _checks, _typical)
