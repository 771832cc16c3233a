"""What Typer finds wrong with the arguments, in our words; a sentence that is not known here stays Typer's."""

import re

import typer

# Typer's sentence, and ours.
_SENTENCES = (
    (r"Invalid value for (.+): Input should be a valid integer\b.*", r"\1: expected an integer"),
    (
        r"Invalid value for (.+): Unable to parse input string as an integer, exceeded.*",
        r"\1: expected a smaller integer",
    ),
    (r"Invalid value for (.+): Input should be a valid number\b.*", r"\1: expected a number"),
    (r"Invalid value for (.+): Input should be greater than or equal to (.+)", r"\1: expected at least \2"),
    (r"Invalid value for (.+): Input should be less than or equal to (.+)", r"\1: expected at most \2"),
    (r"Option (.+) requires an argument", r"\1 needs a value"),
    (r"Option (.+) does not take a value", r"\1 takes no value"),
    (r"Missing argument (.+)", r"missing argument: \1"),
    (r"Missing command", "no command given"),
    (r"Got unexpected extra argument\(?s?\)? \((.+)\)", r"unexpected argument: \1"),
    (r"No such option: (.+)", r"no such option: \1"),
)


def usage_message(error: typer.TyperException) -> str:
    """The error's message, on one line and with the command whose help says more."""
    message = " ".join(error.format_message().split()).rstrip(".")
    for theirs, ours in _SENTENCES:
        if match := re.fullmatch(theirs, message):
            message = match.expand(ours).replace("'", "")
    context = getattr(error, "ctx", None)
    return f"{message} (see {context.command_path if context else 'llmcli'} --help)"
