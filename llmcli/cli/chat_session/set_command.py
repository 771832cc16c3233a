"""`/set NAME VALUE`: sampling parameters and the few other settings of a conversation."""

from llmcli.cli.chat_session.outcome import Outcome
from llmcli.cli.chat_session.state import Talk, overflow_policy, thinking_view
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError
from llmcli.sampling.params import SPECS, check_param


def set_value(state: Talk, argument: str) -> Outcome:
    """Change one setting for the answers from now on.

    Raises: UsageError for an unknown name or a value out of range.
    """
    name, _, value = argument.partition(" ")
    name, value = name.replace("-", "_").lower(), value.strip()
    if name not in NAMES:
        raise UsageError(f"/set {name or 'NAME VALUE'}: expected one of {', '.join(NAMES)}, and a value")
    if name in SPECS:
        state.set_number(name, check_param(name, _number(name, value)))
    elif name == "seed":
        state.set_seed(_integer(name, value))
    elif name == "max_new_tokens":
        limit = None if value == "none" else _integer(name, value)
        if limit is not None and limit < 1:
            raise UsageError(f"max_new_tokens is {limit}, expected 1 or more, or none")
        state.set_max_new_tokens(limit)
    elif name == "overflow":
        state.set_overflow(overflow_policy("overflow", value))
    elif name == "thinking":
        state.thinking = thinking_view("thinking", value)
    else:
        if value not in ("on", "off"):
            raise UsageError(f"markdown is {value!r}, expected on or off")
        state.is_markdown = value == "on"
    terminal.info(f"{name} is {value}")
    return Outcome()


def _number(name: str, text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}, expected {SPECS[name].expected}") from None


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}, expected an integer") from None


NAMES = (*SPECS, "seed", "max_new_tokens", "overflow", "thinking", "markdown")
