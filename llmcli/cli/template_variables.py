"""The values of `--template-var`: variables for chat templates, such as `enable_thinking=false`."""

import json
from collections.abc import Sequence
from typing import Any

from llmcli.cli.prompt import refuse_undecoded
from llmcli.errors import UsageError
from llmcli.reading import check_value

_ALMOST_JSON = ("true", "false", "null", "none")


def parse_template_variables(flags: Sequence[str] | None) -> dict[str, Any]:
    """The variables by name. A value is JSON; what is not JSON is a text.

    Raises: UsageError for a flag without a name or a value, for a name that is given twice, and for a word such as
    False, which as a text would mean the opposite.
    """
    variables: dict[str, Any] = {}
    for flag in flags or ():
        refuse_undecoded(flag, "--template-var")
        name, equals, value = flag.partition("=")
        if not (equals and name.isidentifier()):
            raise UsageError(f"--template-var is {flag!r:.80}, expected NAME=VALUE, such as enable_thinking=false")
        if name in variables:
            raise UsageError(f"--template-var gives {name} twice")
        variables[name] = _value(name, value)
    return variables


def _value(name: str, value: str) -> Any:
    try:
        loaded = json.loads(value)
    except RecursionError:
        raise UsageError(f"--template-var {name} is nested too deeply") from None
    except ValueError:
        if value.lower() in _ALMOST_JSON:
            raise UsageError(f"--template-var {name} is {value!r}, expected JSON: true, false or null") from None
        return value
    try:
        check_value(loaded)
    except ValueError as error:
        raise UsageError(f"--template-var {name}: {error}") from error
    return loaded
