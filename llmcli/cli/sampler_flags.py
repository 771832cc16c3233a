"""Sampler settings that are no single number: `--logit-bias`."""

from collections.abc import Mapping, Sequence

from llmcli.errors import UsageError


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
