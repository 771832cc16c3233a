"""Sampling parameters, the order of the filters, and `Sampler`, the value made from them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from llmcli.differences import shown
from llmcli.errors import CheckpointError, UsageError

# Sampling parameters, each declared once with default, range and help, and the source of each value of a run.
#
# Order of precedence: flag, preset, the model's generation_config.json, default.

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class ParamSpec:
    """The meaning of one parameter and its valid values; its type, int or float, is the type of `default`."""

    default: int | float
    help: str
    minimum: int | float
    maximum: int | float = math.inf
    excludes_minimum: bool = False
    excludes_maximum: bool = False

    @property
    def expected(self) -> str:
        """The valid range in words, for help texts and errors, such as `a number > 0 and <= 1`."""
        text = "an integer" if isinstance(self.default, int) else "a number"
        text += f" {'>' if self.excludes_minimum else '>='} {self.minimum}"
        if self.maximum < math.inf:
            text += f" and {'<' if self.excludes_maximum else '<='} {self.maximum}"
        return text

    def contains(self, value: int | float) -> bool:
        """Whether a number lies in the range; infinities and NaN never do."""
        above = value > self.minimum or (value == self.minimum and not self.excludes_minimum)
        below = value < self.maximum or (value == self.maximum and not self.excludes_maximum)
        return above and below and value != math.inf


def _param(spec: ParamSpec) -> Any:
    return field(default=spec.default, metadata={"spec": spec})


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen from the logits. The defaults suit raw text generation with a base model.

    They trust the model and only trim what it is unsure of. Top-p cuts the unreliable tail of a flat distribution and
    does nothing to a sharp one, unlike a fixed top-k. A temperature slightly below 1 keeps long texts on topic. A
    repetition penalty distorts names, code and rhyme, so it is off by default.

    Names are transformers' where it has the parameter, otherwise OpenAI's or llama.cpp's. A window of 0 means the whole
    text, so that 0 is neutral throughout. The range of presence and frequency penalty is OpenAI's and vLLM's.

    Raises: UsageError for a wrong type or a value out of range.
    """

    temperature: float = _param(
        ParamSpec(0.8, "Randomness: below 1 safer, above 1 wilder; 0 always takes the likeliest token.", 0)
    )
    dynatemp_range: float = _param(
        ParamSpec(0.0, "Vary the temperature by this much with the uncertainty of the model; 0 is off.", 0)
    )
    dynatemp_exponent: float = _param(
        ParamSpec(
            1.0, "Dynamic temperature: above 1, it rises only where the model is very unsure.", 0, excludes_minimum=True
        )
    )
    top_n_sigma: float = _param(
        ParamSpec(0.0, "Keep tokens within this many standard deviations of the highest logit; 0 is off.", 0)
    )
    top_k: int = _param(ParamSpec(0, "Keep the K likeliest tokens; 0 is off.", 0))
    top_p: float = _param(
        ParamSpec(
            0.95,
            "Keep the likeliest tokens until their probabilities add up to this; 1 is off.",
            0,
            1,
            excludes_minimum=True,
        )
    )
    min_p: float = _param(
        ParamSpec(
            0.0,
            "Keep tokens at least this fraction as likely as the likeliest one; 0 is off.",
            0,
            1,
            excludes_maximum=True,
        )
    )
    typical_p: float = _param(
        ParamSpec(
            1.0,
            "Keep the most typical tokens until their probabilities add up to this; 1 is off.",
            0,
            1,
            excludes_minimum=True,
        )
    )
    xtc_probability: float = _param(
        ParamSpec(0.0, "XTC: how often to remove all likely tokens but the least likely of them; 0 is off.", 0, 1)
    )
    xtc_threshold: float = _param(
        ParamSpec(0.1, "XTC: a token is likely from this probability on.", 0, 0.5, excludes_minimum=True)
    )
    mirostat_tau: float = _param(
        ParamSpec(0.0, "Mirostat 2: keep the surprise near this many bits per token; 0 is off.", 0)
    )
    mirostat_eta: float = _param(ParamSpec(0.1, "Mirostat 2: how fast to correct the surprise.", 0))
    encoder_repetition_penalty: float = _param(
        ParamSpec(
            1.0,
            "Make tokens of the prompt likelier by this factor; below 1, less likely; 1 is off.",
            0,
            excludes_minimum=True,
        )
    )
    repetition_penalty: float = _param(
        ParamSpec(
            1.0,
            "Make tokens of the prompt and the text less likely by this factor; 1 is off.",
            0,
            excludes_minimum=True,
        )
    )
    presence_penalty: float = _param(
        ParamSpec(0.0, "Lower the logit of each token already generated by this; 0 is off.", -2, 2)
    )
    frequency_penalty: float = _param(
        ParamSpec(0.0, "Lower the logit of a token by this each time it was generated; 0 is off.", -2, 2)
    )
    penalty_window: int = _param(
        ParamSpec(0, "How many last tokens the repetition, presence and frequency penalties see; 0 is all.", 0)
    )
    dry_multiplier: float = _param(
        ParamSpec(0.0, "DRY: penalty on tokens that extend a verbatim repetition; 0 is off.", 0)
    )
    dry_base: float = _param(ParamSpec(1.75, "DRY: factor by which the penalty grows with each repeated token.", 1))
    dry_allowed_length: int = _param(ParamSpec(2, "DRY: allow repetitions of up to this many tokens.", 1))
    dry_window: int = _param(ParamSpec(0, "DRY: how many last tokens to look at; 0 is all.", 0))
    min_new_tokens: int = _param(ParamSpec(0, "Ban end-of-text tokens until there are this many new tokens.", 0))

    def __post_init__(self) -> None:
        for name in SPECS:
            object.__setattr__(self, name, check_param(name, getattr(self, name)))


