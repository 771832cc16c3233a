"""Sampling parameters, each declared once with default, range and help, and where each value of a run comes from.

Order of precedence: flag, preset, the model's generation_config.json, default.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from llmcli.errors import CheckpointError, UsageError

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class ParamSpec:
    """What one parameter means and which values it takes; its type, int or float, is the type of `default`."""

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

    They trust the model and only trim what it is unsure of: top-p cuts the unreliable tail where the distribution is
    flat and does nothing where it is sharp, unlike a fixed top-k; a temperature slightly below 1 keeps long texts on
    topic; a repetition penalty distorts names, code and rhyme, so it is off unless asked for.

    Names are transformers' where it has the parameter, else OpenAI's or llama.cpp's, with a window of 0 for the whole
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

    `others` are settings that are not numbers, each in words and with its source; none that is off.
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
    """A value for a message; Python itself refuses to write integers of thousands of digits."""
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

    A flag that is None was not given, and a null in generation_config says nothing. Of a parameter's values only the
    one that wins is checked, so a flag can override a bad file. An empty `preset` means that none is used.

    generation_config follows transformers, with one difference: `do_sample: false` means greedy, that is temperature
    0; without `do_sample` transformers is greedy too, but there it means that the author said nothing, as in the
    many files that hold only token ids, so the values the file names are used and the rest are our defaults.
    transformers' own fallbacks (temperature 1, top_k 50) are never assumed. Keys that are not sampling parameters
    are ignored.

    Raises: UsageError for a bad value, and for a key of `preset` that is no parameter; CheckpointError for a bad value
    of generation_config, and for a do_sample that is no bool
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
