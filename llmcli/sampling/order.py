"""The order of the filters: the usual one, and which others are allowed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmcli.errors import UsageError
from llmcli.sampling.params import ResolvedSampling, SamplingParams

# The filters in their usual order, each with the values of its parameters at which it does nothing.
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

    mirostat comes last where it is named: it measures the surprise of what is drawn from its own candidates. At
    temperature 0 no filter runs, so that any may be missing.

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
    """Switch off the filters that an order of the user's leaves out, as far as only our defaults had them on.

    What somebody has set stays, so that `check_order` refuses it.
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