SPECS: Mapping[str, ParamSpec] = {item.name: item.metadata["spec"] for item in fields(SamplingParams)}


@dataclass(frozen=True)
class ResolvedSampling:
    """The parameters of a run and, by parameter name, the source of each value.

    `others` are settings that are not numbers, in words and with their sources; those that are off are left out.
    """

    params: SamplingParams
    sources: Mapping[str, str]
    others: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[str, int | float | str, str]]:
        """Name, value and source of every setting."""
        for name, value in vars(self.params).items():
            yield name, value, self.sources[name]
        for name, (text, source) in self.others.items():
            yield name, text, source


def check_param(name: str, value: object, source: str | None = None) -> int | float:
    """Return `value` in the type of parameter `name`; an integer is a valid number, a bool or a string is not.

    Raises: UsageError that names parameter, value, source and range; CheckpointError if the source is GENERATION_CONFIG
    """
    spec = SPECS[name]
    accepted = int if isinstance(spec.default, int) else (int, float)
    if isinstance(value, accepted) and not isinstance(value, bool) and spec.contains(value):
        try:
            return type(spec.default)(value)
        except OverflowError:
            pass  # an integer beyond the largest float is reported like any other value out of range
    origin = f" ({source})" if source else ""
    remedy = f"; override it with --{name.replace('_', '-')}" if source not in (None, "flag") else ""
    error = CheckpointError if source == GENERATION_CONFIG else UsageError
    raise error(f"{name} is {_shown(value)}{origin}, expected {spec.expected}{remedy}")


