"""Sampler settings that are not single numbers: `--logit-bias`, `--sampler-order`, `--dry-breaker`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmcli.cli.prompt import refuse_undecoded
from llmcli.errors import UsageError

NO_BREAKERS = "none"


@dataclass(frozen=True)
class SamplerFlags:
    """What the command line says of the sampler beside numbers; None where it says nothing."""

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    order: tuple[str, ...] | None = None
    dry_breakers: tuple[str, ...] | None = None
    ignore_eos: bool = False


def parse_sampler_flags(
    logit_bias: Sequence[str] | None,
    sampler_order: str | None,
    dry_breakers: Sequence[str] | None,
    *,
    ignore_eos: bool = False,
) -> SamplerFlags:
    """The flags as values; names of steps are checked with the parameters, when the sampler is made.

    Raises: UsageError for what no sampler could be asked for.
    """
    return SamplerFlags(
        parse_logit_bias(logit_bias or []),
        None if sampler_order is None else _parse_order(sampler_order),
        None if dry_breakers is None else _parse_breakers(dry_breakers),
        ignore_eos,
    )


def parse_logit_bias(flags: Sequence[str]) -> Mapping[int, float]:
    """Token ids and biases out of flags such as `1234=-2.5`, `1234=+3` or `1234=-inf`.

    Raises: UsageError for anything else.
    """
    biases: dict[int, float] = {}
    for flag in flags:
        token_id, separator, bias = flag.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            separator = ""
        if not separator:
            raise UsageError(f"--logit-bias is {flag!r}, expected a token id, =, and a number, such as 1234=-2.5")
    return biases


def _parse_order(flag: str) -> tuple[str, ...]:
    """Names with commas or, as llama.cpp has it, semicolons between them; `-` in a name is `_`."""
    names = tuple(name.strip().replace("-", "_") for name in re.split("[,;]", flag))
    if not all(names):
        raise UsageError(f"--sampler-order is {flag!r}, expected names of steps with commas between them")
    return names


def _parse_breakers(flags: Sequence[str]) -> tuple[str, ...]:
    for flag in flags:
        if not flag:
            raise UsageError(f"--dry-breaker is empty; give it a text, or {NO_BREAKERS} for no breaker at all")
        refuse_undecoded(flag, "--dry-breaker")
    return tuple(dict.fromkeys(flag for flag in flags if flag != NO_BREAKERS))