def _shown(value: object) -> str:
    """A value for a message; Python itself refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 400:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def resolve(
    flags: Mapping[str, object],
    preset: Mapping[str, object],
    preset_name: str,
    generation_config: Mapping[str, object],
) -> ResolvedSampling:
    """Take each parameter from the first of flags, preset, generation_config and default that names it.

    A flag that is None was not given, and a null in generation_config counts as missing. Only the value that wins is
    checked, so a flag can override a bad file. An empty `preset` means that none is used.

    generation_config follows transformers, with one difference: `do_sample: false` means greedy, that is temperature
    0; without `do_sample` transformers is greedy too, but there the author has said nothing, as in the many files that
    hold only token ids, so the file's values are used and the rest are our defaults. transformers' own fallbacks
    (temperature 1, top_k 50) are never assumed. Keys that are not sampling parameters are ignored.

    Raises: UsageError for a bad value, and for a key of `preset` that is not a parameter; CheckpointError for a bad
    value of generation_config, and for a do_sample that is not a bool
    """
    for key in preset:
        if key not in SPECS:
            raise UsageError(f"unknown parameter {key!r} (preset {preset_name}), expected one of {', '.join(SPECS)}")
    model_values = {name: (value, GENERATION_CONFIG) for name, value in generation_config.items() if value is not None}
    do_sample = generation_config.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise CheckpointError(
            f"do_sample is {do_sample!r} ({GENERATION_CONFIG}), expected true or false; correct the file"
        )
    if do_sample is False:
        model_values["temperature"] = (0.0, f"{GENERATION_CONFIG}, do_sample false")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, spec in SPECS.items():
        value: object
        if flags.get(name) is not None:
            value, source = flags[name], "flag"
        elif name in preset:
            value, source = preset[name], f"preset {preset_name}"
        elif name in model_values:
            value, source = model_values[name]
        else:
            value, source = spec.default, "default"
        values[name] = check_param(name, value, source)
        sources[name] = source
    return ResolvedSampling(SamplingParams(**values), sources)


# The order of the filters: the usual one, and the rules for others.

# The filters in their usual order, each with the parameter values at which it does nothing.
OFF_VALUES: Mapping[str, Mapping[str, float]] = {
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "typical_p": {"typical_p": 1.0},
    "xtc": {"xtc_probability": 0.0},
    "mirostat": {"mirostat_tau": 0.0},
}
DEFAULT_ORDER = tuple(OFF_VALUES)


def check_order(order: Sequence[str], params: SamplingParams) -> None:
    """Refuse an order that names a filter twice or an unknown one, or leaves out one that the parameters switch on.

    If named, mirostat must come last: it measures the surprise of what is drawn from its own candidates. At
    temperature 0 no filter runs, so any may be missing.

    Raises: UsageError
    """
    for name in order:
        if name not in OFF_VALUES:
            raise UsageError(f"the sampler order names {name!r}, expected some of {', '.join(DEFAULT_ORDER)}")
        if order.count(name) > 1:
            raise UsageError(f"the sampler order names {name} {order.count(name)} times, expected once")
    if "mirostat" in order[:-1]:
        raise UsageError(f"the sampler order has mirostat before {order[-1]}, expected it at the end")
    if params.temperature == 0:
        return
    for step, values in OFF_VALUES.items():
        for name, off in values.items():
            value = getattr(params, name)
            if step not in order and value != off:
                raise UsageError(
                    f"the sampler order leaves out {step}, but {name} is {value}; name it too, or set {name} to {off}"
                )


def leave_out(resolved: ResolvedSampling, order: Sequence[str]) -> ResolvedSampling:
    """Switch off the filters that the user's order leaves out, if they are on only by our defaults.

    Values set by anybody stay, so that `check_order` refuses them.
    """
    values: dict[str, Any] = {
        name: off
        for step, params in OFF_VALUES.items()
        for name, off in params.items()
        if step not in order and resolved.sources[name] == "default" and getattr(resolved.params, name) != off
    }
    return replace(
        resolved,
        params=replace(resolved.params, **values),
        sources={**resolved.sources, **dict.fromkeys(values, "not in the sampler order")},
        others={**resolved.others, "sampler_order": (", ".join(order), "flag")},
    )


# `Sampler`: everything that decides a draw except logits and history, as one plain value.

SEED_BITS = 64
SAMPLE_INDEX_BITS = 32


@dataclass(frozen=True)
class Sampler:
    """The parameters, the seed, the sample's number, and what the chain must know of prompt and tokenizer.

    - `num_prompt_tokens`: how much of the history is prompt. The presence and frequency penalties and min_new_tokens
      count from there.
    - `eos_token_ids`: the tokens that end a text. min_new_tokens bans them for a while, `ignore_eos` always, as
      llama.cpp's flag does. vLLM's lets the model choose one and continues after it, but what a model writes after
      the end of a text does not continue that text. XTC spares them.
    - `logit_bias`: added to a token's logit; -inf bans it. Ids outside the vocabulary change nothing.
    - `sequence_bias`: for each sequence of token ids, what is added to the logit of its last token if the text ends in
      the others; -inf bans it there. The amounts of several sequences for one token add up.
    - `begin_suppress_token_ids`: tokens banned as the first generated token.
    - `forced_eos_token_ids`: at position `forced_eos_position` one of these is chosen, whatever the logits say.
    - `dry_breaker_token_ids`: no repetition for DRY extends across these tokens. For a string such as a newline, give
      all tokens whose text contains it, as in llama.cpp.
    - `order`: the filters that run, in their order, named as in `chain.FILTERS`.
    - `mirostat_mu`: mirostat's state before this draw, in bits; None at the first token of a text, for 2 * tau.

    Raises: UsageError for a seed outside [0, 2^64), a sample index outside [0, 2^32), a bias that is NaN
    or +inf, or of a negative token id, a sequence without tokens; for an order as `check_order`.
    """

    params: SamplingParams
    seed: int
    sample_index: int = 0
    num_prompt_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    begin_suppress_token_ids: frozenset[int] = frozenset()
    forced_eos_token_ids: frozenset[int] = frozenset()
    forced_eos_position: int | None = None
    dry_breaker_token_ids: frozenset[int] = frozenset()
    order: tuple[str, ...] = DEFAULT_ORDER
    mirostat_mu: float | None = None

    def __post_init__(self) -> None:
        for name, bits in (("seed", SEED_BITS), ("sample_index", SAMPLE_INDEX_BITS)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**bits:
                raise UsageError(f"{name} is {value!r}, expected an integer >= 0 and < 2^{bits}")
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or math.isnan(bias) or bias == math.inf:
                raise UsageError(
                    f"the logit bias of token {token_id} is {bias}, "
                    "expected a token id >= 0 and a finite number or -inf"
                )
        for token_ids, bias in self.sequence_bias:
            if not token_ids or min(token_ids) < 0 or math.isnan(bias) or bias == math.inf:
                raise UsageError(
                    f"the bias of the sequence {list(token_ids)} is {bias}, "
                    "expected token ids >= 0 and a finite number or -inf"
                )
        check_order(self.order, self.params)


# `logit_bias` in OpenAI's form.


def read_logit_bias(value: Any) -> dict[int, float]:
    """Token ids and what is added to their logits. Keys in JSON are strings, so the ids are.

    Raises: ValueError, with a text that continues the key's name
    """
    problem = ValueError(f'{shown(value)}, expected token ids and numbers, such as {{"50256": -100}}')
    if not isinstance(value, dict):
        raise problem
    biases = {}
    for key, bias in value.items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool) and math.isfinite(bias)
        if not (key.isascii() and key.isdecimal() and len(key) < 19 and is_number):
            raise problem
        biases[int(key)] = float(bias)
    return biases
